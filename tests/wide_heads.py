"""The fake model with heads that a token index takes, calibrations of them, and what must be true of the
indexes of its workspaces."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from fake_durable import Engine, engine_on

from kvmem_llama.calibration import CalibratedHead, Calibration, dump
from kvmem_llama.errors import RecordDamaged
from kvmem_llama.memory.block_rows import BlockRows
from kvmem_llama.memory.history import History
from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.memory.token_index import TokenIndex
from kvmem_llama.store.location import Origin
from kvmem_llama.store.tables import BLOCKS
from kvmem_llama.workspace import Workspace

D = 32
SLOT = 8192  # bytes on disk of a record


def widen(patch: pytest.MonkeyPatch) -> None:
    """From now on heads of the fake model have 32 dims, and layers 2 query heads of one KV head."""
    row = D * 4
    layers = tuple(replace(layer, d_k=D, raw_k_row=row, k_row=row) for layer in fake_model.LAYERS)
    patch.setattr(fake_model, "_D", D)
    patch.setattr(fake_model, "LAYERS", layers)


def calibration(
    heads: Sequence[tuple[int, int]] = ((2, 0), (0, 1), (2, 1)), *, centred: bool = True, **changes: object
) -> Calibration:
    """heads: (layer, query head)."""
    rng = np.random.default_rng(1)
    made = Calibration(
        model=fake_model.FINGERPRINT,
        model_name="fake",
        heads=tuple(
            CalibratedHead(il, head, 0.5, tuple(rng.normal(0, 0.1, D).tolist()) if centred else None)
            for il, head in heads
        ),
        centred=centred,
        index_type="q8_0",
        spread={"heads": 0.25, "lexical": 0.5},
        shares={"heads": 0.3, "lexical": 0.2},
        weights={"heads": 0.6, "lexical": 0.4},
        measured={},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def write(folder: Path, of: Calibration, name: str = "calibration.json") -> str:
    """The path of a file that holds a calibration."""
    dump(of, folder / name)
    return str(folder / name)


@contextmanager
def on(folder: Path, n_disk: int = 0, **options: Any) -> Iterator[Engine]:
    """An engine whose workspaces lie in a folder. n_disk: records that fit the disk budget."""
    defaults = {"score": "heads", "calibration": str(folder / "calibration.json"), "durability": "relaxed"}
    with engine_on(folder / "data", disk_budget=n_disk * SLOT, **(defaults | options)) as engine:
        yield engine


# -- what must be true of the indexes


def history_of(ws: Workspace) -> History:
    return ws._policy._session.history  # type: ignore[attr-defined,no-any-return]


def fresh(index: BlockRows) -> BlockRows:
    """An empty index of the same kind."""
    layout = fake_model.RecordLayout.of(fake_model.LAYERS, index.block_size, "f32")
    if isinstance(index, MeanKIndex):
        return MeanKIndex(fake_model.LAYERS, layout, chunk_blocks=1)
    assert isinstance(index, TokenIndex)
    heads = [(head.il, head.head_kv) for head in index.heads]
    return TokenIndex(fake_model.LAYERS, layout, heads, "q8_0", chunk_blocks=1)


def check_indexes(history: History, recomputed: Container[int] = ()) -> int:
    """Every row is the one that is made of the block's record -> blocks whose records are lost. recomputed:
    numbers of blocks that have another record than their rows."""
    n_lost = 0
    for index in history.indexes:
        assert len(index) == len(history.table)
        made = fresh(index)
        for number, block in enumerate(history.table):
            if history.store.where(block.ref) == "tokens":
                n_lost += 1
                continue
            if number in recomputed:
                continue
            try:
                made.append(history.store.get(block.ref), block.count)
            except RecordDamaged:
                n_lost += 1
                continue
            assert index.counts[number] == block.count
            assert index.row(number).tobytes() == made.row(0).tobytes(), f"row {number}"
            made.truncate(0)
    return n_lost


def rows_of(history: History) -> list[list[bytes | None]]:
    """Every row of every index; None where there is none."""
    return [
        [
            None
            if not index.counts[number] or (isinstance(index, MeanKIndex) and number in history.unscored)
            else index.row(number).tobytes()
            for number in range(len(index))
        ]
        for index in history.indexes
    ]


def recomputed_of(ws: Workspace) -> set[int]:
    """Numbers of the family's blocks that were computed again. They have kept the rows that they had."""
    assert ws._opened is not None
    with ws._opened.holding.family.catalog.snapshot() as db:
        return {row.number for row in BLOCKS.rows(db) if row.origin == Origin.RECOMPUTED}
