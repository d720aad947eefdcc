"""What a step adds to a history, in one transaction. Functions on its connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvmem_llama.native.layout import I32

from .ahead import drop_ahead
from .content import add_tokens, find_block, last_step, lineage_row, spans
from .location import Location, Origin
from .rows import BlockRow, HeatRow, PinRow, StepRow, TextRow, WorkspaceRow, new_block
from .slot_rows import free_slots, take_slots
from .tables import AHEAD, BLOCKS, HEAT, PINS, STEPS, TEXTS, WORDS, WORKSPACES, BadRow, Db
from .words import BlockWords


@dataclass(frozen=True, slots=True)
class AddedBlock:
    """A block whose record is on disk; it may take the place of a partial last block with the same start."""

    number: int
    start: int
    count: int
    at: Location | None  # None: it fell to the tokens tier at once
    mean_xxh: bytes  # [16] of its row in the index file
    origin: int = 0
    text: str | None = None
    words: BlockWords | None = None


@dataclass(frozen=True, slots=True)
class Heat:
    """See HeatRow."""

    number: int
    recent: float
    total: int
    tick: int


@dataclass(frozen=True, slots=True)
class Addition:
    """Everything between two heads of a history."""

    start: int  # the head before
    ids: I32
    blocks: Sequence[AddedBlock]
    step: StepRow | None  # lineage and number are given in the transaction
    used: float


def workspace_row(db: Db, workspace: str) -> WorkspaceRow:
    row = WORKSPACES.one(db, "id=?", (workspace,))
    if row is None:
        raise BadRow(f"workspace {workspace} is missing")
    return row


def append(db: Db, workspace: str, added: Addition) -> tuple[WorkspaceRow, list[Location]]:
    """Moves the head -> the workspace as it is now, and the records set free: that of a partial block that
    has grown, and of blocks that were read ahead in vain."""
    row = workspace_row(db, workspace)
    if row.n_tokens != added.start:
        raise BadRow(f"the head of {workspace} is at {row.n_tokens}, a step began at {added.start}")
    end = added.start + len(added.ids)
    lineage = lineage_row(db, row.lineage)
    grown = _check_place(db, lineage.id, added, end)
    freed = [] if grown is None or grown.location is None else [grown.location]
    named = [block.at for block in added.blocks if block.at is not None]
    ahead = {read.location for read in AHEAD.rows(db, "workspace=?", (workspace,))}
    free_slots(db, freed)
    freed += drop_ahead(db, workspace, named)
    take_slots(db, [at for at in named if at not in ahead])
    rows = [
        new_block(lineage.id, b.number, b.start, b.count, b.at, b.mean_xxh, b.origin) for b in added.blocks
    ]
    if grown is not None and grown.origin != Origin.READ:  # its rows are those of the block that it becomes
        rows[0] = replace(rows[0], origin=grown.origin)
    BLOCKS.insert(db, rows, replace=True)
    texts = [TextRow(lineage.id, b.number, b.text) for b in added.blocks if b.text is not None]
    TEXTS.insert(db, texts, replace=True)
    words = [b.words.row(lineage.id, b.number) for b in added.blocks if b.words is not None]
    WORDS.insert(db, words, replace=True)
    add_tokens(db, lineage, added.start, added.ids)
    if added.step is not None:
        before = last_step(db, lineage.id)
        number = 0 if before is None else before.number + 1
        STEPS.insert(db, [replace(added.step, lineage=lineage.id, number=number)])
        row = replace(row, n_steps=number + 1)
    row = replace(row, n_tokens=end, commits=row.commits + 1, used=added.used)
    WORKSPACES.insert(db, [row], replace=True)
    return row, freed


def _check_place(db: Db, lineage: int, added: Addition, end: int) -> BlockRow | None:
    """Raises BadRow unless the blocks continue the history and end at `end` -> the partial block that the
    first one takes the place of."""
    if not added.blocks:
        if len(added.ids):
            raise BadRow(f"{len(added.ids)} tokens without a block")
        return None
    first = added.blocks[0]
    at, number = first.start, first.number
    for block in added.blocks:
        if (block.start, block.number) != (at, number):
            raise BadRow(f"block {block.number} at {block.start} does not come after the one before it")
        at, number = block.start + block.count, number + 1
    before = find_block(db, lineage, first.number - 1) if first.number else None
    if at != end or first.start != (0 if before is None else before.end):
        raise BadRow(f"blocks of the tokens {first.start}..{at} do not continue a history that ends at {end}")
    replaced = find_block(db, lineage, first.number)
    if replaced is None:
        if first.start != added.start:
            raise BadRow(f"a history of {added.start} tokens does not go on at {first.start}")
        return None
    if replaced.lineage != lineage or replaced.start != first.start or replaced.end != added.start:
        raise BadRow(f"block {first.number} cannot be replaced: it ends at {replaced.end}")
    return replaced


def put_heat(db: Db, lineage: int, heat: Iterable[Heat]) -> None:
    """Notes the heat of blocks, each with the lineage it is a part of."""
    parts = spans(db, lineage)
    rows = []
    for item in heat:
        owner = next(p.lineage for p in parts if p.blocks[0] <= item.number < p.blocks[1])
        rows.append(HeatRow(owner, item.number, item.recent, item.total, item.tick))
    HEAT.insert(db, rows, replace=True)


def read_heat(db: Db, lineage: int) -> list[Heat]:
    """Heat of the blocks that were ever recalled, ascending."""
    where = "lineage=? AND number>=? AND number<?"
    return [
        Heat(row.number, row.recent, row.total, row.tick)
        for part in spans(db, lineage)
        for row in HEAT.rows(db, where, (part.lineage, *part.blocks), "ORDER BY number")
    ]


def put_pins(db: Db, workspace: str, pins: Sequence[tuple[int, int]]) -> None:
    """Replaces the pins: token ranges [start, end)."""
    row = workspace_row(db, workspace)
    WORKSPACES.insert(db, [replace(row, n_pins=len(pins))], replace=True)
    PINS.delete(db, "workspace=?", (workspace,))
    PINS.insert(db, [PinRow(workspace, i, start, end) for i, (start, end) in enumerate(pins)])


def put_record(
    db: Db, lineage: int, number: int, *, old: Location | None, new: Location, mean_xxh: bytes
) -> tuple[Location, list[Location]]:
    """A block whose record `old` is lost has one computed again, `new` -> the one it has now, and the records
    set free. If a fork that shares the block was faster, its record stays and `new` is set free.

    mean_xxh: of the block's row of the index."""
    row = find_block(db, lineage, number)
    if row is None:
        raise BadRow(f"block {number} of lineage {lineage} is missing")
    take_slots(db, [new])
    if row.location is not None and row.location != old:
        return row.location, free_slots(db, [new])
    again = replace(row.moved_to(new), mean_xxh=mean_xxh, origin=int(Origin.RECOMPUTED))
    BLOCKS.insert(db, [again], replace=True)
    return new, free_slots(db, [] if old is None or row.location is None else [old])


def set_means(db: Db, means: Mapping[BlockRow, bytes]) -> dict[BlockRow, BlockRow]:
    """Blocks, as somebody has read them, get other checksums of their index rows -> those that did, and what
    they are now. Left out are blocks that have another record or another index row by now.

    means: [16] bytes for each."""
    changed = {}
    for was, mean_xxh in means.items():
        now = BLOCKS.one(db, "lineage=? AND number=?", (was.lineage, was.number))
        if now is not None and _made_of(now) == _made_of(was):
            changed[was] = replace(now, mean_xxh=mean_xxh)
    BLOCKS.insert(db, list(changed.values()), replace=True)
    return changed


def _made_of(row: BlockRow) -> tuple[int, int, bytes, bytes]:
    """What an index row of a block was made of, wherever its record lies."""
    return row.start, row.count, row.checksum, row.mean_xxh


def drop_records(db: Db, locations: Iterable[Location]) -> list[Location]:
    """The blocks with these records fall to the tokens tier -> the records that were still named, now free.

    A record that is not named any more, or not yet, is left out. A block that was read ahead is forgotten.
    """
    fallen = []
    for at in locations:
        where, args = "segment=? AND slot=? AND generation=?", (at.segment, at.slot, at.generation)
        row = BLOCKS.one(db, where, args)
        if row is not None:
            BLOCKS.insert(db, [row.moved_to(None)], replace=True)
        if row is not None or AHEAD.delete(db, where, args):
            fallen.append(at)
    return free_slots(db, fallen)
