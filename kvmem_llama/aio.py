"""The same for asyncio: Engine, Workspace, Step and Answer, whose methods are awaited.

    async with aio.Engine(n_ctx=2048) as engine, await engine.workspace() as workspace:
        async for event in await workspace.chat("What changed?"):
            ...

What runs on the engine's own thread tells the event loop when there is something to read: a step that is
watched holds no thread. Calls that have to wait for the engine do so in a thread of the loop's executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from . import workspace as sync
from .engine.answer_parser import ParsedMessage
from .errors import EngineClosed
from .fitting import Plan
from .memory.report import Event, FinishReason, RecallReport, StepResult
from .memory.usage import Timings, Usage
from .native.layout import I32
from .option import Value
from .policies import MemoryStats
from .settings import Settings
from .workspace.spans import Span, token_range

T = TypeVar("T")
H = TypeVar("H", bound=sync.Step)
P = ParamSpec("P")

Method = Callable[Concatenate["Workspace", P], Coroutine[Any, Any, T]]


class Step(Generic[H]):
    """Work that runs: its events, its end, and how to end it early. See workspace.Step.

    Leaving an `async for` over it before the end cancels the step, and so does leaving its `async with`, or
    cancelling the asyncio task that waits for it.
    """

    def __init__(self, step: H) -> None:
        self._step = step
        self._waiting = _Waiting()

    def __aiter__(self) -> AsyncIterator[Event]:
        """Events until the step ends; then raises what the step raised, if it failed."""
        return _Events(self._step, self._waiting)

    async def result(self, timeout: float | None = None) -> StepResult:
        """Waits for the end. Raises what the step raised, or TimeoutError after so many seconds, and the step
        goes on."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        self._step.when_done(_on_loop(loop, ended.set))
        try:
            with self._waiting.one_more():
                async with asyncio.timeout(timeout):
                    await ended.wait()
        except asyncio.CancelledError:
            self._step.cancel()
            raise
        return self._step.result()

    def cancel(self) -> None:
        """Undoes the step, soon; `result` then raises Cancelled. Nothing, if it has ended."""
        self._step.cancel()

    def stop(self) -> None:
        """Ends the answer, soon, and keeps what there is of it; before it has begun, the same as `cancel`."""
        self._step.stop()

    @property
    def done(self) -> bool:
        """It has a result, or has failed."""
        return self._step.done

    @property
    def usage(self) -> Awaitable[Usage]:
        """Tokens, by what became of them."""
        return self._of(lambda result: result.usage)

    @property
    def timings(self) -> Awaitable[Timings]:
        """Seconds, by phase."""
        return self._of(lambda result: result.timings)

    async def _of(self, part: Callable[[StepResult], T]) -> T:
        return part(await self.result())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels the step if it still runs, and waits until nothing is left of it."""
        if not self.done:
            self.cancel()
            with contextlib.suppress(Exception):
                await self.result()


class Answer(Step[sync.Answer]):
    """A step that answers. What it gives of the answer is awaited: `await answer.text`."""

    @property
    def text(self) -> Awaitable[str]:
        """The answer, without the stop string."""
        return self._of(lambda result: result.text)

    @property
    def tokens(self) -> Awaitable[tuple[int, ...]]:
        """The answer as it stands in the history, the end token included."""
        return self._of(lambda result: result.tokens)

    @property
    def message(self) -> Awaitable[ParsedMessage | None]:
        """Content, reasoning and tool calls of an answer in the chat template."""
        return self._of(lambda result: result.message)

    @property
    def finish_reason(self) -> Awaitable[FinishReason]:
        """See workspace.Answer."""
        return self._of(lambda result: result.finish_reason)

    @property
    def recall(self) -> Awaitable[tuple[RecallReport, ...]]:
        """See workspace.Answer."""
        return self._of(lambda result: result.recalls)


class _Events(AsyncIterator[Event]):
    """One reader of a step. When it is dropped before the end, or what waits for it is cancelled, the step is
    cancelled."""

    def __init__(self, step: sync.Step, waiting: _Waiting) -> None:
        """waiting: those who wait for the end of the step."""
        self._step = step
        self._waiting = waiting
        self._new = asyncio.Event()
        self._events: deque[Event] = deque()
        self._ended = False
        me = weakref.ref(self)  # what the step holds must not keep this alive
        step.watch(_on_loop(asyncio.get_running_loop(), lambda: _come(me)))
        waiting.reader = me
        self._left = weakref.finalize(self, _leave, step)
        self._left.atexit = False

    async def __anext__(self) -> Event:
        try:
            while not self._events:
                if self._ended:
                    self._left()
                    self._step.result()
                    raise StopAsyncIteration
                self._new.clear()
                self.fill()
                if not self._events and not self._ended:
                    await self._new.wait()
        except asyncio.CancelledError:
            self._step.cancel()  # now: whoever keeps the asyncio task keeps this
            raise
        return self._events.popleft()

    def fill(self) -> None:
        """Takes all events that the step has for its reader."""
        if not self._ended:
            events, self._ended = self._step.take()
            self._events.extend(events)

    def come(self) -> None:
        """There are new events, or there is an end. If the end is waited for, this reader must not hold the
        step back until somebody reads on."""
        if self._waiting.n:
            self.fill()
        self._new.set()


class _Waiting:
    """How many wait for the end of one step, and who reads it meanwhile."""

    def __init__(self) -> None:
        self.n = 0
        self.reader: Callable[[], _Events | None] = lambda: None

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        self.n += 1
        reader = self.reader()
        if reader is not None:
            reader.come()
        del reader
        try:
            yield
        finally:
            self.n -= 1


def _come(reader: Callable[[], _Events | None]) -> None:
    it = reader()
    if it is not None:
        it.come()


def _leave(step: sync.Step) -> None:
    step.unwatch()
    if not step.done:
        step.cancel()


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> Callable[[], None]:
    """What any thread may call to have `function` called on the loop."""

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(function)

    return call


async def _in_thread(
    function: Callable[[], T],
    undo: Callable[[T], object] = lambda made: None,
    left: set[asyncio.Future[Any]] | None = None,
) -> T:
    """Calls `function` where it may wait. undo: called, there too, with what it has made if nobody is there
    to take it any more because the asyncio task was cancelled. left: what is still at work in a thread after
    that, for whoever comes next to wait for."""
    lock, made = threading.Lock(), list[T]()
    given_up = False

    def work() -> T:
        value = function()
        with lock:
            made.append(value)
            is_wanted = not given_up
        if not is_wanted:
            undo(value)
        return value

    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        with lock:
            given_up = True
            unwanted = list(made)
        working: list[asyncio.Future[Any]] = [future]
        if unwanted:
            working.append(loop.run_in_executor(None, undo, unwanted[0]))
        for one in working:
            one.add_done_callback(lambda done: done.cancelled() or done.exception())  # it has been dealt with
            if left is not None:
                left.add(one)
                one.add_done_callback(left.discard)
        raise


def _reading(method: Callable[Concatenate[sync.Workspace, P], sync.Step]) -> Method[P, Step[sync.Step]]:
    async def begin(self: Workspace, /, *args: P.args, **kwargs: P.kwargs) -> Step[sync.Step]:
        return Step(
            await self._alone(lambda: method(self._workspace, *args, **kwargs), lambda step: step.cancel())
        )

    functools.update_wrapper(begin, method)
    return begin


def _answering(method: Callable[Concatenate[sync.Workspace, P], sync.Answer]) -> Method[P, Answer]:
    async def begin(self: Workspace, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        return Answer(
            await self._alone(lambda: method(self._workspace, *args, **kwargs), lambda step: step.cancel())
        )

    functools.update_wrapper(begin, method)
    return begin


def _calling(method: Callable[Concatenate[sync.Workspace, P], T]) -> Method[P, T]:
    async def call(self: Workspace, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._alone(lambda: method(self._workspace, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class Workspace:
    """One history and the memory of it. See workspace.Workspace, whose methods these are."""

    def __init__(self, workspace: sync.Workspace) -> None:
        self._workspace = workspace
        self._left: set[asyncio.Future[Any]] = set()  # cancelled calls that are not done yet

    @property
    def name(self) -> str | None:
        """Of a durable workspace."""
        return self._workspace.name

    @property
    def read_only(self) -> bool:
        """What is added to it is gone when it is closed, and what is stored does not change."""
        return self._workspace.read_only

    @property
    def n_tokens(self) -> int:
        """Tokens of the finished steps."""
        return self._workspace.n_tokens

    @property
    def n_view(self) -> int:
        """Most tokens the model attends to at once."""
        return self._workspace.n_view

    @property
    def system(self) -> str | None:
        """The system prompt of its conversation."""
        return self._workspace.system

    add = _reading(sync.Workspace.add)
    read = _reading(sync.Workspace.read)
    read_tokens = _reading(sync.Workspace.read_tokens)
    rewrite = _reading(sync.Workspace.rewrite)
    chat = _answering(sync.Workspace.chat)
    complete = _answering(sync.Workspace.complete)
    ask = _answering(sync.Workspace.ask)
    prompt = _answering(sync.Workspace.prompt)
    step = _answering(sync.Workspace.step)
    search = _calling(sync.Workspace.search)
    attended = _calling(sync.Workspace.attended)
    has_read = _calling(sync.Workspace.has_read)
    history = _calling(sync.Workspace.history)
    turns = _calling(sync.Workspace.turns)
    tiers = _calling(sync.Workspace.tiers)
    last_message = _calling(sync.Workspace.last_message)
    verify = _calling(sync.Workspace.verify)
    truncate = _calling(sync.Workspace.truncate)

    async def close(self) -> None:
        """Cancels a running step and frees everything. See workspace.Workspace."""
        await _in_thread(self._workspace.close)

    async def stats(self) -> MemoryStats:
        """Counts and sizes as they are now; also while a step runs."""
        return await _in_thread(self._workspace.stats)

    async def fork(self, name: str | None = None) -> Workspace:
        """A workspace of its own with the same history. See workspace.Workspace."""
        return Workspace(await self._alone(lambda: self._workspace.fork(name), lambda made: made.close()))

    @overload
    async def pin(self, span: int, end: int) -> None: ...
    @overload
    async def pin(self, span: Span) -> None: ...
    async def pin(self, span: int | Span, end: int | None = None) -> None:
        """Keeps the blocks of these tokens in every view from now on. See workspace.Workspace."""
        await self._alone(lambda: self._workspace.pin(*token_range(span, end)))

    @overload
    async def unpin(self, span: int, end: int) -> None: ...
    @overload
    async def unpin(self, span: Span) -> None: ...
    async def unpin(self, span: int | Span, end: int | None = None) -> None:
        """Takes back one `pin` of the same tokens. Raises InvalidOption if there is none."""
        await self._alone(lambda: self._workspace.unpin(*token_range(span, end)))

    async def _alone(self, function: Callable[[], T], undo: Callable[[T], object] = lambda made: None) -> T:
        """Calls `function` in a thread, after the calls that were cancelled: they hold the workspace for as
        long as they take."""
        loop = asyncio.get_running_loop()
        while left := [call for call in self._left if call.get_loop() is loop]:
            await asyncio.wait(left)
        return await _in_thread(function, undo, self._left)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Engine:
    """The weights of one model, a context for them, and the store of durable workspaces. See
    workspace.Engine. It is opened by `async with`, or by `open`."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        *,
        notify: Callable[[str], None] | None = None,
        **options: Value,
    ) -> None:
        """Takes note of what `open` is to open. Arguments and errors are those of workspace.Engine."""
        self._make: Callable[[], sync.WorkspaceEngine] = lambda: sync.Engine(
            model, settings, notify=notify, **options
        )
        self._engine: sync.WorkspaceEngine | None = None
        self._opening = asyncio.Lock()
        self._is_ours = True

    @classmethod
    def over(cls, engine: sync.WorkspaceEngine) -> Self:
        """An engine that is open already, and that is not closed with this one."""
        self = cls()
        self._engine, self._is_ours = engine, False
        return self

    async def open(self) -> Self:
        """Loads the model, once, however many ask for it."""
        async with self._opening:
            if self._engine is None:
                self._engine = await _in_thread(self._make, lambda made: made.close())
        return self

    @property
    def plan(self) -> Plan | None:
        """See workspace.Engine."""
        return self._open_one.plan

    async def workspace(
        self,
        name: str | None = None,
        *,
        create: bool = True,
        policy: str | None = None,
        system: str | None = None,
        read_only: bool = False,
    ) -> Workspace:
        """A workspace. See workspace.Engine."""
        engine = self._open_one
        return Workspace(
            await _in_thread(
                lambda: engine.workspace(
                    name, create=create, policy=policy, system=system, read_only=read_only
                ),
                lambda made: made.close(),
            )
        )

    def tokenize(self, text: str, *, special: bool = False) -> I32:
        """See workspace.Engine."""
        return self._open_one.tokenize(text, special=special)

    def detokenize(self, tokens: Sequence[int] | I32, *, special: bool = False) -> str:
        """See workspace.Engine."""
        return self._open_one.detokenize(tokens, special=special)

    async def close(self) -> None:
        """Ends all steps and frees everything. Idempotent."""
        async with self._opening:  # what is being opened must not stay
            engine = self._engine
        if engine is not None and self._is_ours:
            await _in_thread(engine.close)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _open_one(self) -> sync.WorkspaceEngine:
        if self._engine is None:
            raise EngineClosed("the engine is not open", hint="Use it in an `async with`, or await open().")
        return self._engine
