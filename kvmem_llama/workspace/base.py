"""What every workspace is: one history, one step at a time, and an end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from ..conversation import Asked, Conversation
from ..engine.requests import TaskGenerator
from ..engine.task import Task
from ..engine.templates import AppliedTemplate
from ..errors import EngineClosed, WorkspaceBusy, WorkspaceClosed
from ..memory.report import StepResult
from ..policies import Policy
from .running import Answer, Step

if TYPE_CHECKING:
    from ..durable import Opened
    from ..engine.core import EngineCore
    from .engine import WorkspaceEngine

S = TypeVar("S", bound=Step)


class WorkspaceBase:
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
        self._closed = False  # no more calls are taken
        self._freeing = threading.Lock()  # of the next one; held until all is free
        self._freed = False
        self._stream: Step | None = None  # the newest
        self._asked: Asked | None = None  # if it asks
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

    def close(self) -> None:
        """Cancels a running step and frees everything. Idempotent; whoever is interrupted may call it again,
        which frees what is left."""
        with self._lock:
            self._closed = True
        with self._freeing:
            if self._freed:
                return
            try:
                self._end_step()
            finally:  # a Ctrl-C in there, too: the step ends within a batch, and what is left of it must go
                self._free()
            self._freed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_step(self) -> None:
        step = self._stream
        if step is not None and not step.done:
            step.cancel()
            with contextlib.suppress(Exception):
                step.result()

    def _free(self) -> None:
        self._end_step()

        def free(core: EngineCore) -> None:
            self._engine.release(self._policy)
            self._policy.close()

        try:
            with contextlib.suppress(EngineClosed):
                self._engine.call(free)
        finally:
            if self._opened is not None:
                self._engine._close_one(self._opened)

    # -- for the classes above

    @property
    def _n_vocab(self) -> int:
        return self._engine.core.model.vocab.n_tokens

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """Within: no step runs and none can begin. Raises WorkspaceClosed, EngineClosed or WorkspaceBusy."""
        if not self._lock.acquire(blocking=False):
            raise WorkspaceBusy()
        try:
            self._refuse_if_closed()
            self._wait_if_cancelled()
            self._settle()
            yield
        finally:
            self._lock.release()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise (
                WorkspaceClosed()
                if self.name is None
                else WorkspaceClosed(f"the workspace {self.name!r} is closed")
            )
        self._engine._refuse_if_closed()

    def _wait_if_cancelled(self) -> None:
        """The newest step has ended, or is about to. Raises WorkspaceBusy if it runs on."""
        step = self._stream
        if step is None or step.done:
            return
        if not step.ends_soon:
            raise WorkspaceBusy()
        with contextlib.suppress(Exception):
            step.result()

    def _settle(self) -> None:
        """Takes note of the turn that the newest step has added, if it succeeded."""
        stream, asked, edited = self._stream, self._asked, self._edited
        self._stream = self._asked = self._edited = None
        if stream is None:
            return
        result: StepResult | None = None
        with contextlib.suppress(Exception):  # a failed step added nothing; its reader has been told
            result = stream.result()
        if edited is not None and (result is not None or self.n_tokens == edited[0]):
            self._conversation.truncate(self._policy.tokens(0, edited[0]), edited[1])
        if asked is not None and result is not None:
            before = self._policy.tokens(0, asked.answer_start if asked.is_whole else 0)
            self._conversation.answered(asked, result.text, result.tokens, before)

    def _start(self, generator: TaskGenerator[StepResult]) -> Step:
        return self._began(generator, Step)

    def _start_answer(
        self, generator: TaskGenerator[StepResult], applied: AppliedTemplate | None = None
    ) -> Answer:
        """applied: the template that the answer is read in."""
        return self._began(generator, lambda task: Answer(task, applied))

    def _began(self, generator: TaskGenerator[StepResult], handle: Callable[[Task[StepResult]], S]) -> S:
        step = handle(self._engine.submit(lambda core: generator, resident=self._policy))
        self._stream = step
        return step
