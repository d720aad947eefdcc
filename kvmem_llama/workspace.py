"""What a program uses: an engine, workspaces on it, and the stream of a running step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

import numpy as np
from numpy.typing import NDArray

from .calibration import find
from .conversation import N_CLOSING, Conversation, Turn, document_text
from .durable import Opened, Shelf
from .engine.chat_template import ChatTemplate, Message
from .engine.core import EngineCore
from .engine.engine import Engine
from .engine.requests import TaskGenerator
from .engine.resources import Resources, open_resources
from .engine.sampler import SamplingParams
from .engine.task import Task
from .errors import EngineClosed, InputError, InvalidOption, ModelUnsupported, WorkspaceBusy, WorkspaceClosed
from .matching import Plan, match
from .memory.attending import AttendedBlock
from .memory.channels import Channels
from .memory.index import mean_of
from .memory.query import StepRequest, query_of, token_ids, token_marks
from .memory.report import Event, StepResult
from .memory.scoring import make_scorer
from .memory.search import SearchResult
from .memory.session import token_source_of
from .messages import Render, messages_of, tokenize_messages, user_marks
from .native.layout import I32
from .occurrence import occurs
from .policies import KVMem, MemoryStats, Policy, make_policy
from .settings import Settings
from .store.binding import Binding
from .store.raw_k import RawK


def open_engine(model_path: str | Path, settings: Settings) -> WorkspaceEngine:
    """Loads a model and starts its owner thread. Close it, or use it in a `with`.

    Raises ModelError, LibraryError, InvalidOption or EngineError.
    """

    def prepare(core: EngineCore) -> None:
        core.scorer = make_scorer(settings)
        core.calibration = find(settings, core.model.info.fingerprint)
        Channels.of(settings, core.calibration)  # an option that cannot be met is told now

    return WorkspaceEngine(lambda: open_resources(model_path, settings, prepare))


class WorkspaceEngine(Engine):
    """An engine with workspaces on it. Any thread."""

    on_rows: Callable[[int, int], None] | None = None
    """Called with (blocks done, all of them) while rows of an index are made from stored records, which takes
    as long as to read these: when a workspace is opened with another score or other heads than before."""

    def __init__(self, make: Callable[[], Resources]) -> None:
        self._shelf_lock = threading.Lock()
        self._shelf: Shelf | None = None
        super().__init__(make)

    def workspace(
        self,
        name: str | None = None,
        *,
        create: bool = True,
        policy: str | None = None,
        system: str | None = None,
        read_only: bool = False,
    ) -> Workspace:
        """A workspace. name: of a durable one, which is opened as it was left, or made if there is none and
        `create` is set; None: an empty one that ends with the engine.

        policy: what its model attends to; None: that of the settings.
        read_only: of a durable one: as it is now, also while somebody else writes to it. Everything but a
        fork works, and all of it is in RAM only: what is stored does not change.
        Raises InvalidOption, ModelUnsupported (the model cannot serve the policy), EngineClosed, or
        StoreError: a durable workspace is not there, is in use, does not fit the model, cannot be read ...
        """
        chosen = policy or self.core.settings.policy
        if name is None:
            if read_only:
                raise InvalidOption("read_only", True, "only a workspace with a name can be read-only")
            memory = self.call(lambda core: make_policy(chosen, core))
            return Workspace(self, memory, Conversation(self.core.model.vocab, self._template(), system))
        if chosen != KVMem.name:
            raise InvalidOption(
                "--policy", chosen, "its workspaces are not kept",
                hint=f"Leave out the name of the workspace, or use --policy {KVMem.name}.",
            )  # fmt: skip
        opened = self.shelf.open(name, create=create, policy=chosen, system=system, read_only=read_only)
        return self._on(opened)

    @property
    def shelf(self) -> Shelf:
        """The durable workspaces of this engine. Raises ModelUnsupported for a model without hooks."""
        core = self.core
        if core.hooks is None:
            raise ModelUnsupported(
                core.model.arch, "its keys cannot be captured",
                hint="Leave out the name: a workspace that ends with the program works.",
            )  # fmt: skip
        with self._shelf_lock:
            if self._shelf is None:
                hooks = core.hooks
                binding = Binding.of(core.model.info, hooks.layers, hooks.layout, core.settings)
                mean = mean_of(hooks.layers, hooks.layout)
                self._shelf = Shelf(
                    core.settings,
                    binding,
                    RawK.of(hooks.layout),
                    mean,
                    means="mean_k" in Channels.of(core.settings, core.calibration),
                    tokens=token_source_of(core),
                    told=lambda done, n: self.on_rows(done, n) if self.on_rows else None,
                )
            return self._shelf

    def close(self) -> None:
        """As Engine.close; then closes the durable workspaces that are still open."""
        super().close()
        with self._shelf_lock:
            if self._shelf is not None:
                self._shelf.close()

    def _on(self, opened: Opened) -> Workspace:
        vocab, restored = self.core.model.vocab, opened.restored
        try:
            memory = self.call(lambda core: KVMem(core, opened))
            conversation = Conversation.resumed(
                vocab, self._template(), restored.system, restored.steps, restored.tokens
            )
        except BaseException:
            self.shelf.close_one(opened)
            raise
        opened.taken_over()
        return Workspace(self, memory, conversation, opened)

    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.core.model.vocab, self.core.model.chat_template)


class Stream:
    """The events of one step while it runs. One reader; the other methods from any thread."""

    def __init__(self, task: Task[StepResult]) -> None:
        self._task = task

    def __iter__(self) -> Iterator[Event]:
        """Events until the step ends; then raises what the step raised, if it failed."""
        for event in self._task.events():
            yield cast(Event, event)
        self._task.result()

    def result(self, timeout: float | None = None) -> StepResult:
        """Waits for the end (seconds; None: as long as it takes). Raises what the step raised: Cancelled,
        MandatoryTooLarge, DecodeFailed ...; or TimeoutError, and the step goes on."""
        return self._task.result(timeout)

    def cancel(self) -> None:
        """Undoes the step, soon; `result` then raises Cancelled."""
        self._task.cancel()

    def stop(self) -> None:
        """Ends the answer, soon, and keeps what there is of it; before it has begun, the same as `cancel`."""
        self._task.stop()

    @property
    def done(self) -> bool:
        return self._task.done


class Workspace:
    """One history and the memory of it. Any thread, but one step at a time: WorkspaceBusy otherwise."""

    def __init__(
        self,
        engine: WorkspaceEngine,
        policy: Policy,
        conversation: Conversation,
        opened: Opened | None = None,
    ) -> None:
        """opened: the durable workspace behind it."""
        self._engine: Final = engine
        self._opened: Final = opened
        self._policy: Final = policy
        self._conversation: Final = conversation
        self._lock = threading.Lock()
        self._closed = False
        self._stream: Stream | None = None  # the newest
        # If it asked: token positions of turn, question and answer.
        self._asked_at: tuple[int, int, int] | None = None
        self._edited: tuple[int, int] | None = None  # if it edits: tokens that stay, tokens there were

    @property
    def name(self) -> str | None:
        """Of a durable workspace."""
        return None if self._opened is None else self._opened.name

    @property
    def read_only(self) -> bool:
        """What is added to it is gone when it is closed, and what is stored does not change."""
        return self._opened is not None and self._opened.read_only

    @property
    def n_tokens(self) -> int:
        """Tokens of the finished steps."""
        return self._policy.n_tokens

    @property
    def n_view(self) -> int:
        """Most tokens the model attends to at once."""
        return self._policy.n_view

    @property
    def system(self) -> str | None:
        """The system prompt of its conversation."""
        return self._conversation.system

    # -- steps

    def read(self, text: str, source: str = "") -> Stream:
        """Appends a text, under the name of its source if it has one."""
        with self._idle():
            text = document_text(source, text) if source else text
            tokens = self._conversation.text_tokens(text, first=not self.n_tokens)
            return self._start(self._policy.read(tokens))

    def has_read(self, text: str, source: str = "") -> bool:
        """Whether the history holds this text already, word for word and under this name, and it is not just
        a few words long."""
        with self._idle():
            text = document_text(source, text) if source else text
            return occurs(self._conversation.text_tokens(text, first=False), self._policy.tokens())

    def read_tokens(self, tokens: Sequence[int] | I32) -> Stream:
        """Appends token ids, [n]. Raises InvalidOption for anything else, naming the first bad one."""
        with self._idle():
            return self._start(self._policy.read(token_ids(tokens, self._n_vocab)))

    def ask(
        self,
        question: str,
        context: Sequence[tuple[str, str]] = (),
        *,
        sampling: SamplingParams,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
    ) -> Stream:
        """Asks a question in the model's chat template and streams the answer.

        context: texts (name, text) that belong to the question; they are read as history.
        max_tokens: -1: no limit. stop: texts at which the answer ends, not part of it.
        """
        with self._idle():
            newest = self._policy.tokens(max(self.n_tokens - N_CLOSING, 0))
            turn = self._conversation.next_turn(question, context, newest)
            request = StepRequest(
                tokens=turn.tokens,
                query_start=turn.question,
                scored=turn.scored,
                sampling=sampling,
                max_tokens=max_tokens,
                stop=(*stop, *self._conversation.stop_strings),
                kind="ask",
            )
            start = self.n_tokens
            stream = self._start(self._policy.step(request))
            self._asked_at = (start, start + turn.question, start + len(turn.tokens))
            return stream

    def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        sampling: SamplingParams,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        render: Render | None = None,
    ) -> Stream:
        """Answers a whole list of messages, of which the history may hold most: only what is new or changed
        is read, and the newest message is the question.

        Where the list differs from the history, the history is edited as `rewrite` does, in one step with
        the answer. messages: Message, or {"role": ..., "content": text}. render: from messages to their text;
        None: the model's chat template, with the workspace's system prompt if the list has none.
        Raises InputError for messages that cannot be answered.
        """
        with self._idle():
            conversation, stored = self._conversation, self._policy.tokens()
            found, vocab = messages_of(messages), self._engine.core.model.vocab
            turn = (render or conversation.render)(found)
            whole = tokenize_messages(vocab, turn, stored)
            user = user_marks(vocab, found, turn, whole.tokens)
            question = min(whole.question, len(whole.tokens) - 1)

            def request(first: int) -> StepRequest:
                return StepRequest(
                    tokens=whole.tokens[first:],
                    query_start=question - first,
                    scored=whole.scored[first:],
                    sampling=sampling,
                    max_tokens=max_tokens,
                    stop=(*stop, *conversation.stop_strings),
                    kind="ask",
                    user=None if user is None else user[first:],
                )

            # Of a long question the beginning is history, but which of it is scored is for the step to say.
            query = question + query_of(request(question), self._engine.core.settings).start
            plan = self._match(stored, whole.tokens[:query])
            if self._reuses_spans:
                plan = plan.with_prefix(question)
            elif plan.prefix > question:
                plan = self._match(stored, whole.tokens[:question])
            first = plan.prefix
            stream = self._go_on(plan, request(first))
            self._asked_at = (first, question, len(whole.tokens))
            return stream

    def step(
        self,
        tokens: Sequence[int] | I32,
        query_start: int = 0,
        scored: NDArray[np.bool_] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        user: NDArray[np.bool_] | None = None,
    ) -> Stream:
        """Appends token ids and streams the answer to them.

        query_start: index of the first one that may belong to the query.
        scored: [n] which of them are text; None: all.
        user: [n] which of these are a user's rather than a tool's; None: all. A step without any is scored
            with the newest text of a user before it, too.
        Raises InvalidOption for tokens that are not [n] ids of the vocabulary, and for bad marks.
        """
        with self._idle():
            ids = token_ids(tokens, self._n_vocab)
            marks = token_marks(scored, len(ids))
            if not 0 <= query_start <= len(ids):
                raise InvalidOption("query_start", query_start, f"the step holds {len(ids)} tokens")
            request = StepRequest(
                tokens=ids,
                query_start=query_start,
                scored=marks,
                sampling=sampling or SamplingParams.of(self._engine.core.settings, self.n_view),
                max_tokens=max_tokens,
                stop=stop,
                user=None if user is None else token_marks(user, len(ids)) & marks,
            )
            return self._start(self._policy.step(request))

    def search(self, text: str, n_blocks: int = 10) -> SearchResult:
        """The blocks that a question with this text would recall, the best first; nothing is appended.

        Raises InvalidOption under a policy without recall; MandatoryTooLarge, Cancelled ... as a step.
        """
        with self._idle():
            if not isinstance(self._policy, KVMem):
                raise InvalidOption(
                    "--policy", self._policy.name, "it has no blocks to search", hint=f"Use {KVMem.name}."
                )
            policy, tokens = self._policy, self._conversation.text_tokens(text, first=False)
            if not len(tokens):
                raise InputError("the search", "it has no text", hint="Give some words.")
            task = self._engine.submit(lambda core: policy.search(tokens, n_blocks), resident=policy)
            return task.result()

    def attended(self) -> tuple[AttendedBlock, ...]:
        """The blocks of the view that the newest tokens of the last answer attended to, the most attended
        first.

        Raises InvalidOption under a policy without recall, InputError if the last step was no question or
        its view is there no more; Cancelled ... as a step.
        """
        with self._idle():
            if not isinstance(self._policy, KVMem):
                raise InvalidOption(
                    "--policy", self._policy.name, "it recalls no blocks", hint=f"Use {KVMem.name}."
                )
            answer_start, end = self._conversation.last_answer
            if end != self.n_tokens:
                what, why = "the attention of the last answer", "something was read since"
                raise InputError(what, why, hint="Ask again, then look.")
            policy = self._policy
            task = self._engine.submit(lambda core: policy.attended(answer_start), resident=policy)
            return task.result()

    # -- the history

    def rewrite(self, tokens: Sequence[int] | I32) -> Stream:
        """Makes the history these token ids, [n]: a common beginning stays, equal spans after it are taken
        over as --reuse says, the rest is read.

        The tokens that are not among them are gone afterwards: `fork` first to keep them. If it fails or is
        cancelled, the history is as it was (under a policy without recall, what was to go is gone). Pins of
        tokens after the common beginning are taken back.

        Raises InvalidOption for tokens that are not ids of the vocabulary.
        """
        with self._idle():
            ids = token_ids(tokens, self._n_vocab)
            plan = self._match(self._policy.tokens(), ids)
            return self._go_on(plan, ids[plan.prefix :])

    def history(self) -> I32:
        """Token ids of the finished steps, [n_tokens]."""
        with self._idle():
            return self._policy.tokens()

    def turns(self) -> tuple[Turn, ...]:
        """Questions that were asked and their answers, oldest first; texts that were read are no turns."""
        with self._idle():
            return self._conversation.turns(self._policy.tokens())

    def truncate(self, n_tokens: int) -> None:
        """Drops all but the first `n_tokens` tokens. Raises InvalidOption if there are fewer."""
        with self._idle():
            was = self.n_tokens
            if not 0 <= n_tokens <= was:
                raise InvalidOption("n_tokens", n_tokens, f"the history holds {was} tokens")
            self._engine.call(lambda core: self._policy.truncate(n_tokens))
            self._conversation.truncate(self._policy.tokens(), was)

    def fork(self, name: str | None = None) -> Workspace:
        """A workspace of its own with the same history; the two share what neither can change.

        name: of the new one; a durable workspace has durable forks only, others have none.
        Raises InvalidOption, also for one that is read-only, or as WorkspaceEngine.workspace.
        """
        with self._idle():
            if self.read_only:
                raise InvalidOption(
                    "fork", name, f"the workspace {self.name!r} is open read-only",
                    hint="Open it for writing to fork it, or open it read-only once more.",
                )  # fmt: skip
            if self._opened is not None:
                if name is None:
                    raise InvalidOption(
                        "name", None, "the fork of a durable workspace needs one", hint="Give it a name."
                    )
                opened, shelf = self._opened, self._engine.shelf
                return self._engine._on(self._engine.call(lambda core: shelf.fork(opened, name)))
            if name is not None:
                raise InvalidOption(
                    "name", name, "this workspace ends with the engine, so do its forks",
                    hint="Leave the name out, or fork a workspace that has one.",
                )  # fmt: skip
            policy = self._engine.call(lambda core: self._policy.fork())
            return Workspace(self._engine, policy, self._conversation.fork())

    def pin(self, start: int, end: int) -> None:
        """Keeps the blocks of the tokens start .. end-1 in every view from now on.

        Raises InvalidOption for tokens that do not exist, MandatoryTooLarge if the pins leave no room.
        """
        with self._idle():
            if not 0 <= start < end <= self.n_tokens:
                raise InvalidOption("pin", f"{start}..{end}", f"the history holds {self.n_tokens} tokens")
            self._engine.call(lambda core: self._policy.pin(start, end))

    def unpin(self, start: int, end: int) -> None:
        """Takes back one `pin` of the same tokens. Raises InvalidOption if there is none."""
        with self._idle():
            self._engine.call(lambda core: self._policy.unpin(start, end))

    def stats(self) -> MemoryStats:
        """Counts and sizes as they are now; also while a step runs."""
        self._refuse_if_closed()
        return self._engine.call(lambda core: self._policy.stats())

    # -- end

    def close(self) -> None:
        """Cancels a running step and frees everything. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            stream = self._stream
        if stream is not None and not stream.done:
            stream.cancel()
            with contextlib.suppress(Exception):
                stream.result()
        try:
            with contextlib.suppress(EngineClosed):
                self._engine.release(self._policy)
                self._engine.call(lambda core: self._policy.close())
        finally:
            if self._opened is not None:
                self._engine.shelf.close_one(self._opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private

    @property
    def _n_vocab(self) -> int:
        return self._engine.core.model.vocab.n_tokens

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """Within: no step runs and none can begin. Raises WorkspaceClosed or WorkspaceBusy."""
        if not self._lock.acquire(blocking=False):
            raise WorkspaceBusy()
        try:
            self._refuse_if_closed()
            if self._stream is not None and not self._stream.done:
                raise WorkspaceBusy()
            self._settle()
            yield
        finally:
            self._lock.release()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise WorkspaceClosed()

    def _settle(self) -> None:
        """Takes note of the turn that the newest step has added, if it succeeded."""
        stream, asked, edited = self._stream, self._asked_at, self._edited
        self._stream = self._asked_at = self._edited = None
        if stream is None:
            return
        result: StepResult | None = None
        with contextlib.suppress(Exception):  # a failed step added nothing; its reader has been told
            result = stream.result()
        if edited is not None and (result is not None or self.n_tokens == edited[0]):
            self._conversation.truncate(self._policy.tokens(0, edited[0]), edited[1])
        if asked is not None and result is not None:
            self._conversation.answered(*asked, result.text, result.tokens)

    def _match(self, stored: I32, wanted: I32) -> Plan:
        return match(stored, wanted, spans=self._reuses_spans)

    @property
    def _reuses_spans(self) -> bool:
        return self._engine.core.settings.reuse == "spans"

    def _go_on(self, plan: Plan, request: StepRequest | I32) -> Stream:
        """A step after the plan's prefix."""
        was = self.n_tokens
        if plan.prefix < was:
            stream = self._start(self._policy.rewrite(plan, request))
            self._edited = (plan.prefix, was)
            return stream
        if isinstance(request, StepRequest):
            return self._start(self._policy.step(request))
        return self._start(self._policy.read(request))

    def _start(self, generator: TaskGenerator[StepResult]) -> Stream:
        task = self._engine.submit(lambda core: generator, resident=self._policy)
        self._stream = Stream(task)
        return self._stream
