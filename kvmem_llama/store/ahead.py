"""Blocks that an unfinished read has evaluated after the head of a workspace.

They are kept so that nothing is read twice, and are part of the history only once a step that begins with
their tokens is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from .location import Location
from .rows import AheadRow
from .slot_rows import free_slots, take_slots
from .tables import AHEAD, BadRow, Db


def put_ahead(db: Db, workspace: str, rows: Sequence[AheadRow]) -> list[Location]:
    """Adds blocks of a read -> the records set free. What is there stays if they continue it; else they take
    its place, as far as its records are not among theirs."""
    if not rows:
        return []
    if any(row.workspace != workspace for row in rows):
        raise BadRow(f"blocks ahead of {workspace} that are another workspace's")
    for before, after in pairwise(rows):
        if (after.number, after.start) != (before.number + 1, before.start + before.count):
            raise BadRow(f"block {after.number} ahead of {workspace} does not continue block {before.number}")
    there = rows_ahead(db, workspace)
    freed: list[Location] = []
    if there and there[-1].number + 1 != rows[0].number:
        kept = {row.location for row in rows}
        freed = free_slots(db, [row.location for row in there if row.location not in kept])
        AHEAD.delete(db, "workspace=?", (workspace,))
        taken = {row.location for row in there}
    else:
        taken = set()
    take_slots(db, [row.location for row in rows if row.location not in taken])
    AHEAD.insert(db, rows)
    return freed


def drop_ahead(db: Db, workspace: str, adopted: Sequence[Location] = ()) -> list[Location]:
    """Forgets all of them -> the records set free. `adopted`: locations that blocks of the history name from
    this transaction on; they stay in use."""
    kept = set(adopted)
    there = [row.location for row in AHEAD.rows(db, "workspace=?", (workspace,))]
    AHEAD.delete(db, "workspace=?", (workspace,))
    return free_slots(db, [at for at in there if at not in kept])


def rows_ahead(db: Db, workspace: str) -> list[AheadRow]:
    """In the order of their tokens."""
    return list(AHEAD.rows(db, "workspace=?", (workspace,), "ORDER BY number"))


def n_tokens_ahead(db: Db, workspace: str) -> int:
    """Tokens that a read which was interrupted has evaluated after the head."""
    return sum(row.count for row in AHEAD.rows(db, "workspace=?", (workspace,)))


def moved_ahead(row: AheadRow, at: Location) -> AheadRow:
    """The same block with its record elsewhere."""
    return replace(row, segment=at.segment, slot=at.slot, generation=at.generation, checksum=at.checksum)
