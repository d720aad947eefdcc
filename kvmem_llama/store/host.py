"""The host tier: records in RAM."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .raw_k import RawK
from .records import Record, RecordRef, StaleRecord, StoreStats, Where


@dataclass(slots=True)
class _Slot:
    generation: int = 0
    refs: int = 0
    record: Record | None = None


class HostStore:
    """BlockStore in RAM. A record handed over is kept without a copy."""

    def __init__(self, raw_k: RawK | None = None) -> None:
        """raw_k: records get the rows that they would have on disk; None: they stay as they are."""
        self._raw_k = raw_k
        self._slots: list[_Slot] = []
        self._empty: list[int] = []
        self._lock = threading.Lock()
        self._n_bytes = 0
        self._peak = 0

    def put(self, record: Record) -> RecordRef:
        self._seal(record)
        with self._lock:
            if self._empty:
                number = self._empty.pop()
            else:
                number = len(self._slots)
                self._slots.append(_Slot())
            slot = self._slots[number]
            slot.record = record
            slot.refs = 1
            slot.generation += 1
            self._n_bytes += record.nbytes
            self._peak = max(self._peak, self._n_bytes)
            return RecordRef(number, slot.generation)

    def get(self, ref: RecordRef) -> Record:
        with self._lock:
            record = self._live(ref).record
        assert record is not None
        return record

    def get_many(self, refs: Sequence[RecordRef]) -> list[Record]:
        return [self.get(ref) for ref in refs]

    def fetch(self, refs: Sequence[RecordRef]) -> Iterator[list[tuple[int, Record]]]:
        if refs:
            yield list(enumerate(self.get_many(refs)))

    def prefetch(self, refs: Sequence[RecordRef]) -> int:
        return 0

    def retrieved(self, refs: Sequence[RecordRef]) -> None:
        pass  # nothing is ever evicted

    def where(self, ref: RecordRef) -> Where:
        self.get(ref)
        return "host"

    def is_stuck(self, ref: RecordRef) -> bool:
        return False  # nothing is written

    def pin(self, refs: Sequence[RecordRef], pinned: bool = True) -> None:
        for ref in refs:
            self.get(ref)

    def restore(self, ref: RecordRef, record: Record) -> None:
        self._seal(record)
        with self._lock:
            slot = self._live(ref)
            assert slot.record is not None
            self._n_bytes += record.nbytes - slot.record.nbytes
            slot.record = record

    def share(self, ref: RecordRef) -> None:
        with self._lock:
            self._live(ref).refs += 1

    def free(self, ref: RecordRef) -> None:
        with self._lock:
            slot = self._live(ref)
            slot.refs -= 1
            if slot.refs == 0:
                assert slot.record is not None
                self._n_bytes -= slot.record.nbytes
                slot.record = None
                self._empty.append(ref.slot)

    def refcount(self, ref: RecordRef) -> int:
        with self._lock:
            try:
                return self._live(ref).refs
            except StaleRecord:
                return 0

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(len(self._slots) - len(self._empty), self._n_bytes, self._peak)

    def _seal(self, record: Record) -> None:
        if self._raw_k is not None:
            self._raw_k.round(record)
        record.flags.writeable = False

    def _live(self, ref: RecordRef) -> _Slot:
        if not 0 <= ref.slot < len(self._slots):
            raise StaleRecord(f"no record {ref.slot} among {len(self._slots)}")
        slot = self._slots[ref.slot]
        if slot.refs == 0 or slot.generation != ref.generation:
            raise StaleRecord(
                f"record {ref.slot} has generation {slot.generation} with {slot.refs} references; "
                f"generation {ref.generation} was asked for"
            )
        return slot
