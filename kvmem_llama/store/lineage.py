"""Histories that share what they have in common: fork, truncation, deletion, and what these set free.

Functions on the connection of a transaction. All that a fork costs is a few rows, however long the history:
the new lineage refers to its parent by ranges. Nothing of a lineage that another one refers to is ever
changed; what nobody can reach any more is deleted in the same transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvmem_llama.native.layout import I32

from .ahead import drop_ahead
from .content import (
    N_WORKSPACES,
    add_tokens,
    cut_tokens,
    find_block,
    find_step,
    last_step,
    lineage_row,
    n_blocks_before,
    read_tokens,
)
from .location import Location, Origin
from .rows import BlockRow, LineageRow, MetaRow, StepRow, WorkspaceRow, new_block
from .slot_rows import disown_segments, free_slots, take_slots
from .tables import BLOCKS, HEAT, LINEAGES, META, PINS, STEPS, TEXTS, WORDS, WORKSPACES, BadRow, Db


@dataclass(frozen=True, slots=True)
class Tail:
    """The last, partial block of a history that ends inside a block; its record was written anew."""

    start: int
    count: int
    at: Location | None  # None: it fell to the tokens tier at once
    mean_xxh: bytes

    def row(self, lineage: int, number: int, origin: int) -> BlockRow:
        return new_block(lineage, number, self.start, self.count, self.at, self.mean_xxh, origin)


@dataclass(frozen=True, slots=True)
class Freed:
    """What a change set free: nobody can reach it any more."""

    records: list[Location]
    lineages: list[int]  # ids of those that are gone; the rows of the indexes in their files go with them


@dataclass(frozen=True, slots=True)
class Base:
    """What a lineage takes from others, as the fields of LineageRow."""

    parent: int | None
    parent_end: int
    parent_blocks: int
    own_start: int
    parent_steps: int

    def row(self, id: int, created: float) -> LineageRow:
        return LineageRow(
            id, self.parent, self.parent_end, self.parent_blocks, self.own_start, self.parent_steps, created
        )


def new_workspace(db: Db, workspace: WorkspaceRow) -> WorkspaceRow:
    """An empty one; `lineage` is given here."""
    row = Base(None, 0, 0, 0, 0).row(0, workspace.created)
    fresh = replace(workspace, lineage=LINEAGES.insert_numbered(db, row))
    WORKSPACES.insert(db, [fresh])
    _count_workspaces(db, 1)
    return fresh


def fork(db: Db, workspace: WorkspaceRow, child: WorkspaceRow, tail: Tail | None) -> WorkspaceRow:
    """Makes `child` a workspace with the history of `workspace`; the `lineage` of `child` is given here.

    tail: needed if the history ends inside a block; its record is the child's own.
    """
    n = workspace.n_tokens
    number, own_start = _cut_at(db, workspace.lineage, n, tail)
    step = last_step(db, workspace.lineage)
    base = _base(db, workspace.lineage, number, own_start, 0 if step is None else step.number + 1)
    lineage = base.row(LINEAGES.insert_numbered(db, base.row(0, child.created)), child.created)
    fresh = replace(child, lineage=lineage.id, n_tokens=n, n_steps=workspace.n_steps, n_pins=workspace.n_pins)
    WORKSPACES.insert(db, [fresh])
    _count_workspaces(db, 1)
    whole = find_block(db, workspace.lineage, number)
    _add_tail(db, lineage, number, tail, whole, read_tokens(db, workspace.lineage, own_start, n))
    pins = PINS.rows(db, "workspace=?", (workspace.id,))
    PINS.insert(db, [replace(pin, workspace=child.id) for pin in pins])
    return fresh


def truncate(db: Db, workspace: WorkspaceRow, n: int, tail: Tail | None) -> tuple[WorkspaceRow, Freed]:
    """Drops all but the first `n` tokens -> the workspace as it is now, and what this set free.

    tail: needed if token `n` lies inside a block.
    """
    old = lineage_row(db, workspace.lineage)
    number, own_start = _cut_at(db, old.id, n, tail)
    whole, ids = find_block(db, old.id, number), read_tokens(db, old.id, own_start, n)
    step = last_step(db, old.id, n)
    cut = _cut_step(step, n)
    n_steps = 0 if step is None else step.number + (step.end <= n)
    freed = drop_ahead(db, workspace.id)
    is_shared = any(child.parent_end > n for child in _children(db, old.id))
    if is_shared:
        base = _base(db, old.id, number, own_start, n_steps)
        new = base.row(LINEAGES.insert_numbered(db, base.row(0, old.created)), old.created)
    else:
        freed += _drop_from(db, old, number, min(own_start, n), n_steps)
        blocks, steps = min(number, old.parent_blocks), min(n_steps, old.parent_steps)
        start = min(own_start, old.own_start)
        new = _base(db, old.parent, blocks, start, steps).row(old.id, old.created)
        LINEAGES.insert(db, [new], replace=True)
    changed = replace(
        workspace, lineage=new.id, n_tokens=n, n_steps=n_steps + (cut is not None),
        n_pins=_cut_pins(db, workspace.id, n),
    )  # fmt: skip
    WORKSPACES.insert(db, [changed], replace=True)
    _add_tail(db, new, number, tail, whole, ids)
    if cut is not None:
        STEPS.insert(db, [replace(cut, lineage=new.id)], replace=True)
    return changed, _collect(db, old.id if is_shared else old.parent, freed)


def delete(db: Db, workspace: WorkspaceRow) -> Freed:
    """Deletes a workspace and what only it could reach."""
    freed = drop_ahead(db, workspace.id)
    PINS.delete(db, "workspace=?", (workspace.id,))
    WORKSPACES.delete(db, "id=?", (workspace.id,))
    _count_workspaces(db, -1)
    disown_segments(db, workspace.id)
    return _collect(db, workspace.lineage, freed)


# -- private


def _collect(db: Db, lineage: int | None, freed: list[Location]) -> Freed:
    """Deletes what nobody can reach of a lineage that lost a reference, and of its ancestors.

    freed: records that are free already.
    """
    gone: list[int] = []
    while lineage is not None:
        row = LINEAGES.one(db, "id=?", (lineage,))
        if row is None or any(head.lineage == lineage for head in WORKSPACES.rows(db)):
            break
        children = _children(db, lineage)
        n_blocks = max((child.parent_blocks for child in children), default=0)
        n_steps = max((child.parent_steps for child in children), default=0)
        if n_blocks > row.parent_blocks or n_steps > row.parent_steps:
            n_tokens = max(child.own_start for child in children)
            freed = freed + _drop_from(db, row, n_blocks, n_tokens, n_steps)
            break
        # What the children use lies before this lineage: they go past it.
        for child in children:
            base = _base(db, row.parent, child.parent_blocks, child.own_start, child.parent_steps)
            LINEAGES.insert(db, [base.row(child.id, child.created)], replace=True)
        freed = freed + _drop_from(db, row, row.parent_blocks, row.own_start, row.parent_steps)
        LINEAGES.delete(db, "id=?", (row.id,))
        gone.append(row.id)
        lineage = row.parent
    return Freed(freed, gone)


def _count_workspaces(db: Db, more: int) -> None:
    row = META.one(db, "key=?", (N_WORKSPACES,))
    n = more + (0 if row is None else int(row.value))
    META.insert(db, [MetaRow(N_WORKSPACES, str(n))], replace=True)


def _children(db: Db, lineage: int) -> list[LineageRow]:
    """Those that refer to a lineage. All rows are read: no index can be wrong, and every checksum counts."""
    return [row for row in LINEAGES.rows(db) if row.parent == lineage]


def _base(db: Db, parent: int | None, n_blocks: int, own_start: int, n_steps: int) -> Base:
    """What a lineage takes from `parent`: its first `n_blocks` blocks and `n_steps` steps. It is attached to
    the ancestor that holds the last of them, so that chains do not grow longer than they must."""
    while parent is not None:
        row = lineage_row(db, parent)
        if row.parent_blocks < n_blocks or row.parent_steps < n_steps:
            break
        parent = row.parent
    if parent is None:
        if n_blocks or n_steps:
            raise BadRow(f"{n_blocks} blocks and {n_steps} steps have no lineage to come from")
        return Base(None, 0, 0, 0, 0)
    end = find_step(db, parent, n_steps - 1).end if n_steps else 0
    return Base(parent, max(own_start, end), n_blocks, own_start, n_steps)


def _cut_at(db: Db, lineage: int, n: int, tail: Tail | None) -> tuple[int, int]:
    """(number of the first block that is not shared, its first token), for a history of `n` tokens."""
    number = n_blocks_before(db, lineage, n if tail is None else tail.start)
    own_start = n if tail is None else tail.start
    last = find_block(db, lineage, number - 1) if number else None
    if (0 if last is None else last.end) != own_start or (tail is not None and own_start + tail.count != n):
        raise BadRow(f"a history of {n} tokens is cut at {own_start}, where no block ends")
    return number, own_start


def _cut_step(step: StepRow | None, n: int) -> StepRow | None:
    """The step that token `n` lies in, as it is after a truncation to `n` tokens."""
    if step is None or step.end <= n:
        return None
    return replace(step, end=n, query_start=min(step.query_start, n), closed=0)


def _add_tail(
    db: Db, lineage: LineageRow, number: int, tail: Tail | None, whole: BlockRow | None, ids: I32
) -> None:
    """whole: the block that the tail's rows are of."""
    if tail is None:
        return
    take_slots(db, [] if tail.at is None else [tail.at])
    origin = int(Origin.READ) if whole is None else whole.origin
    BLOCKS.insert(db, [tail.row(lineage.id, number, origin)], replace=True)
    add_tokens(db, lineage, tail.start, ids)


def _cut_pins(db: Db, workspace: str, n: int) -> int:
    """Drops and shortens pins -> how many are left."""
    kept = [
        replace(pin, end=min(pin.end, n))
        for pin in PINS.rows(db, "workspace=?", (workspace,))
        if pin.start < n
    ]
    PINS.delete(db, "workspace=?", (workspace,))
    PINS.insert(db, kept)
    return len(kept)


def _drop_from(db: Db, lineage: LineageRow, n_blocks: int, n_tokens: int, n_steps: int) -> list[Location]:
    """Drops own blocks from number `n_blocks` on, tokens and steps likewise -> the records set free."""
    where, args = "lineage=? AND number>=?", (lineage.id, n_blocks)
    freed = [at for row in BLOCKS.rows(db, where, args) if (at := row.location) is not None]
    for table in (BLOCKS, TEXTS, WORDS, HEAT):
        table.delete(db, where, args)
    cut_tokens(db, lineage, n_tokens)
    STEPS.delete(db, where, (lineage.id, n_steps))
    return free_slots(db, freed)
