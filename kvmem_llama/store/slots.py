"""Which slots of the segments are free, and how often each was used. Every operation is O(1).

    free -> provisional    take: a record is being written, no row of the catalog names it
    provisional -> free    give_back: it was freed, or could not be written
    provisional -> kept    keep: a durable row names it
    kept -> free           release: no durable row names it any more

A reader may meet a slot that was used again meanwhile: the checksum, seeded with the generation, tells.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from .segment import SegmentRow


class Use(IntEnum):
    """What a slot is used for."""

    FREE = 0
    PROVISIONAL = 1
    KEPT = 2


@dataclass(frozen=True, slots=True)
class Taken:
    """A slot that was taken, with the generation of the record that goes there."""

    segment: int
    slot: int
    generation: int


class _Segment:
    def __init__(self, row: SegmentRow) -> None:
        self.row = row
        self.generations = array("Q", bytes(8 * row.n_slots))
        self.use = bytearray(row.n_slots)
        self.n_used = 0  # slots that are not free
        self.is_open = True  # slots may be taken


class Slots:
    """The slots of segments that this process may write to. Safe to call from several threads."""

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._free: dict[int, list[int]] = {}  # by segment; only open segments with free slots, oldest first
        self._lock: Final = threading.Lock()
        self._n_used = 0

    # -- segments

    def add(self, row: SegmentRow, slots: Iterable[tuple[int, int, bool]] = ()) -> None:
        """A segment; `slots` are (slot, generation, used) of those that were ever written."""
        segment = _Segment(row)
        for slot, generation, used in slots:
            segment.generations[slot] = generation
            segment.use[slot] = Use.KEPT if used else Use.FREE
        segment.n_used = row.n_slots - segment.use.count(Use.FREE)
        with self._lock:
            self._segments[row.number] = segment
            self._n_used += segment.n_used
            self._list_free(segment)

    def drop(self, number: int) -> None:
        """Forgets a segment."""
        with self._lock:
            segment = self._segments.pop(number, None)
            self._free.pop(number, None)
            if segment is not None:
                self._n_used -= segment.n_used

    def close(self, number: int) -> None:
        """Lets nobody take a slot of a segment any more; records in it stay."""
        with self._lock:
            if number in self._segments:
                self._segments[number].is_open = False
                self._free.pop(number, None)

    def rows(self) -> list[SegmentRow]:
        """All segments, by number."""
        with self._lock:
            return [self._segments[number].row for number in sorted(self._segments)]

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    @property
    def n_used(self) -> int:
        """Slots that are not free, in all segments."""
        return self._n_used

    def n_used_in(self, number: int) -> int:
        """Slots of one segment that are not free."""
        with self._lock:
            return self._segments[number].n_used

    # -- slots

    def take(self, avoid: Iterable[int] = ()) -> Taken | None:
        """A free slot in none of the segments `avoid`; None if there is none."""
        with self._lock:
            number = next((n for n in self._free if n not in avoid), None)
            if number is None:
                return None
            free, segment = self._free[number], self._segments[number]
            slot = free.pop()
            if not free:
                del self._free[number]
            segment.use[slot] = Use.PROVISIONAL
            segment.generations[slot] += 1
            segment.n_used += 1
            self._n_used += 1
            return Taken(number, slot, segment.generations[slot])

    def give_back(self, number: int, slot: int, generation: int, *, last: bool = False) -> bool:
        """A provisional record is gone -> whether its slot was provisional, and so is free now.

        last: take all other free slots of the segment before this one; the drive refused it.
        """
        return self._give(number, slot, generation, Use.PROVISIONAL, last)

    def release(self, number: int, slot: int, generation: int) -> None:
        """No durable row names this record any more."""
        self._give(number, slot, generation, None, False)

    def keep(self, number: int, slot: int, generation: int) -> None:
        """A durable row names this record."""
        with self._lock:
            segment = self._at(number, slot, generation)
            if segment is not None and segment.use[slot] == Use.PROVISIONAL:
                segment.use[slot] = Use.KEPT

    def holds(self, number: int, slot: int, generation: int) -> bool:
        """The record of that generation is in that slot."""
        with self._lock:
            return self._at(number, slot, generation) is not None

    # -- private, under the lock

    def _at(self, number: int, slot: int, generation: int) -> _Segment | None:
        """The segment if the record of that generation is in that slot."""
        segment = self._segments.get(number)
        if segment is None or segment.generations[slot] != generation:
            return None
        return segment if segment.use[slot] in (Use.PROVISIONAL, Use.KEPT) else None

    def _give(self, number: int, slot: int, generation: int, only: Use | None, last: bool) -> bool:
        with self._lock:
            segment = self._at(number, slot, generation)
            if segment is None or (only is not None and segment.use[slot] != only):
                return False
            segment.use[slot] = Use.FREE
            segment.n_used -= 1
            self._n_used -= 1
            if segment.is_open:
                free = self._free.setdefault(number, [])
                free.insert(0 if last else len(free), slot)
            return True

    def _list_free(self, segment: _Segment) -> None:
        free = [slot for slot in range(segment.row.n_slots) if segment.use[slot] == Use.FREE]
        if free:
            self._free[segment.row.number] = free[::-1]  # neighbours in time lie next to each other on disk
