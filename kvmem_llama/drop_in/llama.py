"""llama_cpp.Llama with its evaluation replaced: tokens are evaluated in a workspace, which has no end.

All else is llama_cpp's own code, which is installed with this package: completions, their chunks, chat
formats, tool calls, JSON schemas, samplers, tokenizers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..errors import InvalidOption
from ..memory.report import StepResult
from ..native.layout import F32, I32
from ..settings import Settings
from ..workspace import open_engine
from . import arguments, stock
from .chat_formats import choose_format
from .evaluation import Evaluation, PromptRows
from .pretrained import Folder, fetch
from .question import question_of
from .sampling import checked_grammar, choose
from .stand_ins import Closed, Context, model_of
from .state import State

_SIGNATURE: Final = inspect.signature(stock.llama.Llama.__init__)


class Llama(stock.llama.Llama):  # type: ignore[misc]
    """See docs/llama_class.md. Not for several threads at once, as llama_cpp's."""

    n_tokens: int
    input_ids: I32  # [n_tokens or more]
    scores: F32  # [as many, n_vocab] with logits_all; else [1, n_vocab], of the last token
    _n_vocab: int
    _requires_eval: bool
    _row: F32  # logits after the last token, [n_vocab]

    def __init__(
        self,
        model_path: str,
        *,
        workspace: str | None = None,
        options: Mapping[str, object] | None = None,
        report: bool = False,
        **kwargs: Any,
    ) -> None:
        """model_path, kwargs: those of llama_cpp.Llama, with its defaults.

        workspace: name of the durable workspace that the tokens are kept in; it is made if there is none.
            None: they end with the object.
        options: options of kvmem_llama by name (docs/options.md); they win over the arguments.
        report: results have a key "kvmem", with what was evaluated and what was recalled.
        Raises InvalidOption for an argument that is not offered, and what open_engine raises.
        """
        given = arguments.given(_SIGNATURE, model_path, kwargs)
        settings, window = arguments.settings_of(given, options or {})
        self._made_with = {**given, "workspace": workspace, "options": options, "report": report}
        self._report = report
        self._question = b""
        self._engine = open_engine(settings.model, settings)
        weakref.finalize(self, self._engine.close)
        with contextlib.ExitStack() as stack:
            stack.callback(self._engine.close)
            self._window: Final = min(window, self._engine.core.model.n_ctx_train)
            opened = stack.enter_context(self._engine.workspace(workspace))
            self._evaluation: Any = Evaluation(opened, self._engine.core, self._window)
            self._set_attributes(given, settings)
            self._adopt(opened.history())
            self._stack = stack.pop_all()

    def _set_attributes(self, given: Mapping[str, Any], settings: Settings) -> None:
        """What the methods of llama_cpp.Llama, and those who use it, read."""
        for name in (
            "verbose", "model_path", "tensor_split", "kv_overrides", "last_n_tokens_size", "lora_base",
            "lora_scale", "lora_path", "spm_infill", "chat_format", "chat_handler", "draft_model", "numa",
        ):  # fmt: skip
            setattr(self, name, given[name])
        self.n_batch = min(self._window, given["n_batch"])
        self.n_threads, self.n_threads_batch = settings.n_threads, settings.n_threads_batch
        self.cache = None
        self._seed = given["seed"] or stock.binding.LLAMA_DEFAULT_SEED
        self._logits_all = given["logits_all"]
        internals = stock.llama.internals
        self._model = model_of(internals, self._engine.core.model, self.model_path, self.verbose)
        me = weakref.proxy(self)  # without a circle the engine goes as soon as the object does
        self._ctx: Any = Context(self._window, lambda: me.reset(), lambda: me._print_timings())
        self.tokenizer_ = given["tokenizer"] or stock.llama.LlamaTokenizer(self)
        self._n_vocab, self._n_ctx = self.n_vocab(), sys.maxsize  # the history has no end
        self._token_nl, self._token_eos = self.token_nl(), self.token_eos()
        self._candidates = internals.LlamaTokenDataArray(n_vocab=self._n_vocab)
        self._sampler = None
        self.metadata = self._model.metadata()
        self._chat_handlers, self.chat_format = choose_format(self)

    # -- evaluation

    def reset(self) -> None:
        """Forgets the tokens; of those that come next, what the workspace holds is not evaluated again."""
        self.n_tokens = 0
        self._requires_eval = True
        self._evaluation.forget()

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens after those there are. Several are a step, which recalls what they ask for; one is
        the next token of its answer."""
        self.n_ctx()  # raises after `close`
        new = np.array(tokens, dtype=np.intc)
        first, end = self.n_tokens, self.n_tokens + len(new)
        if first == end:
            return
        self._make_room(end)
        self.input_ids[first:end] = new
        rows = PromptRows(self.scores[:end], first) if self._logits_all else None
        self._requires_eval = True
        logits = self._evaluation.extend(self.input_ids[:end], first, self._question, rows)
        self.scores[end - 1 if self._logits_all else 0] = logits
        self._row, self.n_tokens = logits, end
        self._requires_eval = False

    @functools.wraps(stock.llama.Llama.sample)
    def sample(self, *args: Any, idx: int | None = None, **kwargs: Any) -> int:
        self.n_ctx()  # raises after `close`
        assert self.n_tokens > 0
        sampler = self._sampler or self._init_sampler(*args, **kwargs)
        return choose(stock.binding, sampler, self._candidates, self._logits_at(idx))

    @functools.wraps(stock.llama.Llama.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Iterator[int]:
        try:
            yield from super().generate(*args, **kwargs)
        finally:
            self._evaluation.finish()

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        checked_grammar(stock.binding, self._model, kwargs.get("grammar"))
        return super()._init_sampler(*args, **kwargs)

    def _logits_at(self, idx: int | None) -> F32:
        """Logits after the token at position `idx`; None: after the last one."""
        if self._requires_eval:
            raise InvalidOption("Llama.sample", True, "no token was evaluated", hint="Call eval first.")
        if idx is None or idx == self.n_tokens - 1:
            return self._row
        if not self._logits_all:
            raise InvalidOption(
                "idx", idx, "only the logits of the last token are kept", hint="Use logits_all=True."
            )
        row: F32 = self.scores[idx]
        return row

    def _make_room(self, n: int) -> None:
        """For `n` tokens, and their logits where all are kept."""
        if n > len(self.input_ids):
            more = max(2 * len(self.input_ids), n)
            self.input_ids = _grown(self.input_ids, self.n_tokens, more)
            if self._logits_all:
                self.scores = _grown(self.scores, self.n_tokens, more)

    def _adopt(self, tokens: I32) -> None:
        """These are the tokens there are; nothing is known of their logits."""
        n_rows = max(self._window, len(tokens))
        self.input_ids = np.zeros(n_rows, dtype=np.intc)
        self.input_ids[: len(tokens)] = tokens
        self.scores = np.zeros((n_rows if self._logits_all else 1, self._n_vocab), dtype=np.single)
        self.n_tokens = len(tokens)
        self._requires_eval = True
        self._evaluation.forget()

    # -- completions

    def _create_completion(self, **kwargs: Any) -> Iterator[Any]:
        return self._complete(self._question, kwargs)

    def _complete(self, question: bytes, kwargs: dict[str, Any]) -> Iterator[Any]:
        n_prompt = self._n_prompt(kwargs["prompt"], kwargs.get("suffix"))
        if not n_prompt:
            raise InvalidOption(
                "prompt", kwargs["prompt"], "it has no tokens", hint="Give a text to go on from."
            )
        if (
            kwargs["max_tokens"] <= 0
        ):  # no limit: to the end of the window, but for a prompt that leaves little
            kwargs["max_tokens"] = max(self._window - n_prompt, self._engine.core.settings.n_reserve)
        n_ctx = n_prompt + kwargs["max_tokens"] + 1  # neither is cut to fit
        chunks = super()._create_completion(**kwargs)
        while True:
            self._question, self._n_ctx = question, n_ctx
            try:
                chunk = next(chunks)
            except StopIteration:
                return
            finally:
                self._question, self._n_ctx = b"", sys.maxsize
            yield self._reported(chunk)

    def _n_prompt(self, prompt: str | Sequence[int], suffix: str | None) -> int:
        """Tokens that llama_cpp makes of them; with a suffix, about as many."""
        text = suffix.encode() if suffix else b""
        n = len(self.tokenize(text, add_bos=False)) + 3 if text else 0
        if not isinstance(prompt, str):
            return n + len(prompt)
        model = self._model
        marks = int(model.add_bos_token()) + int(model.add_eos_token() or model.token_sep() != -1)
        return n + marks + (len(self.tokenize(prompt.encode(), add_bos=False, special=True)) if prompt else 0)

    @functools.wraps(stock.llama.Llama.create_chat_completion)
    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        self._question = question_of(args[0] if args else kwargs["messages"])
        try:
            answer = super().create_chat_completion(*args, **kwargs)
        finally:
            self._question = b""
        return self._reported(answer) if isinstance(answer, dict) else map(self._reported, answer)

    # -- what it tells

    @property
    def last_result(self) -> StepResult | None:
        """What the last finished step has done: tokens by what became of them, recalls, timings."""
        last: StepResult | None = self._evaluation.last
        return last

    def _reported(self, chunk: Any) -> Any:
        """The chunk, with the report in it if that is asked for and it is the last."""
        if self._report and self.last_result and any(c.get("finish_reason") for c in chunk["choices"]):
            chunk["kvmem"] = _facts(self.last_result)
        return chunk

    def _print_timings(self) -> None:
        result = self.last_result
        if result is not None:
            print(f"kvmem: {result.usage}, {result.timings.total:.2f} s", file=sys.stderr)

    def n_ctx(self) -> int:
        """Tokens that a prompt and its answer may have before memory is recalled."""
        n: int = self._ctx.n_ctx()
        return n

    # -- states

    def save_state(self) -> State:
        """The tokens there are, and what was computed for them."""
        self._evaluation.finish()
        return State.of(self)

    def load_state(self, state: Any) -> None:
        """Back to these tokens. What they were computed to is taken over as well, unless the state comes from
        a file or the workspace has a name: then it is computed again where the workspace lacks it."""
        self._seed = state.seed
        if isinstance(state, State):
            state.give_back(self._evaluation)
        self._adopt(state.input_ids[: state.n_tokens])
        if self._logits_all:
            self.scores[: state.n_tokens] = state.scores[: state.n_tokens]

    def __getstate__(self) -> dict[str, Any]:
        return self._made_with

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # -- the end

    def close(self) -> None:
        """Commits what is open and frees everything. Idempotent."""
        try:
            if not self._engine.closed:
                self._evaluation.finish()
        finally:
            self._model = self.tokenizer_ = self._evaluation = self._ctx = Closed()
            self._stack.close()

    def __del__(self) -> None:
        """Nothing: the engine goes with the object, see __init__."""

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: Folder | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: Folder | None = None,
        **kwargs: Any,
    ) -> Llama:
        """A model of the Hugging Face hub; filename, additional_files: names or patterns of its files.

        local_dir_use_symlinks: has no meaning any more for huggingface_hub. kwargs: of the constructor.
        Raises ModelNotFound, with what to do, also where the hub cannot be reached.
        """
        patterns = [filename or "*.gguf", *(additional_files or ())]
        return cls(str(fetch(repo_id, patterns, local_dir, cache_dir)), **kwargs)

    # -- not offered

    embed = arguments.refusal("embed", "no embeddings are made")
    create_embedding = arguments.refusal("create_embedding", "no embeddings are made")
    ctx = property(arguments.refusal("ctx", "the context belongs to the engine's own thread"))
    model_params = property(arguments.refusal("model_params", "the engine makes its own"))
    context_params = property(arguments.refusal("context_params", "the engine makes its own"))


def _grown(array: Any, n_kept: int, n: int) -> Any:
    grown = np.zeros((n, *array.shape[1:]), dtype=array.dtype)
    grown[:n_kept] = array[:n_kept]
    return grown


def _facts(result: StepResult) -> dict[str, Any]:
    recalled = [block for report in result.recalls for block in report.blocks if block.rank is not None]
    return {
        "usage": dataclasses.asdict(result.usage),
        "recalled": [
            {"start": int(b.start), "count": b.count, "rank": b.rank, "age": b.age, "tier": b.tier}
            for b in recalled
        ],
    }


def _signature() -> inspect.Signature:
    """Of the constructor: llama_cpp's arguments and ours."""
    theirs = list(_SIGNATURE.parameters.values())
    ours = inspect.signature(Llama.__init__).parameters
    added = [ours[name] for name in ("workspace", "options", "report")]
    return _SIGNATURE.replace(parameters=[*theirs[:-1], *added, theirs[-1]])


Llama.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
