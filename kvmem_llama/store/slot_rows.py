"""What the catalog knows of segments and slots: who may write where, and how often a slot was used. Functions
on the connection of a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from .location import Location
from .rows import OwnedSegment, SlotRow
from .tables import SEGMENTS, SLOTS, BadRow, Db


def take_slots(db: Db, locations: Iterable[Location]) -> None:
    """Notes that records were written to these slots, which must be free. Raises BadRow if one is not, or if
    its generation was used before: two blocks would then share bytes."""
    fresh = []
    for at in locations:
        row = SLOTS.one(db, "segment=? AND slot=?", (at.segment, at.slot))
        if row is not None and (row.used or row.generation >= at.generation):
            raise BadRow(f"{at} is taken with generation {row.generation}, {at.generation} was written there")
        fresh.append(SlotRow(at.segment, at.slot, at.generation, 1))
    SLOTS.insert(db, fresh, replace=True)


def free_slots(db: Db, locations: Sequence[Location]) -> list[Location]:
    """Notes that nothing names these records any more -> the same locations."""
    SLOTS.insert(db, [SlotRow(at.segment, at.slot, at.generation, 0) for at in locations], replace=True)
    return list(locations)


def condemn_slots(db: Db, locations: Iterable[Location]) -> None:
    """The records are deleted: their slots are free once they are overwritten, see `condemned_slots`."""
    SLOTS.insert(db, [SlotRow(at.segment, at.slot, at.generation, 2) for at in locations], replace=True)


def condemned_slots(db: Db) -> list[Location]:
    """Slots that are to be overwritten; a crash may have come between."""
    return [Location(row.segment, row.slot, row.generation, bytes(16)) for row in SLOTS.rows(db, "used=2")]


def new_segment(db: Db, owner: str, make: Callable[[int], int]) -> OwnedSegment:
    """A segment that the workspace `owner` may write to.

    make(number) makes the file, durably, and returns its number of slots. It runs inside the transaction: a
    file without a row is one whose transaction did not come to its end.
    """
    number = SEGMENTS.insert_numbered(db, OwnedSegment(0, owner, 0))
    row = OwnedSegment(number, owner, make(number))
    SEGMENTS.insert(db, [row], replace=True)
    return row


def adopt_segments(db: Db, owner: str) -> list[OwnedSegment]:
    """Gives the segments that are nobody's to the workspace `owner` -> all that are its own now."""
    nobodys = list(SEGMENTS.rows(db, "owner IS NULL"))
    SEGMENTS.insert(db, [replace(row, owner=owner) for row in nobodys], replace=True)
    return list(SEGMENTS.rows(db, "owner=?", (owner,), "ORDER BY number"))


def disown_segments(db: Db, owner: str) -> None:
    """The workspace `owner` writes no more: the next one that opens the family takes its segments."""
    own = list(SEGMENTS.rows(db, "owner=?", (owner,)))
    SEGMENTS.insert(db, [replace(row, owner=None) for row in own], replace=True)


def drop_empty_segments(db: Db, owner: str | None) -> list[int]:
    """Forgets the segments of `owner` (None: those of nobody) without a used slot -> their numbers.

    Their files are to be deleted after the transaction.
    """
    empty = [
        row.number
        for row in SEGMENTS.rows(db, "owner IS ?", (owner,))
        if SLOTS.one(db, "segment=? AND used>0", (row.number,)) is None
    ]
    for number in empty:
        SLOTS.delete(db, "segment=?", (number,))
        SEGMENTS.delete(db, "number=?", (number,))
    return empty


def slots_of(db: Db, segments: Iterable[OwnedSegment]) -> list[tuple[int, int, int, bool]]:
    """(segment, slot, generation, used) of the slots that were used at least once."""
    return [
        (slot.segment, slot.slot, slot.generation, bool(slot.used))
        for row in segments
        for slot in SLOTS.rows(db, "segment=?", (row.number,))
    ]


def check_slots(db: Db, owner: str) -> None:
    """Raises BadRow if a block names a slot, in a segment of the workspace `owner`, that does not count as
    used: the next record would be written over its own."""
    for table in ("blocks", "ahead"):
        # All rows are looked at, in the table itself: blocks_by_slot may lack an entry. `coalesce` keeps
        # SQLite from it; NOT INDEXED does not, for a table without rowids.
        found = db.execute(
            f"SELECT b.segment, b.slot FROM {table} AS b"
            " LEFT JOIN slots AS s ON s.segment = b.segment AND s.slot = b.slot"
            " WHERE coalesce(b.segment, 0) IN (SELECT number FROM segments WHERE owner=?)"
            " AND (s.used IS NOT 1 OR s.generation IS NOT b.generation) LIMIT 1",
            (owner,),
        ).fetchone()
        if found is not None:
            raise BadRow(f"a block names slot {found[1]} of segment {found[0]}, which does not count as used")
