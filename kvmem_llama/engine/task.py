"""The handle of one piece of work on the owner thread: wait for it, cancel it, watch it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from .events import CAPACITY, EventQueue
from .requests import F32, Phase, TaskGenerator
from .sequences import Resident

T = TypeVar("T")

_numbers = itertools.count(1)


class TaskState(Enum):
    QUEUED = "queued"  # waits for a sequence id
    RUNNING = "running"
    DONE = "done"  # has a result or an error


class Task(Generic[T]):
    """Work submitted to an engine. Every public method may be called from any thread."""

    def __init__(
        self,
        make: Callable[[Any], TaskGenerator[T]],
        resident: Resident | None = None,
        on_event: Callable[[object], None] | None = None,
        wake: Callable[[], None] = lambda: None,
        event_capacity: int = CAPACITY,
    ) -> None:
        """make: called with the EngineCore on the owner thread when the task is admitted.
        resident: what may keep its cells between tasks; None: the task frees its own before it ends.
        on_event: called with each event on the owner thread; must be quick, its errors are the task's.
        wake: makes the owner thread look at its tasks.
        event_capacity: events that a reader may lag behind.
        """
        self.number: Final = next(_numbers)
        self.make = make
        self.resident = resident
        self.seq = -1  # sequence id while running
        # Set by its generator: called with the logits of every token of each of its batches, [n_vocab] each,
        # which are valid within the call only.
        self.on_logits: Callable[[Phase, Sequence[F32]], None] | None = None
        self.state = TaskState.QUEUED
        self._events = EventQueue(wake, event_capacity)
        self._on_event = on_event
        self._wake = wake
        self._cancel = threading.Event()
        self._stop = threading.Event()
        self._finished = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._owner: int | None = None  # identity of the thread that runs it
        self._ending = threading.Lock()  # of the next one; held for an instant only
        self._when_done: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """What `result` would raise; None while the task runs or if it succeeded."""
        return self._error

    def result(self, timeout: float | None = None) -> T:
        """Waits for the task (seconds; None: as long as it takes) -> what its generator returned.

        Raises what the generator raised, Cancelled, EngineClosed, or TimeoutError (the task goes on).
        """
        if self._owner == threading.get_ident() and not self.done:
            raise RuntimeError("the owner thread cannot wait for a task that it runs")
        self._events.abandon()
        if not self._finished.wait(timeout):
            raise TimeoutError(f"task {self.number} is still {self.state.value} after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """Rolls the task back before its next llama_decode call; `result` then raises Cancelled."""
        self._cancel.set()
        self._wake()

    def stop(self) -> None:
        """Asks the task to end early and keep what it has; it looks at `stop_requested` where it can.

        A task that has not started yet has nothing to keep: the same as `cancel`.
        """
        self._stop.set()
        self._wake()

    def wake(self) -> None:
        """Makes the owner thread look whether what the task waits for has come."""
        self._wake()

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    @property
    def cancel_requested(self) -> bool:
        return self._cancel.is_set()

    def events(self) -> Iterator[object]:
        """Events of the task as they come, until it ends. One reader at a time."""
        return self._events.read()

    def watch_events(self, told: Callable[[], None]) -> None:
        """As `events`, for a reader that must not wait: `told` is called, by any thread, when `take_events`
        has something to take after it had nothing, and when the task ends. Until `unwatch_events`."""
        self._events.watch(told)

    def take_events(self) -> tuple[list[object], bool]:
        """All events there are now -> (events, none will follow)."""
        return self._events.take()

    def unwatch_events(self) -> None:
        self._events.unwatch()

    def when_done(self, told: Callable[[], None]) -> None:
        """Calls `told` once, when the task has ended: at once, or on the thread that ends it. It must be
        quick and raise nothing."""
        with self._ending:
            if not self.done:
                self._when_done.append(told)
                return
        told()

    @property
    def n_events_dropped(self) -> int:
        """Events lost because nobody read them."""
        return self._events.n_dropped

    # What follows is for the engine, on the owner thread.

    @property
    def behind(self) -> bool:
        """The reader of the events is far behind: do not go on with the task for now.

        Never so for a task that is to end: its end must not wait for a reader who may have gone.
        """
        return self._events.behind and not (self.cancel_requested or self.stop_requested)

    def start(self, seq: int) -> None:
        self._owner = threading.get_ident()
        self.seq = seq
        self.state = TaskState.RUNNING

    def emit(self, event: object) -> None:
        if self._on_event is not None:
            self._on_event(event)
        self._events.put(event)

    def finish(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Ends the task, once; waiters wake up."""
        if self.done:
            return
        self._result, self._error = result, error
        self.state = TaskState.DONE
        self.seq = -1
        self._events.close()
        with self._ending:
            self._finished.set()
            told, self._when_done = self._when_done, []
        for call in told:
            call()
