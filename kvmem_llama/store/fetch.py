"""Records back to the host: what is in the pool at once, the rest from disk, many at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvmem_llama.errors import RecordDamaged, StoreError, StoreFailed

from .disk import DiskStore
from .entries import Entries, Stage
from .location import Location
from .pool import HostPool
from .raw_k import RawK
from .records import NotStored, Record, RecordRef, StaleRecord
from .segment_files import Errors

BATCH_RECORDS: Final = 16  # of a pipelined read; two batches are in memory


@dataclass(slots=True)
class _Reading:
    """Records that are being read."""

    refs: list[RecordRef]
    locations: list[Location]
    buffers: list[Record]  # for the records
    stored: list[Record]  # for their bytes on disk; `buffers` themselves where there is no difference
    admitted: list[bool]
    futures: Sequence[Future[tuple[list[int], Errors]]] = ()
    errors: Errors = field(default_factory=list)


class Fetcher:
    """Reads for one store. Safe to call from several threads."""

    def __init__(self, entries: Entries, pool: HostPool, disk: DiskStore, raw_k: RawK) -> None:
        self.n_hits = 0  # records that were in the pool
        self.n_reads = 0  # records that were read from disk
        self.n_damaged = 0
        self._entries: Final = entries
        self._pool: Final = pool
        self._disk: Final = disk
        self._raw_k: Final = raw_k
        self._flights: dict[RecordRef, Future[None]] = {}  # prefetches under way
        self._frames: list[Record] = []  # staging buffers not in use
        self._lock: Final = threading.Lock()

    def get_many(self, refs: Sequence[RecordRef]) -> list[Record]:
        """See BlockStore."""
        found: dict[RecordRef, Record] = {}
        trouble = _Trouble()
        pending: list[RecordRef] = list(refs)
        while pending:
            missing = self._look(pending, found)
            if missing:
                reading = self._prepare(list(missing), list(missing.values()))
                errors = self._disk.read(reading.locations, reading.stored)
                self._settle(reading, range(len(missing)), errors)
                found.update(self._judge(reading, trouble))
            pending, trouble.changed = trouble.changed, []
        trouble.raise_any()
        return [found[ref] for ref in refs]

    def fetch(self, refs: Sequence[RecordRef]) -> Iterator[list[tuple[int, Record]]]:
        """See BlockStore. Records that are not let into the pool lie in staging buffers, used in turn."""
        found: dict[RecordRef, Record] = {}
        missing = self._look(refs, found)
        places: dict[RecordRef, list[int]] = {}
        for i, ref in enumerate(refs):
            places.setdefault(ref, []).append(i)
        order = sorted(missing, key=lambda ref: (missing[ref].segment, missing[ref].slot))
        batches = [order[i : i + BATCH_RECORDS] for i in range(0, len(order), BATCH_RECORDS)]
        trouble = _Trouble()
        active: list[_Reading] = []
        try:
            for batch in batches[:1]:
                active.append(self._start(batch, [missing[ref] for ref in batch]))
            if found:
                yield [(i, record) for ref, record in found.items() for i in places[ref]]
            for k in range(len(batches)):
                if k + 1 < len(batches):
                    batch = batches[k + 1]
                    active.append(self._start(batch, [missing[ref] for ref in batch]))
                wait(active[0].futures)
                records = self._judge(active[0], trouble)
                if records:
                    yield [(i, record) for ref, record in records.items() for i in places[ref]]
                self._give_frames(active.pop(0))
        finally:
            for reading in active:
                wait(reading.futures)
                self._give_frames(reading)
        for ref in trouble.changed:
            yield [(i, record) for record in self.get_many([ref]) for i in places[ref]]
        trouble.raise_any()

    def prefetch(self, refs: Sequence[RecordRef]) -> int:
        """See BlockStore."""
        with self._entries.changed:
            wanted: dict[RecordRef, Location] = {}
            for ref in refs:
                entry = self._entries.find(ref)
                if entry is not None and entry.stage is Stage.DURABLE and entry.location is not None:
                    wanted[ref] = entry.location
        nbytes = self._raw_k.record_nbytes
        chosen = [ref for ref in wanted if self._pool.admit(ref, nbytes)]
        if not chosen:
            return 0
        reading = self._reading(chosen, [wanted[ref] for ref in chosen], [True] * len(chosen), staged=False)
        with self._lock:
            self._flights.update((ref, Future()) for ref in chosen)

        def done(indices: Sequence[int], errors: Errors) -> None:
            self._settle(reading, indices, errors)
            with self._lock:
                for i in indices:
                    self._flights.pop(chosen[i]).set_result(None)

        self._disk.start(reading.locations, reading.stored, done)
        return len(chosen)

    def close(self) -> None:
        """Waits for prefetches under way."""
        with self._lock:
            flights = list(self._flights.values())
            self._frames.clear()
        wait(flights)

    # -- private

    def _look(self, refs: Sequence[RecordRef], found: dict[RecordRef, Record]) -> dict[RecordRef, Location]:
        """Puts what is in the pool into `found` -> where the rest is. Raises StaleRecord, NotStored."""
        with self._lock:
            flights = [self._flights[ref] for ref in refs if ref in self._flights]
        wait(flights)  # then most of these are in the pool
        missing: dict[RecordRef, Location] = {}
        lost: list[RecordRef] = []
        with self._entries.changed:
            for ref in refs:
                entry = self._entries.live(ref)
                record = self._pool.get(ref.slot)
                if record is not None:
                    found[ref] = record
                    self.n_hits += 1
                elif entry.location is None:
                    lost.append(ref)
                else:
                    missing[ref] = entry.location
        if lost:
            raise NotStored(lost)
        return missing

    def _prepare(self, refs: list[RecordRef], locations: list[Location], *, staged: bool = False) -> _Reading:
        admitted = [self._pool.admit(ref, self._raw_k.record_nbytes) for ref in refs]
        return self._reading(refs, locations, admitted, staged=staged)

    def _reading(
        self, refs: list[RecordRef], locations: list[Location], admitted: list[bool], *, staged: bool
    ) -> _Reading:
        try:
            buffers = [
                self._take_frame() if staged and not is_admitted else self._allocate()
                for is_admitted in admitted
            ]
            stored = buffers
            if not self._raw_k.is_plain:
                stored = [np.empty(self._raw_k.stored_nbytes, np.uint8) for _ in refs]
        except BaseException:  # no memory
            for ref, is_admitted in zip(refs, admitted, strict=True):
                if is_admitted:
                    self._pool.cancel(ref)
            raise
        return _Reading(refs, locations, buffers, stored, admitted, errors=[None] * len(refs))

    def _allocate(self) -> Record:
        return self._pool.memory.allocate(self._raw_k.record_nbytes)

    def _start(self, refs: list[RecordRef], locations: list[Location]) -> _Reading:
        reading = self._prepare(refs, locations, staged=True)
        reading.futures = self._disk.start(
            locations, reading.stored, lambda indices, errors: self._settle(reading, indices, errors)
        )
        return reading

    def _settle(self, reading: _Reading, indices: Sequence[int], errors: Errors) -> None:
        """Records of a transfer are read: those that were admitted enter the pool."""
        for i, error in zip(indices, errors, strict=True):
            if error is None:
                try:
                    self._raw_k.decode(reading.stored[i], reading.buffers[i])
                except Exception as failed:  # no memory: whoever waits for the record must hear of it
                    error = StoreFailed(str(reading.locations[i]), f"it could not be decoded: {failed!r}")
            reading.errors[i] = error
            reading.buffers[i].flags.writeable = False
            if not reading.admitted[i]:
                continue
            if error is None:
                self._pool.fill(reading.refs[i], reading.buffers[i])
            else:
                self._pool.cancel(reading.refs[i])

    def _judge(self, reading: _Reading, trouble: _Trouble) -> dict[RecordRef, Record]:
        """What was read; errors go to `trouble`, unless the record was changed while it was read."""
        records: dict[RecordRef, Record] = {}
        with self._entries.changed:
            for i, (ref, error) in enumerate(zip(reading.refs, reading.errors, strict=True)):
                self.n_reads += error is None
                entry = self._entries.find(ref)
                if error is None:
                    records[ref] = reading.buffers[i]
                elif entry is None:
                    raise StaleRecord(f"record {ref.slot} was freed while it was read")
                elif entry.location != reading.locations[i] or ref.slot in self._pool:
                    trouble.changed.append(ref)
                else:
                    self.n_damaged += isinstance(error, RecordDamaged)
                    trouble.errors[ref] = error
        return records

    def _take_frame(self) -> Record:
        with self._lock:
            if self._frames:
                frame = self._frames.pop()
                frame.flags.writeable = True
                return frame
        return self._allocate()

    def _give_frames(self, reading: _Reading) -> None:
        with self._lock:
            for is_admitted, buffer in zip(reading.admitted, reading.buffers, strict=True):
                if not is_admitted and len(self._frames) < 2 * BATCH_RECORDS:
                    self._frames.append(buffer)


@dataclass(slots=True)
class _Trouble:
    """What went wrong with records of one call."""

    errors: dict[RecordRef, StoreError] = field(default_factory=dict)
    changed: list[RecordRef] = field(default_factory=list)  # they are somewhere else by now

    def __contains__(self, ref: RecordRef) -> bool:
        return ref in self.errors

    def raise_any(self) -> None:
        """Raises an error that may pass, if there is one; else the damage of all that are lost."""
        for error in self.errors.values():
            if not isinstance(error, RecordDamaged):
                raise error
        damaged = [error for error in self.errors.values() if isinstance(error, RecordDamaged)]
        if damaged:
            damaged[0].refs = tuple(self.errors)
            raise damaged[0]
