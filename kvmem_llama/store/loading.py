"""Opening a history: catalog and index are read; records only where a row of the index is made again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np

from kvmem_llama.errors import RecordDamaged, StoreError

from .append import Heat, read_heat, workspace_row
from .content import (
    Span,
    check_blocks,
    check_steps,
    iter_blocks,
    iter_steps,
    read_pins,
    read_tokens,
    spans,
)
from .heat import Uses
from .holding import Holding
from .index_file import F16, IndexChunks, mean_xxh
from .location import DurableRecords, Origin
from .rows import AheadRow, BlockRow, WorkspaceRow
from .steps import MeanOf, NewBlock, ReadBlock, Restored
from .tables import AHEAD, BLOCKS, Db

_HALF_LIFE: Final = Uses().half_life  # commits


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Within: no search for garbage. Objects that stay are made by the million; to look through them
    again and again takes as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def restore(
    holding: Holding,
    store: DurableRecords,
    mean_of: MeanOf,
    *,
    scored: Sequence[int] | None,
    chunk_blocks: int,
) -> Restored:
    """The committed history of a workspace.

    scored, chunk_blocks: of the index, see MeanKIndex. mean_of: makes a row of all full-attention layers.
    Raises CatalogDamaged or StoreFailed.
    """
    with holding.family.catalog.snapshot() as db:
        row = workspace_row(db, holding.place.workspace)
        tokens = read_tokens(db, row.lineage, 0, row.n_tokens)
        rows = list(iter_blocks(db, row.lineage))
        check_blocks(rows, row)
        parts = spans(db, row.lineage)
        steps = list(iter_steps(db, row.lineage))
        check_steps(steps, row)
        pins = read_pins(db, row)
        ahead = _ahead_run(db, row, rows, holding.family.binding.block_size)
        heat = {item.number: item for item in read_heat(db, row.lineage)}
    index = IndexChunks(holding.family.binding.index_shape, scored, len(rows), chunk_blocks)
    missing = holding.family.index.load(parts, rows, index)
    unscored = _make_again(holding, store, mean_of, parts, rows, missing, index)
    blocks = [
        NewBlock(
            block.number, block.start, block.count,
            store.attach(block.location, *_cooled(heat.get(block.number), row.commits)),
            Origin(block.origin),
        )
        for block in rows
    ]  # fmt: skip
    return Restored(
        tokens=tokens,
        blocks=blocks,
        chunks=index.chunks,
        counts=np.array([block.count for block in rows], np.int32),
        unscored=unscored,
        pins=pins,
        ahead=[
            ReadBlock(a.number, a.start, store.attach(a.location), np.frombuffer(a.ids, "<i4").astype("i4"))
            for a in ahead
        ],
        steps=steps,
        system=row.system,
        policy=row.policy,
    )  # fmt: skip


def _ahead_run(db: Db, row: WorkspaceRow, blocks: Sequence[BlockRow], block_size: int) -> list[AheadRow]:
    """The blocks that continue the complete ones without a gap."""
    number = len(blocks) - (1 if blocks and blocks[-1].count < block_size else 0)
    run: list[AheadRow] = []
    for ahead in AHEAD.rows(db, "workspace=?", (row.id,), "ORDER BY number"):
        if ahead.number != number + len(run):
            break
        run.append(ahead)
    return run


def _cooled(heat: Heat | None, now: int) -> tuple[float, int]:
    """(recent, total) of a block as they are after the commits since they were written."""
    if heat is None:
        return 0.0, 0
    age = max(now - heat.tick, 0)
    return heat.recent * 0.5 ** (age / _HALF_LIFE), heat.total


def _make_again(
    holding: Holding,
    store: DurableRecords,
    mean_of: MeanOf,
    parts: Sequence[Span],
    rows: Sequence[BlockRow],
    missing: Sequence[int],
    index: IndexChunks,
) -> list[int]:
    """Makes rows of the index from records -> the blocks whose records are lost, too."""
    unscored: list[int] = []
    made: dict[int, F16] = {}
    for number in missing:
        at = rows[number].location
        try:
            if at is None:
                raise RecordDamaged(f"block {number}", "it is gone")
            made[number] = mean_of(store.read(at), rows[number].count)
        except RecordDamaged:
            index.put(number, np.zeros((1, holding.family.binding.index_shape.n_elements), np.float16))
            unscored.append(number)
            continue
        index.put(number, made[number][np.newaxis])
    if made and not holding.read_only:
        with contextlib.suppress(StoreError):  # it is made again the next time
            _keep(holding, parts, rows, made)
    return unscored


def _keep(holding: Holding, parts: Sequence[Span], rows: Sequence[BlockRow], made: dict[int, F16]) -> None:
    """Writes rows that were made again into the index, each where its block belongs."""
    changed = [
        replace(rows[number], mean_xxh=mean_xxh(row))
        for number, row in made.items()
        if rows[number].mean_xxh != mean_xxh(row)  # its record was computed again since
    ]
    if changed:
        holding.family.catalog.write(lambda db: BLOCKS.insert(db, changed, replace=True), "means")
    for part in parts:
        numbers = [n for n in made if part.blocks[0] <= n < part.blocks[1]]
        for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
            own = [number for _, number in run]
            means = np.stack([made[number] for number in own])
            holding.family.index.put(part.lineage, part.blocks[0], own[0], means)
