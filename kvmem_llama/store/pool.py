"""The host tier: records in RAM within a budget of bytes, shared by the stores of a process.

A record is *pending* from the moment it is put until it is safe on disk, *stuck* if it cannot be written, and
*evictable* otherwise. Pending and stuck records are never evicted: `put` waits for the writer instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final

import numpy as np

from kvmem_llama.native.host_memory import HostMemory

from .heat import NEW, Heat, Policy, Uses, coldest
from .records import Record, RecordRef, StaleRecord

_BATCH: Final = 64  # candidates for eviction ranked at once


class HostFull(Exception):
    """What is in the pool can neither be evicted nor will it be, and `needed` bytes do not fit beside it."""

    def __init__(self, needed: int, budget: int) -> None:
        super().__init__(f"{needed} bytes do not fit the host budget of {budget} bytes")
        self.needed = needed
        self.budget = budget


class State(Enum):
    """Whether a record in the pool may leave it."""

    PENDING = 0
    STUCK = 1
    EVICTABLE = 2


class HostPool:
    """Names records (`RecordRef`) and keeps those that fit. Safe to call from several threads."""

    def __init__(self, budget: int, policy: Policy | None = None, memory: HostMemory | None = None) -> None:
        """budget: bytes of records. memory: for records that are read from disk; if it is pinned, records
        that are put are copied there, too. None: ordinary memory."""
        self.budget: Final = budget
        self.memory: Final = memory or HostMemory()
        self.policy: Final = policy or Heat()
        self.n_evicted = 0
        self.n_waits = 0  # puts that had to wait for the writer
        self.peak_bytes = 0
        self._uses: Final = Uses()
        self._generations: Final[list[int]] = []  # of the record a slot names, or the next one
        self._retired: Final[list[int]] = []  # slots without a record
        self._records: Final[dict[int, Record]] = {}
        self._state: Final[dict[int, State]] = {}
        self._reserved: Final[dict[RecordRef, int]] = {}  # bytes of records that are being read
        self._bytes = dict.fromkeys(State, 0)
        self._reserved_bytes = 0
        self._cold: list[int] = []  # coldest last, as they were ranked at ...
        self._ranked_at = 0  # ... this use
        self._hurry: list[Callable[[], None]] = []
        self._room: Final = threading.Condition()

    # -- names

    def name(self, recent: float = NEW, total: int = 0) -> RecordRef:
        """A new name, with the heat that the catalog remembers or that of a new record."""
        with self._room:
            if self._retired:
                slot = self._retired.pop()
            else:
                slot = len(self._generations)
                self._generations.append(1)
            self._uses.born(slot, recent, total)
            return RecordRef(slot, self._generations[slot])

    def retire(self, ref: RecordRef) -> None:
        """Gives a name back; its record leaves the pool."""
        with self._room:
            self._remove(ref.slot)
            self._generations[ref.slot] += 1
            self._retired.append(ref.slot)

    # -- records

    @property
    def n_bytes(self) -> int:
        """Bytes of all records, those being read included. Never more than the budget."""
        return sum(self._bytes.values()) + self._reserved_bytes

    @property
    def n_records(self) -> int:
        return len(self._records)

    def put(self, ref: RecordRef, record: Record) -> None:
        """Takes a pending record, in the place of one it may have; waits while there is no room for it.
        Raises HostFull if there will be none, StaleRecord if it is retired meanwhile."""
        has_hurried = has_waited = False
        while True:
            with self._room:
                if not self._is_named(ref):
                    raise StaleRecord(f"record {ref.slot} was freed while it was put")
                self._remove(ref.slot)
                if self._make_room(record.nbytes):
                    if self.memory.is_pinned:
                        pinned = self.memory.allocate(record.nbytes)
                        pinned[:] = record
                        record = pinned
                    self._add(ref.slot, record, State.PENDING)
                    return
                if record.nbytes > self.budget or not self._bytes[State.PENDING] + self._reserved_bytes:
                    raise HostFull(record.nbytes, self.budget)
                if has_hurried:
                    self.n_waits += not has_waited
                    has_waited = True
                    self._room.wait()
                    continue
            for hurry in tuple(self._hurry):
                hurry()
            has_hurried = True

    def get(self, slot: int) -> Record | None:
        """The record, if it is here."""
        with self._room:
            record = self._records.get(slot)
            if record is not None:
                self._uses.used(slot)
            return record

    def __contains__(self, slot: int) -> bool:
        return slot in self._records

    def admit(self, ref: RecordRef, nbytes: int) -> bool:
        """Reserves room for a record that is about to be read, if it is warmer than what would have to go.
        Followed by `fill` or `cancel`."""
        with self._room:
            if ref.slot in self._records or ref in self._reserved or not self._is_named(ref):
                return False
            self._uses.used(ref.slot)
            if not self._make_room(nbytes, warmer=ref.slot):
                return False
            self._reserved[ref] = nbytes
            self._reserved_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.n_bytes)
            return True

    def fill(self, ref: RecordRef, record: Record) -> None:
        """An admitted record is read."""
        with self._room:
            self._reserved_bytes -= self._reserved.pop(ref)
            if self._is_named(ref) and ref.slot not in self._records:
                self._add(ref.slot, record, State.EVICTABLE)
            self._room.notify_all()

    def cancel(self, ref: RecordRef) -> None:
        """An admitted record could not be read."""
        with self._room:
            self._reserved_bytes -= self._reserved.pop(ref)
            self._room.notify_all()

    def mark(self, slots: Iterable[int], state: State) -> None:
        """The state of records changes; those that are not here are passed over."""
        with self._room:
            for slot in slots:
                old = self._state.get(slot)
                if old is not None:
                    self._state[slot] = state
                    self._bytes[old] -= self._records[slot].nbytes
                    self._bytes[state] += self._records[slot].nbytes
            self._room.notify_all()

    def drop(self, slots: Iterable[int]) -> None:
        """Evictable records leave the pool; their names stay."""
        with self._room:
            for slot in slots:
                if self._state.get(slot) is State.EVICTABLE:
                    self._remove(slot)

    # -- heat

    def retrieved(self, slots: Sequence[int]) -> None:
        """A recall selected these records, each named once."""
        with self._room:
            self._uses.retrieved(slots)
            self._cold.clear()

    def heat(self, slot: int) -> tuple[float, int]:
        """Recent (decayed) and cumulative retrievals of a record."""
        at = np.array([slot])
        with self._room:
            return float(self._uses.recent(at)[0]), int(self._uses.total(at)[0])

    def coldest(self, slots: Sequence[int], n: int) -> list[int]:
        """The `n` coldest of some records, coldest first."""
        with self._room:
            return coldest(self.policy, self._uses, np.array(slots, np.int64), n)

    # -- who writes

    def join(self, hurry: Callable[[], None]) -> None:
        """A writer of pending records; `hurry` is called when somebody waits for room."""
        with self._room:
            self._hurry.append(hurry)

    def part(self, hurry: Callable[[], None]) -> None:
        """A writer is gone."""
        with self._room:
            self._hurry.remove(hurry)

    # -- private, under the lock

    def _make_room(self, nbytes: int, warmer: int | None = None) -> bool:
        """Evicts records until `nbytes` fit -> whether they do. With `warmer`: only ones colder than it."""
        if (
            nbytes
            > self.budget - self._bytes[State.PENDING] - self._bytes[State.STUCK] - self._reserved_bytes
        ):
            return False
        while self.n_bytes + nbytes > self.budget:
            victim = self._coldest()
            if victim is None:
                return False
            if warmer is not None:
                rank, least = self.policy.ranks(self._uses, np.array([warmer, victim]))
                if rank <= least:
                    return False
            self._cold.pop()
            self._remove(victim)
            self.n_evicted += 1
        return True

    def _coldest(self) -> int | None:
        while self._cold:
            slot = self._cold[-1]
            if self._state.get(slot) is State.EVICTABLE and self._uses.last_of(slot) <= self._ranked_at:
                return slot
            self._cold.pop()
        slots = [slot for slot, state in self._state.items() if state is State.EVICTABLE]
        self._cold = coldest(self.policy, self._uses, np.array(slots, np.int64), _BATCH)[::-1]
        self._ranked_at = self._uses.sequence
        return self._cold[-1] if self._cold else None

    def _is_named(self, ref: RecordRef) -> bool:
        return self._generations[ref.slot] == ref.generation

    def _add(self, slot: int, record: Record, state: State) -> None:
        record.flags.writeable = False
        self._records[slot] = record
        self._state[slot] = state
        self._bytes[state] += record.nbytes
        self._uses.used(slot)
        self.peak_bytes = max(self.peak_bytes, self.n_bytes)

    def _remove(self, slot: int) -> None:
        record = self._records.pop(slot, None)
        if record is not None:
            self._bytes[self._state.pop(slot)] -= record.nbytes
            self._room.notify_all()
