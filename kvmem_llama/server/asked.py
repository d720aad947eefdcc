"""One prompt as it was asked: its tokens, how its answer is sampled, which of it may be its query."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine.chat_template import ChatTemplate, Turn
from ..engine.grammar import AnswerGrammar, Constraint
from ..engine.sampling_params import SamplingParams
from ..engine.templates import CONTENT_ONLY, AppliedTemplate
from ..engine.turn_tokens import TurnTokens, tokenize_turn
from ..engine.vocab import Vocab, single_tokens
from ..errors import InvalidOption
from ..memory.recall_params import RecallParams
from ..messages import question_start, tokenize_messages, user_marks
from ..native.layout import I32
from .auth import new_name
from .chat_request import ChatRequest
from .errors import bad_request
from .generation_settings import generation_settings
from .joining import after_other, around, closed_first, joined_at, said, without_preamble
from .schema import TRIGGERS, Generation, json_type

MEMORY_KEYS: Final = ("workspace", "recall", "report")  # of the field `kvmem`
WORKSPACE_HEADER: Final = "x-kvmem-workspace"
_INSTRUCTS: Final = ("system", "developer")
_NEXT_ROLES: Final = ("user", "tool")


@dataclass(frozen=True, slots=True)
class Whole:
    """All tokens of a prompt, with what of them is text."""

    tokens: I32  # [n]
    question: int | None = None  # index of the first one of the newest message; None: nobody knows
    scored: NDArray[np.bool_] | None = None  # [n]
    user: NDArray[np.bool_] | None = None  # [n]
    n_head: int = 0  # tokens of instructions and tool definitions, which come first; 0: nobody knows


class Prompt(Protocol):
    """What is to be answered."""

    wanted: I32
    """Its tokens, [n], as the tokenizer makes them."""
    applied: AppliedTemplate | None
    """The chat template that made it; None: it is a text as it is."""
    n_after: int
    """How many of a prompt's tokens are the template's, after the newest message, however it is asked for."""
    tells_past: bool
    """It holds what was answered before; else it may be the next message alone."""

    def over(self, stored: I32) -> Whole:
        """With the ids that are stored where the text is the same."""
        ...

    def appended(self, stored: I32, answer: str) -> Whole:
        """After a history that it does not belong to, whose last answer was `answer`; its own tokens only."""
        ...

    def joined_at(self, stored: I32, prompt_end: int) -> int:
        """Where in a history a conversation begins that it goes on with, after something else; 0: nowhere.
        prompt_end: tokens of the history before its last answer."""
        ...

    def joined(self, stored: I32) -> Whole:
        """As `over`, after something else. stored: from there on; its own tokens only."""
        ...

    def text(self) -> str: ...


class TextPrompt:
    """A prompt as it is."""

    def __init__(self, vocab: Vocab, tokens: I32) -> None:
        self.wanted: I32 = tokens
        self.applied: AppliedTemplate | None = None
        self.n_after: int = 0
        self.tells_past: bool = True
        self._vocab: Final = vocab

    def over(self, stored: I32) -> Whole:
        return Whole(self.wanted)

    def appended(self, stored: I32, answer: str) -> Whole:
        has_bos = self._vocab.add_bos and len(stored) > 0 and int(self.wanted[0]) == self._vocab.bos
        return Whole(self.wanted[1:] if has_bos and len(self.wanted) > 1 else self.wanted)

    def joined_at(self, stored: I32, prompt_end: int) -> int:
        return 0  # a text says nothing of where it belongs

    def joined(self, stored: I32) -> Whole:
        return self.appended(stored, "")

    def text(self) -> str:
        return self._vocab.detokenize(self.wanted).decode("utf-8", "replace")


class ChatPrompt:
    """Messages in the model's chat template."""

    def __init__(self, vocab: Vocab, template: ChatTemplate, chat: ChatRequest, *, is_explicit: bool) -> None:
        """is_explicit: the request says itself that its last message is to be continued; then a stream has
        only what is new. Raises InvalidRequest or TemplateUnsupported."""
        self._vocab: Final = vocab
        self._template: Final = template
        self._chat: Final = chat
        self._turn: Final = template.turn("", chat.messages, options=chat.options)
        applied = self._turn.applied
        if applied.is_continuation and not is_explicit:
            applied = replace(applied, is_continuation=False)
        self.applied: AppliedTemplate | None = applied
        self.wanted: I32 = vocab.tokenize(self._turn.text, add_bos=True)
        self.n_after: int = len(vocab.tokenize(around(template)[1]))
        self.tells_past: bool = any(message["role"] == "assistant" for message in chat.messages)

    def over(self, stored: I32) -> Whole:
        return self._whole(self._turn, tokenize_messages(self._vocab, self._turn, stored))

    def appended(self, stored: I32, answer: str) -> Whole:
        turn, chat, vocab = self._turn, self._chat, self._vocab
        if len(stored) and all(message["role"] in _NEXT_ROLES for message in chat.messages):
            turn = after_other(vocab, self._template, stored, answer, chat.messages, chat.options)
        elif len(stored):
            turn = closed_first(vocab, self._template, stored, answer, self._joined)
        tokens = tokenize_turn(vocab, turn.text, turn.spans, add_bos=not len(stored))
        return self._whole(turn, tokens)

    def joined_at(self, stored: I32, prompt_end: int) -> int:
        if not self.tells_past:
            return 0
        first = said(self._chat.messages[0])
        return joined_at(self._vocab, self._joined, first, stored, prompt_end, n_after=self.n_after)

    def joined(self, stored: I32) -> Whole:
        vocab, turn = self._vocab, self._joined
        if not vocab.add_bos:
            return self._whole(turn, tokenize_messages(vocab, turn, stored))
        # As if it stood at the beginning, with the token that comes first there.
        begun = np.concatenate([np.array([vocab.bos], np.int32), stored])
        whole = self._whole(turn, tokenize_messages(vocab, turn, begun))
        return Whole(
            whole.tokens[1:],
            None if whole.question is None else max(whole.question - 1, 0),
            None if whole.scored is None else whole.scored[1:],
            None if whole.user is None else whole.user[1:],
        )

    @functools.cached_property
    def _joined(self) -> Turn:
        return without_preamble(self._template, self._turn, self._chat.messages, self._chat.options)

    def _whole(self, turn: Turn, tokens: TurnTokens) -> Whole:
        return Whole(
            tokens.tokens,
            question_start(turn, tokens, len(tokens.tokens)),
            tokens.scored,
            user_marks(self._vocab, turn, tokens.tokens),
            self._n_head,
        )

    def text(self) -> str:
        return self._turn.text

    @functools.cached_property
    def _n_head(self) -> int:
        """Tokens before the first message that is no instruction: instructions, and definitions of tools."""
        messages, text, at = self._chat.messages, self._turn.text, 0
        for message in messages:
            content = said(message)
            found = text.find(content, at) if content else -1
            if message["role"] not in _INSTRUCTS:
                is_headed = message is not messages[0] or bool(self._chat.options.tools)
                return len(self._vocab.tokenize(text[:found])) if is_headed and found > 0 else 0
            at = max(found + len(content), at)
        return 0


@dataclass(frozen=True, slots=True)
class Constraints:
    """How the answers to a prompt are sampled and where they end."""

    sampling: SamplingParams
    stop: tuple[str, ...]
    preserved: frozenset[int]
    ends: tuple[int, ...] = ()  # tokens that would end the answer, where the request has them ignored

    @classmethod
    def of(
        cls, vocab: Vocab, generation: Generation, chat: ChatRequest | None, prompt: Prompt
    ) -> Constraints:
        """What the request asks for, with what the template does. Raises ApiError (400) for a grammar that is
        none."""
        ends = vocab.eogs if generation.sampling.ignore_eos else ()
        found = cls(generation.sampling, generation.stop, generation.preserved, ends)
        applied = prompt.applied
        if applied is not None and chat is not None:
            options = chat.options
            found = cls(
                applied.sampling(
                    generation.sampling,
                    budget=options.reasoning_budget,
                    message=options.reasoning_budget_message,
                ),
                (*generation.stop, *applied.additional_stops),
                single_tokens(vocab, applied.preserved_tokens),
                ends,
            )
        _check_grammar(vocab, found.sampling.grammar)
        return found

    def seeded(self, number: int) -> SamplingParams:
        """Of the answer with this number to the same prompt: another seed, if the request gives one."""
        seed = self.sampling.seed
        is_random = seed in (-1, 2**32 - 1)
        return (
            self.sampling if is_random or not number else replace(self.sampling, seed=(seed + number) % 2**32)
        )

    def settings(self, generation: Generation, prompt: Prompt) -> dict[str, Any]:
        """llama-server's generation_settings."""
        applied = prompt.applied or CONTENT_ONLY
        sampling = self.sampling
        grammar = sampling.grammar
        text = grammar if isinstance(grammar, str) else grammar.grammar
        triggers = () if isinstance(grammar, str) else grammar.triggers
        return generation_settings(
            sampling,
            n_predict=generation.n_predict,
            stream=generation.stream,
            chat_format=applied.format_name,
            reasoning_format=generation.reasoning_format,
            generation_prompt=applied.generation_prompt or generation.generation_prompt,
            timings_per_token=generation.timings_per_token,
            n_keep=generation.n_keep,
            n_discard=generation.n_discard,
            details={
                "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
                "stop": list(self.stop),
                "logit_bias": [
                    # JSON has no infinity, and llama-server's null is what its library makes of one.
                    {"bias": bias if np.isfinite(bias) else None, "token": token}
                    for token, bias in (*sampling.logit_bias, *((token, -np.inf) for token in self.ends))
                ],
                "grammar": text,
                "grammar_lazy": not isinstance(grammar, str) and grammar.lazy,
                "grammar_triggers": [
                    {"type": TRIGGERS.index(trigger.type), "value": trigger.value}
                    | ({"token": trigger.token} if trigger.type == "token" else {})
                    for trigger in triggers
                ],
                "preserved_tokens": sorted(self.preserved),
            },
        )


def _check_grammar(vocab: Vocab, grammar: str | AnswerGrammar) -> None:
    """Before a prompt is evaluated, and before a stream begins."""
    if not grammar:
        return
    try:
        Constraint(vocab, AnswerGrammar(grammar) if isinstance(grammar, str) else grammar, None).close()
    except InvalidOption:
        raise bad_request("Failed to initialize samplers: failed to parse grammar") from None


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What a request says of the memory it is answered in: its field `kvmem`, or a header."""

    owner: str = ""
    name: str | None = None  # in the store
    recall: RecallParams | None = None
    report: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any], header: str | None, owner: str) -> MemoryRequest:
        """header: the value of WORKSPACE_HEADER. Raises ApiError (400), InvalidName."""
        found = body.get("kvmem")
        found = {} if found is None else found
        if not isinstance(found, dict):
            raise bad_request(f"Field 'kvmem': must be an object, but is {json_type(found)}")
        _check_keys("kvmem", found, MEMORY_KEYS)
        name = found.get("workspace", None if header is None else _as_sent(header))
        if name is not None and not isinstance(name, str):
            raise bad_request(f"Field 'kvmem.workspace': must be a string, but is {json_type(name)}")
        report = found.get("report")
        if report is not None and not isinstance(report, bool):
            raise bad_request(f"Field 'kvmem.report': must be true or false, but is {json_type(report)}")
        return cls(
            owner=owner,
            name=new_name(owner, name) if name else None,
            recall=_recall(found.get("recall")),
            report=report is True,
        )


def _as_sent(header: str) -> str:
    """The text of a header, whose bytes were read as Latin-1: UTF-8, if that is what they are."""
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return header


def _check_keys(field: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    """A misspelled key would silently change nothing. Raises ApiError (400)."""
    for key in found:
        if key not in known:
            raise bad_request(f"Field '{field}': unknown key '{key:.60}'; it can have {', '.join(known)}")


def _recall(value: Any) -> RecallParams | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request(f"Field 'kvmem.recall': must be an object, but is {json_type(value)}")
    _check_keys("kvmem.recall", value, tuple(RecallParams.__dataclass_fields__))
    try:
        return RecallParams(**value)
    except (InvalidOption, TypeError) as error:
        raise bad_request(f"Field 'kvmem.recall': {error}") from None
