"""What a history holds: its lineage and the ranges of other lineages before it, read and written as one.

Functions on a connection; they raise BadRow where rows do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvmem_llama.native.layout import I32

from .rows import CHUNK, BlockRow, LineageRow, StepRow, TokensRow, WorkspaceRow
from .tables import BLOCKS, LINEAGES, META, PINS, STEPS, TOKENS, WORKSPACES, BadRow, Db, MissingRow

END: Final = 1 << 62

Range = tuple[int, int]  # [first, end)


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one lineage that a history consists of."""

    lineage: int
    tokens: Range
    blocks: Range
    steps: Range


def lineage_row(db: Db, lineage: int) -> LineageRow:
    row = LINEAGES.one(db, "id=?", (lineage,))
    if row is None:
        raise BadRow(f"lineage {lineage} is missing")
    return row


def spans(db: Db, lineage: int) -> list[Span]:
    """The parts of the history that ends in `lineage`, oldest first; the last one is open-ended."""
    found: list[Span] = []
    end_tokens = end_blocks = end_steps = END
    at: int | None = lineage
    seen = set[int]()
    while at is not None:
        if at in seen:
            raise BadRow(f"lineage {at} is its own ancestor")
        seen.add(at)
        row = lineage_row(db, at)
        tokens = (row.own_start, end_tokens)
        blocks = (row.parent_blocks, end_blocks)
        steps = (row.parent_steps, end_steps)
        found.append(Span(at, tokens, blocks, steps))
        end_tokens = min(end_tokens, row.own_start)
        end_blocks = min(end_blocks, row.parent_blocks)
        end_steps = min(end_steps, row.parent_steps)
        at = row.parent
    if (end_tokens, end_blocks, end_steps) != (0, 0, 0):
        raise BadRow(f"the first {end_tokens} tokens of lineage {lineage} have no parent to come from")
    return found[::-1]


# -- tokens


def read_tokens(db: Db, lineage: int, start: int, end: int) -> I32:
    """Token ids of positions start .. end-1."""
    parts = []
    at = start
    for span in spans(db, lineage):
        stop = min(end, span.tokens[1])
        if at >= stop:
            continue
        rows = TOKENS.rows(
            db, "lineage=? AND chunk BETWEEN ? AND ?", (span.lineage, at // CHUNK, (stop - 1) // CHUNK),
            "ORDER BY chunk",
        )  # fmt: skip
        for row in rows:
            first = max(row.chunk * CHUNK, span.tokens[0])
            if at < first:
                raise BadRow(f"token {at} of {end} is missing in lineage {lineage}")
            ids = np.frombuffer(row.ids, "<i4")[at - first : stop - first]
            parts.append(ids.astype(np.int32))
            at += len(ids)
    if at < end:
        raise BadRow(f"token {at} of {end} is missing in lineage {lineage}")
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def add_tokens(db: Db, lineage: LineageRow, start: int, ids: I32) -> None:
    """Appends own tokens; `start` is the position of the first one and must be the lineage's end."""
    if not len(ids):
        return
    head = TOKENS.one(db, "lineage=? AND chunk=?", (lineage.id, start // CHUNK))
    before = np.frombuffer(head.ids if head is not None else b"", "<i4")
    first = max(start // CHUNK * CHUNK, lineage.own_start)
    if first + len(before) != start:
        raise BadRow(f"tokens from {start} on do not continue the {first + len(before)} of the lineage")
    whole = np.concatenate([before, np.asarray(ids, "<i4")])
    rows = []
    while len(whole):
        n = (first // CHUNK + 1) * CHUNK - first
        rows.append(TokensRow(lineage.id, first // CHUNK, whole[:n].tobytes()))
        whole = whole[n:]
        first += n
    TOKENS.insert(db, rows, replace=True)


def cut_tokens(db: Db, lineage: LineageRow, end: int) -> None:
    """Drops own tokens from position `end` on."""
    if end <= lineage.own_start:
        TOKENS.delete(db, "lineage=?", (lineage.id,))
        return
    last = (end - 1) // CHUNK
    TOKENS.delete(db, "lineage=? AND chunk>?", (lineage.id, last))
    row = TOKENS.one(db, "lineage=? AND chunk=?", (lineage.id, last))
    if row is not None:
        n = end - max(last * CHUNK, lineage.own_start)
        TOKENS.insert(db, [TokensRow(lineage.id, last, row.ids[: 4 * n])], replace=True)


# -- blocks


def iter_blocks(db: Db, lineage: int, first: int = 0) -> Iterator[BlockRow]:
    """Blocks from number `first` on, in order. Raises BadRow for a gap."""
    number, start = first, None
    for span in spans(db, lineage):
        low, high = max(first, span.blocks[0]), span.blocks[1]
        if low >= high:
            continue
        where = "lineage=? AND number>=? AND number<?"
        for row in BLOCKS.rows(db, where, (span.lineage, low, high), "ORDER BY number"):
            if row.number != number or (start is not None and row.start != start):
                raise BadRow(f"block {number} of lineage {lineage} is missing")
            yield row
            number, start = number + 1, row.end
        if high != END and number < high:
            raise BadRow(f"block {number} of lineage {lineage} is missing")


def find_block(db: Db, lineage: int, number: int) -> BlockRow | None:
    """The block with this number; None after the last one."""
    for span in spans(db, lineage):
        if span.blocks[0] <= number < span.blocks[1]:
            return BLOCKS.one(db, "lineage=? AND number=?", (span.lineage, number))
    return None


def n_blocks_before(db: Db, lineage: int, end: int) -> int:
    """Number of blocks that end at or before token position `end`."""
    for span in reversed(spans(db, lineage)):
        where = 'lineage=? AND number>=? AND number<? AND start + "count" <= ?'
        last = next(
            BLOCKS.rows(db, where, (span.lineage, *span.blocks, end), "ORDER BY number DESC LIMIT 1"), None
        )
        if last is not None:
            return last.number + 1
    return 0


def check_blocks(blocks: Sequence[BlockRow], workspace: WorkspaceRow) -> None:
    """Raises BadRow if the blocks do not hold exactly the tokens of the workspace."""
    end = blocks[-1].end if blocks else 0
    if end != workspace.n_tokens or (blocks and blocks[0].start != 0):
        raise BadRow(f"the blocks of {workspace.id} end at token {end} of {workspace.n_tokens}")


# -- steps


def iter_steps(db: Db, lineage: int) -> Iterator[StepRow]:
    """Finished steps in order. Raises BadRow for a gap."""
    number = 0
    for span in spans(db, lineage):
        where = "lineage=? AND number>=? AND number<?"
        for row in STEPS.rows(db, where, (span.lineage, *span.steps), "ORDER BY number"):
            if row.number != number:
                raise MissingRow(f"step {number} of lineage {lineage} is missing")
            yield row
            number += 1
        if span.steps[1] != END and number < span.steps[1]:
            raise MissingRow(f"step {number} of lineage {lineage} is missing")


def check_steps(steps: Sequence[StepRow], workspace: WorkspaceRow) -> None:
    """Raises BadRow if the workspace has made more steps, or fewer, than there are."""
    if len(steps) != workspace.n_steps:
        raise MissingRow(f"{len(steps)} of the {workspace.n_steps} steps of {workspace.name!r:.80} are there")


def last_step(db: Db, lineage: int, end: int = END) -> StepRow | None:
    """The newest step that begins before token position `end`."""
    for span in reversed(spans(db, lineage)):
        where = "lineage=? AND number>=? AND number<? AND start<?"
        row = next(
            STEPS.rows(db, where, (span.lineage, *span.steps, end), "ORDER BY number DESC LIMIT 1"), None
        )
        if row is not None:
            return row
    return None


def find_step(db: Db, lineage: int, number: int) -> StepRow:
    """The step with this number."""
    for span in spans(db, lineage):
        if span.steps[0] <= number < span.steps[1]:
            row = STEPS.one(db, "lineage=? AND number=?", (span.lineage, number))
            if row is not None:
                return row
    raise MissingRow(f"step {number} of lineage {lineage} is missing")


# -- pins and workspaces


def read_pins(db: Db, workspace: WorkspaceRow) -> list[Range]:
    """The pinned token ranges. Raises BadRow if there are more, or fewer, than the workspace has."""
    pins = [(pin.start, pin.end) for pin in PINS.rows(db, "workspace=?", (workspace.id,), "ORDER BY number")]
    if len(pins) != workspace.n_pins:
        raise MissingRow(f"{len(pins)} of the {workspace.n_pins} pins of {workspace.name!r:.80} are there")
    return pins


N_WORKSPACES: Final = "n_workspaces"
"""Key of the row of `meta` that counts the workspaces of the family."""


def check_workspaces(db: Db) -> None:
    """Raises BadRow if the family has made more workspaces, or fewer, than are there and not deleted."""
    row = META.one(db, "key=?", (N_WORKSPACES,))
    if row is None:
        raise BadRow("the number of workspaces is missing")
    found = sum(1 for _ in WORKSPACES.rows(db))
    if str(found) != row.value:
        raise MissingRow(f"{found} of its {row.value} workspaces are there")
