"""Where a record lies on disk, and what the durable side of a workspace asks of the store of records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import xxhash

from .records import Record, RecordRef


class Tier(IntEnum):
    """Where the newest durable copy of a block's KV is."""

    DISK = 0  # a record in a segment
    TOKENS = 1  # nowhere: only token ids and the index row are left, KV is recomputed when wanted


class Origin(IntEnum):
    """How the KV of a block came to be."""

    READ = 0  # evaluated when its tokens were read or generated
    RECOMPUTED = 1  # evaluated again after its record was gone: not a reconstruction
    CARRIED = 2  # taken over from another history


@dataclass(frozen=True, slots=True)
class Location:
    """One record on disk.

    A slot is used again and again; `generation` counts its records and seeds their checksum, so bytes that an
    earlier record left in a slot can never pass as this one.
    """

    segment: int
    slot: int
    generation: int
    checksum: bytes  # [16] xxh3-128 of K and V as they lie on disk, seeded with the generation

    def __str__(self) -> str:
        return f"segment {self.segment}, slot {self.slot}"


def checksum_of(record: Record, generation: int) -> bytes:
    """[16] bytes; see Location.checksum."""
    return xxhash.xxh3_128_digest(record.data, seed=generation)


class RecordFiles(Protocol):
    """Records in the segments of one family, for a workspace that may write to segments of its own.

    Between its write and `settle` a record is provisional: no row of the catalog names it. Afterwards only
    the catalog decides about its slot.
    """

    def read(self, location: Location) -> Record:
        """The record, checked. Raises RecordDamaged (also for a missing segment) or StoreFailed."""
        ...

    def write(self, record: Record, *, avoid: Iterable[int] = ()) -> Location:
        """Writes a record at once into a free slot, in none of the segments `avoid`."""
        ...

    def sync(self) -> None:
        """What `write` has written is durable. Raises StoreFailed if it may be lost."""
        ...

    def settle(self, kept: Sequence[Location], freed: Sequence[Location]) -> None:
        """A transaction is durable: the catalog names `kept` from now on, and `freed` no more; the slots of
        these may be used again."""
        ...

    def moved(self, places: Mapping[Location, Location]) -> None:
        """The catalog names records elsewhere now; the old places are settled afterwards."""
        ...

    def seal(self, number: int) -> None:
        """No more records go to this segment."""
        ...

    def erase(self, location: Location) -> None:
        """Overwrites the bytes of a slot before it is free. Raises StoreFull or StoreFailed."""
        ...

    def drop_segment(self, number: int) -> None:
        """Deletes a segment file none of whose slots are named any more; it may be gone already."""
        ...


class DurableRecords(RecordFiles, Protocol):
    """The store of a workspace that is in use, see store.tiered."""

    def flush(self) -> None:
        """Waits until everything put so far is written, and synced unless durability is relaxed.
        Raises StoreFull or StoreFailed if that is not possible."""
        ...

    def locate(self, ref: RecordRef) -> Location | None:
        """Of a record that was flushed; None: it had to give way already, only its tokens are left."""
        ...

    def attach(self, location: Location | None, recent: float = 0.0, total: int = 0) -> RecordRef:
        """A reference to a record that the catalog names; None: one to be recomputed. Nothing is read.
        recent, total: its heat."""
        ...

    def give_up(self, ref: RecordRef) -> None:
        """Rows that were computed again and could not be written are dropped: they are wanted again later."""
        ...

    def take(self, ref: RecordRef, location: Location) -> None:
        """A reference names another record of its block from now on, one that somebody else has written."""
        ...

    def heat(self, ref: RecordRef) -> tuple[float, int]:
        """Recent (decayed) and cumulative retrievals."""
        ...
