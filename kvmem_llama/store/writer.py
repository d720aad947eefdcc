"""The write worker: records go to disk while the next tokens are computed; `flush` waits for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from kvmem_llama.errors import StoreError, StoreFull, WorkspaceClosed

from .disk import DiskStore
from .entries import Entries, Stage
from .location import Location
from .pool import HostPool, State
from .raw_k import RawK
from .records import Record, RecordRef

BATCH_RECORDS: Final = 16  # written before the worker looks up again
SYNC_NBYTES: Final = 64 << 20  # written before a sync, if the queue never empties

Fall = Callable[[Sequence[Location]], None]


class Writer:
    """Writes queued records of one store on a thread of its own, started by the first of them.

    While records are queued faster than they are written they are synced together; when the queue is empty
    they are synced at once, so that a flush after a pause finds nothing to do.
    """

    def __init__(
        self,
        entries: Entries,
        pool: HostPool,
        disk: DiskStore,
        fall: Fall | None,
        raw_k: RawK,
        *,
        stage_out: bool,
        durable: bool,
    ) -> None:
        """See TieredStore."""
        self.n_waits = 0  # flushes that found something to wait for
        self.wait_seconds = 0.0
        self.n_fallen = 0
        self._entries: Final = entries
        self._pool: Final = pool
        self._disk: Final = disk
        self._fall: Final = fall
        self._raw_k: Final = raw_k
        self._stage_out: Final = stage_out
        self._durable: Final = durable
        self._queue: deque[RecordRef] = deque()
        self._written: list[RecordRef] = []  # not synced; used by the worker only
        self._written_bytes = 0
        self._unsettled: set[RecordRef] = set()  # queued, being written, or not synced
        self._failed: dict[RecordRef, BaseException] = {}
        self._is_urgent = False  # somebody waits
        self._is_closing = False
        self._thread: threading.Thread | None = None
        pool.join(self.hurry)

    # -- under the lock of the entries

    def queue(self, ref: RecordRef) -> None:
        """A record that is pending in the pool is to be written. Raises WorkspaceClosed."""
        self.check_open()
        self._failed.pop(ref, None)
        self._entries.live(ref).stage = Stage.QUEUED
        self._unsettled.add(ref)
        self._queue.append(ref)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvmem-write", daemon=True)
            self._thread.start()
        self._entries.changed.notify_all()

    def check_open(self) -> None:
        """Raises WorkspaceClosed."""
        if self._is_closing:
            raise WorkspaceClosed

    def forget(self, ref: RecordRef) -> None:
        """A record is freed; nobody waits for it any more."""
        self._unsettled.discard(ref)
        self._failed.pop(ref, None)

    @property
    def failure(self) -> BaseException | None:
        """Why a record could not be written; None if all could."""
        return next(iter(self._failed.values()), None)

    # -- without it

    def hurry(self) -> None:
        """Somebody waits for records to become evictable."""
        with self._entries.changed:
            self._is_urgent = bool(self._queue)
            self._entries.changed.notify_all()

    def flush(self) -> None:
        """Returns when everything queued so far is written and, unless durability is relaxed, synced. What
        could not be written before is tried again. Raises StoreFull, StoreFailed, or what `fall` raised."""
        began = time.monotonic()
        with self._entries.changed:
            retried = list(self._failed)
            for ref in retried:
                self.queue(ref)
            self._pool.mark([ref.slot for ref in retried], State.PENDING)
            waiting = set(self._unsettled)
            if not waiting:
                return
            self.n_waits += 1
            self._is_urgent = bool(self._queue)
            self._entries.changed.notify_all()
            while not waiting.isdisjoint(self._unsettled):
                self._entries.changed.wait()
            failure = next((self._failed[ref] for ref in waiting if ref in self._failed), None)
            self.wait_seconds += time.monotonic() - began
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Ends the thread. What is still queued is not written."""
        self._pool.part(self.hurry)
        with self._entries.changed:
            self._is_closing = True
            self._entries.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- the worker

    def _run(self) -> None:
        while True:
            with self._entries.changed:
                while not (self._is_closing or (self._queue and (self._stage_out or self._is_urgent))):
                    self._entries.changed.wait()
                if self._is_closing:
                    self._fail(tuple(self._unsettled), WorkspaceClosed())
                    return
                batch, records = self._take()
            # Whatever happens, who waits must learn of it, and the worker must live on.
            try:
                self._disk.files.at("stage_out")
                self._write(batch, records)
            except BaseException as error:
                self._fail_at(Stage.WRITING, batch, error)
            if self._queue and self._written_bytes < SYNC_NBYTES:
                continue
            try:
                self._sync()
            except BaseException as error:
                self._fail_at(Stage.WRITTEN, self._written, error)

    def _take(self) -> tuple[list[RecordRef], list[Record]]:
        """The next records of the queue that are still wanted. Under the lock."""
        batch: list[RecordRef] = []
        records: list[Record] = []
        while self._queue and len(batch) < BATCH_RECORDS:
            ref = self._queue.popleft()
            entry = self._entries.find(ref)
            if entry is None or entry.stage is not Stage.QUEUED:
                continue
            record = self._pool.get(ref.slot)
            if record is None:
                self._fail([ref], RuntimeError(f"the pending record {ref.slot} is not in the host pool"))
                continue
            entry.stage = Stage.WRITING
            batch.append(ref)
            records.append(record)
        self._is_urgent = self._is_urgent and bool(self._queue)
        return batch, records

    def _write(self, batch: list[RecordRef], records: list[Record]) -> None:
        self._make_room(len(batch))
        n_over = min(self._disk.n_over(len(batch)), len(batch))
        written = self._disk.place([self._raw_k.encode(record) for record in records[: len(batch) - n_over]])
        if n_over and written.error is None:
            written.error = StoreFull(
                self._disk.folder,
                n_over * self._disk.format.slot_nbytes,
                0,
                hint="Set a larger --disk-budget, or pin less.",
            )
        with self._entries.changed:
            for ref, location in zip(batch, written.locations, strict=False):
                entry = self._entries.find(ref)
                if entry is None:  # freed while it was written
                    self._disk.give_back(location)
                    continue
                entry.location = location
                entry.stage = Stage.WRITTEN
                self._written.append(ref)
                self._written_bytes += self._disk.format.slot_nbytes
            if written.error is not None:
                self._fail(batch[len(written.locations) :], written.error)

    def _sync(self) -> None:
        failures: Mapping[int, StoreError] = self._disk.sync() if self._durable else {}
        with self._entries.changed:
            done: list[RecordRef] = []
            for ref in self._written:
                entry = self._entries.find(ref)
                if entry is None or entry.location is None:
                    continue
                failure = failures.get(entry.location.segment)
                if failure is None:
                    done.append(ref)
                else:
                    self._disk.give_back(entry.location)  # not to be used again: the segment is sealed
                    entry.location = None
                    self._fail([ref], failure)
            self._written, self._written_bytes = [], 0
            self._unsettled.difference_update(done)
            self._entries.set_stage(done, Stage.DURABLE)
            self._pool.mark([ref.slot for ref in done], State.EVICTABLE)

    def _fail_at(self, stage: Stage, refs: Sequence[RecordRef], error: BaseException) -> None:
        """Those of the records that got no further than `stage` could not be written."""
        with self._entries.changed:
            stuck: list[RecordRef] = []
            for ref in refs:
                entry = self._entries.find(ref)
                if entry is not None and entry.stage is stage:
                    stuck.append(ref)
                    if entry.location is not None:
                        self._disk.give_back(entry.location)
                        entry.location = None
            self._fail(stuck, error)
            if stage is Stage.WRITTEN:
                self._written, self._written_bytes = [], 0

    def _fail(self, refs: Iterable[RecordRef], error: BaseException) -> None:
        """These could not be written. Under the lock."""
        live = self._entries.set_stage([ref for ref in refs if ref in self._unsettled], Stage.FAILED)
        self._unsettled.difference_update(live)
        self._failed.update(dict.fromkeys(live, error))
        self._pool.mark([ref.slot for ref in live], State.STUCK)

    # -- the disk budget

    def _make_room(self, n_more: int) -> None:
        """Lets the coldest unpinned records fall to the tokens tier so that `n_more` fit, if they can."""
        n_over = self._disk.n_over(n_more)
        if not n_over:
            return
        # a few more than needed: every fall is a transaction of the catalog
        n_wanted = n_over + self._disk.budget // self._disk.format.slot_nbytes // 64
        with self._entries.changed:
            found = {
                ref.slot: (ref, entry.location)
                for ref, entry in self._entries
                if entry.stage is Stage.DURABLE
                and not entry.is_pinned
                and entry.location is not None
                and self._disk.owns(entry.location)
            }
        victims = [found[slot] for slot in self._pool.coldest(list(found), n_wanted)]
        if self._fall is not None and victims:
            self._fall([location for _, location in victims])
        with self._entries.changed:
            for ref, location in victims:
                entry = self._entries.find(ref)
                if entry is not None and entry.location == location:
                    entry.stage, entry.location = Stage.TOKENS, None
                    self._pool.drop([ref.slot])
            self._entries.changed.notify_all()
        for _, location in victims:
            self._disk.release(location)
        self.n_fallen += len(victims)
