"""The owner thread's loop: messages, admission of waiting tasks, batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import Cancelled, EngineClosed
from .core import EngineCore
from .scheduler import Scheduler
from .sequences import Resident, Sequences
from .task import Task

Message = Callable[[], None]


class _Alone:
    """Stands for the resident of a task that has none, while it runs."""

    def evict(self) -> None:
        raise AssertionError("a task without a resident keeps no sequence")


class Owner:
    """What runs on the owner thread; all methods are called there, other threads put messages."""

    def __init__(
        self, core: EngineCore, inbox: SimpleQueue[Message], on_end: Callable[[Task[Any]], None]
    ) -> None:
        """inbox: functions to be run between batches. on_end: called with every task before it finishes."""
        self.core = core
        self._inbox = inbox
        self._on_end = on_end
        self.scheduler = Scheduler(core, self._ended)
        self.sequences = Sequences(core.settings.n_parallel)
        self._waiting: deque[Task[Any]] = deque()
        self._residents: dict[int, Resident] = {}  # by task number, while the task runs
        self._stopping = False

    def enqueue(self, task: Task[Any]) -> None:
        """The task waits for a sequence id."""
        self._waiting.append(task)

    def stop(self) -> None:
        """The loop ends before its next batch."""
        self._stopping = True

    def loop(self) -> None:
        """Runs until `stop`."""
        while not self._stopping:
            while self._admit_one():
                pass
            if self.scheduler.has_work:
                self.scheduler.run_batch()
            else:
                self._inbox.get()()
            self._take_messages()

    def close(self, error: EngineClosed) -> None:
        """Ends every task with `error`, the running ones after they have cleaned up."""
        self.scheduler.close(error)
        while self._waiting:
            self._finish_waiting(self._waiting.popleft(), error)

    def _take_messages(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            message()

    def _admit_one(self) -> bool:
        """Starts, or ends, the first waiting task for which that is possible -> whether there was one."""
        for task in self._waiting:
            if task.cancel_requested or task.stop_requested:
                self._waiting.remove(task)
                self._finish_waiting(task, Cancelled())
                return True
            resident = task.resident or _Alone()
            try:
                lease = self.sequences.acquire(resident)
            except Exception as error:  # another resident could not be evicted
                self._waiting.remove(task)
                self._finish_waiting(task, error)
                return True
            if lease is None:
                continue
            self._waiting.remove(task)
            self._residents[task.number] = resident
            if not lease.kept:
                self.core.decoder.remove(lease.seq)  # nothing of the last holder may be left for this one
            self.scheduler.add(task, lease.seq)
            return True
        return False

    def _finish_waiting(self, task: Task[Any], error: Exception) -> None:
        self._on_end(task)
        task.finish(error=error)

    def _ended(self, task: Task[Any]) -> None:
        self.sequences.release(self._residents.pop(task.number), keep=task.resident is not None)
        self._on_end(task)
