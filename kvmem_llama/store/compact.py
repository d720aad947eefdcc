"""Giving space back: records move together, empty segments and stray files go, the catalog shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvmem_llama.errors import RecordDamaged, StoreLocked

from .ahead import moved_ahead
from .append import drop_records
from .content import spans
from .deleting import finish_erasing
from .holding import Holding
from .location import Location, RecordFiles
from .lock import lock_workspace
from .rows import AheadRow, BlockRow, OwnedSegment
from .slot_rows import adopt_segments, drop_empty_segments, free_slots, take_slots
from .tables import AHEAD, BLOCKS, SEGMENTS, WORKSPACES, Db

_BATCH: Final = 64  # records moved in one transaction


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was done."""

    n_moved: int  # records
    n_lost: int  # records found damaged on the way: their blocks fell to the tokens tier
    n_segments_dropped: int
    n_files_removed: int  # that no row stood for
    bytes_before: int  # of all files of the family, as the file system counts them
    bytes_after: int


def compact(holding: Holding, records: RecordFiles) -> Compacted:
    """Gives back what the family of a workspace, which must be open for writing, does not need.

    Of workspaces that are open elsewhere, in this process or another, no record is moved: they would not find
    it. A crash at any moment leaves every block with a record. Raises StoreFull (there must be room for a
    segment), StoreFailed or CatalogDamaged.
    """
    family, files = holding.family, holding.family.files
    before = family.disk_bytes()
    files.at("compact.begin")
    finish_erasing(family)
    with ExitStack() as locks:
        owners = [holding.place.workspace]
        with family.catalog.snapshot() as db:
            others = [row for row in WORKSPACES.rows(db) if row.id not in owners]
        for row in others:
            with suppress(StoreLocked):
                lock = lock_workspace(files, family.paths.locks, row.id, row.name)
                if not family.has_workspace(row.id):  # it was deleted just before
                    lock.remove()
                    continue
                locks.enter_context(lock)
                owners.append(row.id)
        n_moved, n_lost = _gather(holding, records, owners)

        def drop(db: Db) -> list[int]:
            adopt_segments(db, holding.place.workspace)
            return [number for owner in owners for number in drop_empty_segments(db, owner)]

        with holding.root.quiet():
            dropped = family.catalog.write(drop, "compact")
            for number in dropped:
                records.drop_segment(number)
            swept = family.sweep(everything=True)
    family.catalog.vacuum()
    files.at("compact.end")
    return Compacted(n_moved, n_lost, len(dropped), len(swept), before, family.disk_bytes())


def _gather(holding: Holding, records: RecordFiles, owners: Sequence[str]) -> tuple[int, int]:
    """Moves the records of the emptiest segments into free slots of fuller ones -> (moved, lost)."""
    n_moved = n_lost = 0
    with holding.family.catalog.snapshot() as db:
        doomed = _to_empty(db, holding.place.workspace, owners)
    for number in doomed:
        records.seal(number)
    for number in doomed:
        with holding.family.catalog.snapshot() as db:
            rows: list[BlockRow | AheadRow] = [*BLOCKS.rows(db, "segment=?", (number,))]
            rows += AHEAD.rows(db, "segment=?", (number,))
        named = sorted((at for row in rows if (at := row.location)), key=lambda at: at.slot)
        for i in range(0, len(named), _BATCH):
            places: dict[Location, Location] = {}
            lost: list[Location] = []
            for at in named[i : i + _BATCH]:
                try:
                    places[at] = records.write(records.read(at), avoid=doomed)
                except RecordDamaged:
                    lost.append(at)
            records.sync()
            holding.family.files.at("compact.written")
            freed = holding.family.catalog.write(partial(_move, places=places, lost=lost), "compact")
            records.moved(places)
            records.settle([new for old, new in places.items() if old in freed], freed)
            n_moved += len(places)
            n_lost += len(lost)
    return n_moved, n_lost


def _to_empty(db: Db, workspace: str, owners: Sequence[str]) -> list[int]:
    """Numbers of the segments that can be emptied into the free slots of the others, emptiest first.

    Records go to segments of `workspace`; what other owners have is moved only if it fits there too.
    """
    busy = _segments_in_use(db, owners)
    n_used: dict[int, int] = {}
    rows: dict[int, OwnedSegment] = {}
    for row in SEGMENTS.rows(db):
        if row.owner is None or row.owner in owners:
            rows[row.number] = row
            n_used[row.number] = db.execute(
                "SELECT count(*) FROM slots WHERE segment=? AND used>0", (row.number,)
            ).fetchone()[0]
    free = sum(row.n_slots - n_used[number] for number, row in rows.items() if row.owner == workspace)
    doomed: list[int] = []
    for number in sorted(rows.keys() - busy, key=lambda n: (n_used[n], -n)):
        row, used = rows[number], n_used[number]
        is_own = row.owner == workspace
        left = free - (row.n_slots - used if is_own else 0)  # a segment cannot be emptied into itself
        if used > left:
            break
        doomed.append(number)
        free = left - used
    return doomed


def _segments_in_use(db: Db, owners: Sequence[str]) -> set[int]:
    """Segments with records of workspaces that are not among `owners`."""
    found: set[int] = set()
    for row in WORKSPACES.rows(db):
        if row.id not in owners:
            for part in spans(db, row.lineage):
                found |= {
                    segment
                    for (segment,) in db.execute(
                        "SELECT DISTINCT segment FROM blocks WHERE lineage=? AND number>=? AND number<?",
                        (part.lineage, *part.blocks),
                    )
                }
    return found


def _move(db: Db, places: dict[Location, Location], lost: Sequence[Location]) -> list[Location]:
    """Names the records at their new places -> the records set free: old places, or new ones of records that
    somebody freed meanwhile."""
    freed: list[Location] = []
    take_slots(db, places.values())
    for old, new in places.items():
        where, args = "segment=? AND slot=? AND generation=?", (old.segment, old.slot, old.generation)
        block = BLOCKS.one(db, where, args)
        ahead = AHEAD.one(db, where, args) if block is None else None
        if block is not None:
            BLOCKS.insert(db, [block.moved_to(new)], replace=True)
        elif ahead is not None:
            AHEAD.insert(db, [moved_ahead(ahead, new)], replace=True)
        freed.append(old if block is not None or ahead is not None else new)
    return free_slots(db, freed) + drop_records(db, lost)
