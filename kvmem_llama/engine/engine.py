"""An engine: one model, one context, and the owner thread that runs them.

Any thread may submit work; only the owner thread touches llama.cpp, the hooks, the cells and whatever
residents keep there. It takes messages between two batches, so no message waits longer than one batch.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from ..errors import EngineClosed
from .core import EngineCore
from .owner import Message, Owner
from .requests import TaskGenerator
from .resources import Resources
from .scheduler import Observer
from .sequences import Resident
from .task import Task

T = TypeVar("T")


class Engine:
    """Runs tasks over one model. Every public method may be called from any thread."""

    def __init__(self, make: Callable[[], Resources]) -> None:
        """Starts the owner thread, which calls `make`; waits for it and raises what it raises."""
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._lock = threading.Lock()  # of the next four; held for an instant only
        self._closed = False
        self._cause: BaseException | None = None  # what killed the owner thread
        self._open_tasks: set[Task[Any]] = set()
        self._open_calls: set[Future[Any]] = set()
        opened: Future[Owner] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, opened), name="kvmem-engine", daemon=True
        )
        self._thread.start()
        try:
            self._owner = opened.result()
        except BaseException:  # an interrupt, too: what is being loaded must go before the interpreter
            self._thread_is_unwanted(opened)
            raise
        self.core = self._owner.core  # its facts may be read anywhere, all else is the owner thread's
        # A daemon thread, for a program that forgets to close must still end; but it must not be inside
        # llama.cpp while the interpreter goes down.
        atexit.register(self.close)

    def submit(
        self,
        make_task: Callable[[EngineCore], TaskGenerator[T]],
        *,
        resident: Resident | None = None,
        on_event: Callable[[object], None] | None = None,
    ) -> Task[T]:
        """Queues a task; it starts when there is a sequence id for it, first come, first served.

        make_task: called on the owner thread; its generator runs there (engine/requests.py). `core.seq` is
            its sequence id, `core.current_task` the task.
        resident: keeps its cells and its sequence id after the task, until another needs them; its tasks
            run one after the other. A task without one frees its cells before it ends.
        on_event: called on the owner thread with every event of the task.
        Raises EngineClosed.
        """
        task: Task[T] = Task(make_task, resident, on_event, self._wake)
        with self._lock:
            self._refuse_if_closed()
            self._open_tasks.add(task)
            self._inbox.put(lambda: self._owner.enqueue(task))
        return task

    def call(self, function: Callable[[EngineCore], T]) -> T:
        """Runs `function` on the owner thread between two batches -> what it returns; raises what it raises.

        Raises EngineClosed if the engine is closed before its turn comes.
        """
        if threading.current_thread() is self._thread:
            return function(self.core)
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function(self.core))
            except BaseException as error:
                done.set_exception(error)

        with self._lock:
            self._refuse_if_closed()
            self._open_calls.add(done)
            self._inbox.put(run)
        try:
            return done.result()
        finally:
            with self._lock:
                self._open_calls.discard(done)

    def release(self, resident: Resident) -> bool:
        """Evicts an idle resident, gives its sequence id back -> False if it held none or its task runs."""
        return self.call(lambda core: self._owner.sequences.drop(resident))

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` on the owner thread after every llama_decode call -> a function that ends this."""
        forget = self.call(lambda core: self._owner.scheduler.observe(observer))
        return lambda: self._inbox.put(forget)

    @property
    def closed(self) -> bool:
        """No more work is taken."""
        return self._closed

    def close(self) -> None:
        """Ends all tasks with EngineClosed, frees everything, waits for the owner thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._inbox.put(self._owner.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)  # not before: an interrupted wait must not let the interpreter end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _thread_is_unwanted(self, opened: Future[Owner]) -> None:
        def stop(done: Future[Owner]) -> None:
            if done.exception() is None:
                self._inbox.put(done.result().stop)

        opened.add_done_callback(stop)
        self._thread.join()

    def _wake(self) -> None:
        self._inbox.put(lambda: None)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise _closed_error(self._cause) from self._cause

    def _forget_task(self, task: Task[Any]) -> None:
        with self._lock:
            self._open_tasks.discard(task)

    def _run(self, make: Callable[[], Resources], opened: Future[Owner]) -> None:
        """The owner thread."""
        try:
            resources = make()
            owner = Owner(resources.core, self._inbox, self._forget_task)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(owner)
        cause: BaseException | None = None
        try:
            owner.loop()
        except BaseException as error:  # a defect of the engine itself, for tasks keep theirs
            cause = error
        try:
            self._shut_down(owner, resources, cause)
        finally:
            self._fail_the_rest(cause)

    def _shut_down(self, owner: Owner, resources: Resources, cause: BaseException | None) -> None:
        with self._lock:
            self._closed, self._cause = True, cause
        try:
            owner.close(_closed_error(cause))
        finally:
            resources.close()

    def _fail_the_rest(self, cause: BaseException | None) -> None:
        """Whatever is still open will never run: nobody may wait for it for ever."""
        with self._lock:
            tasks, calls = list(self._open_tasks), list(self._open_calls)
            self._open_tasks.clear()
        for task in tasks:
            task.finish(error=_closed_error(cause))
        for call in calls:
            if not call.done():
                call.set_exception(_closed_error(cause))


def _closed_error(cause: BaseException | None) -> EngineClosed:
    if cause is None:
        return EngineClosed()
    error = EngineClosed(f"the engine's owner thread died of {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
