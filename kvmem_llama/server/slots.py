"""The slots of a server: how many requests are answered at once, in which order, and what they are doing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from ..errors import EngineError, WorkspaceError
from ..workspace import Workspace
from .errors import ApiError
from .histories import Histories
from .history import History
from .metrics import MemorySizes
from .state import ServerState

T = TypeVar("T")

_N_MORE_THREADS: Final = 4  # for what is left to do when a slot is free again


class Running(Protocol):
    """A request in a slot."""

    def end(self) -> None:
        """Ends it soon, keeping what there is of its answer. Any thread."""
        ...

    def describe(self) -> dict[str, Any]:
        """What GET /slots shows of it."""
        ...


_IDLE: Final[dict[str, Any]] = {
    "n_prompt_tokens_processed": 0,
    "n_prompt_tokens_cache": 0,
    "next_token": [{"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}],
}
"""What an idle slot shows: no counts of the request before."""


@dataclass(slots=True)
class Slot:
    id: int
    running: Running | None = None
    is_taken: bool = False
    used: int = 0
    last: dict[str, Any] = field(default_factory=dict)  # of the request before, as `describe`
    history: History | None = None  # of the request before


@dataclass(slots=True, eq=False)
class _Waiting:
    id_slot: int  # -1: any
    request: object
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Slot]


class SlotPool:
    """Any thread, but for `acquire`."""

    def __init__(self, state: ServerState) -> None:
        settings = state.engine.core.settings
        self._state: Final = state
        self.histories: Final = Histories(
            state.engine, settings.n_parallel, auto_budget=state.options.auto_budget
        )
        self.slots: Final = tuple(Slot(i) for i in range(settings.n_parallel))
        self._lock: Final = threading.Lock()
        self._idle: Final = threading.Condition(self._lock)
        self._waiting: Final[deque[_Waiting]] = deque()
        self._clock: Final = itertools.count(1)
        self.numbers: Final = itertools.count(1)  # of tasks
        self._stopped = False
        state.metrics.sizes = self._sizes
        self._threads: Final = ThreadPoolExecutor(
            len(self.slots) + _N_MORE_THREADS, thread_name_prefix="kvmem-answer"
        )

    # -- requests

    async def acquire(self, id_slot: int = -1, request: object = None) -> Slot:
        """A slot, when it is this request's turn. id_slot: rather this one, if there is one with this id.
        request: that this is a part of, one of many; None: it is all of it.

        Raises ApiError: 503 when too many wait, when it takes too long, and when the server ends.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            self._refuse_if_stopped()
            if not 0 <= id_slot < len(self.slots):
                id_slot = -1
            slot = self._free(id_slot)
            if slot is not None:
                return slot
            request = request or object()
            if len({w.request for w in self._waiting} | {request}) > self._state.options.max_queue:
                raise ApiError(503, "too many requests are waiting; try again later")
            mine = _Waiting(id_slot, request, loop, loop.create_future())
            self._waiting.append(mine)
        try:
            return await asyncio.wait_for(asyncio.shield(mine.future), self._state.options.timeout)
        except BaseException as error:
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                    given = None
                else:
                    given = mine
            if given is not None:  # it was given a slot at the same moment
                mine.future.add_done_callback(self._give_back)
            if isinstance(error, TimeoutError):
                raise ApiError(503, "no slot was free in time; try again later") from None
            raise

    def release(self, slot: Slot, history: History | None = None) -> None:
        """The request in it has ended. history: where it was answered."""
        with self._lock:
            if slot.running is not None:
                slot.last = slot.running.describe() | _IDLE
            slot.running, slot.is_taken = None, False
            slot.used = next(self._clock)
            slot.history = history or slot.history
            for waiting in list(self._waiting):
                found = self._free(waiting.id_slot)
                if found is not None:
                    self._waiting.remove(waiting)
                    waiting.loop.call_soon_threadsafe(_give, waiting.future, found, self.release)
            self._idle.notify_all()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Runs the blocking part of a request."""
        return self._threads.submit(work)

    def history_of(self, id_slot: int) -> History | None:
        """Where the last request in a slot was answered."""
        with self._lock:
            return self.slots[id_slot].history if 0 <= id_slot < len(self.slots) else None

    def set_history(self, id_slot: int, history: History | None) -> None:
        with self._lock:
            self.slots[id_slot].history = history

    # -- state.Slots

    def describe(self) -> list[dict[str, object]]:
        n_ctx = self._state.facts.n_ctx
        with self._lock:
            return [
                {
                    "id": slot.id,
                    "n_ctx": n_ctx,
                    "speculative": False,
                    "is_processing": slot.is_taken,
                }
                | (slot.running.describe() if slot.running is not None else slot.last)
                for slot in self.slots
            ]

    @property
    def n_idle(self) -> int:
        with self._lock:
            return sum(not slot.is_taken for slot in self.slots)

    def load(self) -> tuple[int, int]:
        with self._lock:
            return sum(slot.is_taken for slot in self.slots), len(self._waiting)

    def workspaces(self) -> list[Workspace]:
        return self.histories.workspaces()

    def borrow(self, name: str) -> AbstractContextManager[Workspace]:
        return self.histories.borrow(name)

    def closed(self, name: str) -> AbstractContextManager[None]:
        return self.histories.closed(name)

    def forget(self, name: str) -> None:
        self.histories.forget(name)

    def stop(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._lock:
            self._stopped = True
            waiting = list(self._waiting)
            self._waiting.clear()
            running = [slot.running for slot in self.slots if slot.running is not None]
        error = ApiError(503, "the server is stopping")
        for one in waiting:
            one.loop.call_soon_threadsafe(_fail, one.future, error)
        for request in running:
            request.end()
        with self._lock:
            while any(slot.is_taken for slot in self.slots):
                left = deadline - time.monotonic()
                if left <= 0 or not self._idle.wait(left):
                    return

    def close(self) -> None:
        with self._lock:
            self._stopped = True
        self.histories.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- private

    def _sizes(self) -> MemorySizes:
        """What the open workspaces take, waiting for the owner thread."""
        core = self._state.engine.core
        tiers, index = {"device": 0, "host": 0, "disk": 0}, 0
        if core.hooks is None:
            return MemorySizes(tiers, index)
        block, record = core.settings.block_size, core.hooks.layout.nbytes
        for workspace in self.histories.workspaces(stored_only=False):
            with contextlib.suppress(WorkspaceError, EngineError):  # closed just now
                stats = workspace.stats()
                index += stats.index_bytes
                tiers["device"] += (stats.n_resident + stats.n_hidden) * record // block
                in_tiers = stats.tiers
                tiers["host"] += stats.store_bytes if in_tiers is None else in_tiers.n_host * record
                tiers["disk"] += 0 if in_tiers is None else in_tiers.disk_bytes
        return MemorySizes(tiers, index)

    def _free(self, id_slot: int) -> Slot | None:
        """A free slot, taken from here on: the one that was used least recently. Under the lock."""
        free = [s for s in self.slots if not s.is_taken and id_slot in (-1, s.id)]
        if not free:
            return None
        slot = min(free, key=lambda s: (s.used, -s.id))
        slot.is_taken, slot.used = True, next(self._clock)
        return slot

    def _give_back(self, future: asyncio.Future[Slot]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.release(future.result())

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise ApiError(503, "the server is stopping")


def _give(future: asyncio.Future[Slot], slot: Slot, release: Callable[[Slot], None]) -> None:
    if future.done():
        release(slot)
    else:
        future.set_result(slot)


def _fail(future: asyncio.Future[Slot], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
