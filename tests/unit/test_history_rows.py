"""Index rows of a history whose records are computed again: of what is kept of them, and once for all."""

from __future__ import annotations

import fake_model
import numpy as np
import pytest
import wide_heads

from kvmem_llama.memory.history import History
from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.memory.indexes import Indexes
from kvmem_llama.memory.texts import BlockTexts
from kvmem_llama.memory.token_index import TokenIndex
from kvmem_llama.native.layout import RecordLayout
from kvmem_llama.store.host import HostStore
from kvmem_llama.store.raw_k import RawK
from kvmem_llama.store.records import Record

BLOCK = 8
N = 6  # blocks
HEADS = ((0, 0), (2, 0))

pytestmark = pytest.mark.usefixtures("wide")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    wide_heads.widen(monkeypatch)


def layout_of(raw_k_type: str) -> RecordLayout:
    return RecordLayout.of(fake_model.LAYERS, BLOCK, raw_k_type)


def indexes_of(layout: RecordLayout) -> Indexes:
    layers = fake_model.LAYERS
    return Indexes(
        MeanKIndex(layers, layout, chunk_blocks=4), TokenIndex(layers, layout, HEADS, "q4_0", chunk_blocks=4)
    )


def record_of(layout: RecordLayout, seed: int) -> Record:
    """Keys that no smaller type holds exactly."""
    dtype = np.float16 if layout.raw_k_type == "f16" else np.float32
    keys = np.random.default_rng(seed).normal(size=layout.nbytes // np.dtype(dtype).itemsize)
    return keys.astype(dtype).view(np.uint8).copy()


def history_of(layout: RecordLayout) -> History:
    store = HostStore(RawK.of(layout))
    texts = BlockTexts(lambda ids: "", BLOCK)
    history = History(store, indexes_of(layout), texts, BLOCK, layout.nbytes)
    history.extend(np.zeros(N * BLOCK, np.int32))
    for number in range(N):
        history.carry(number * BLOCK, BLOCK, lambda record, n=number: np.copyto(record, record_of(layout, n)))
    history.commit()
    return history


def lose_rows(history: History, number: int) -> None:
    """As after a restart, of a block whose record and index rows are lost."""
    assert history.indexes.tokens is not None
    history.indexes.tokens._counts[number] = 0
    history.unscored.append(number)


def rows_of(history: History, number: int) -> list[bytes]:
    return [index.row(number).tobytes() for index in history.indexes]


def rows_made_of(layout: RecordLayout, record: Record) -> list[bytes]:
    fresh = indexes_of(layout)
    fresh.append(record, BLOCK)
    return [index.row(0).tobytes() for index in fresh]


@pytest.mark.parametrize("raw_k_type", ["bf16", "q8_0"])
def test_rows_of_a_recomputed_block_are_made_of_the_rounded_keys(raw_k_type: str) -> None:
    layout = layout_of(raw_k_type)
    history = history_of(layout)
    lose_rows(history, 2)
    exact = record_of(layout, 99)
    unrounded = rows_made_of(layout, exact.copy())
    history.recompute(2 * BLOCK, exact.copy())
    kept = rows_made_of(layout, history.store.get(history.table[2].ref).copy())
    found = rows_of(history, 2)
    assert found == kept
    assert all(one != other for one, other in zip(found, unrounded, strict=True))
    assert not history.unscored and history.n_without_rows == 0


@pytest.mark.parametrize("mean_k", [True, False])
def test_rows_made_in_one_history_are_taken_by_another_with_the_same_blocks(mean_k: bool) -> None:
    layout = layout_of("f32")
    history = history_of(layout)
    for number in (1, 3, 5):
        if mean_k:
            lose_rows(history, number)
        else:
            history.indexes.tokens._counts[number] = 0  # type: ignore[union-attr]
    draft, fork = history.draft(4 * BLOCK + 3), history.fork()
    for number in (3, 5):
        history.recompute(number * BLOCK, record_of(layout, 50 + number))
    before = rows_of(draft, 4), rows_of(fork, 1)
    draft.take_rows(history)  # block 5 it does not have, block 4 it has cut
    assert rows_of(draft, 3) == rows_of(history, 3)
    assert draft.unscored == ([1] if mean_k else []) and draft.n_without_rows == 1
    assert rows_of(draft, 4) == before[0]
    fork.take_rows(history)
    assert rows_of(fork, 3) == rows_of(history, 3) and rows_of(fork, 5) == rows_of(history, 5)
    assert fork.unscored == ([1] if mean_k else []) and fork.n_without_rows == 1
    assert rows_of(fork, 1) == before[1]
    draft.recompute(BLOCK, record_of(layout, 51))
    history.take_rows(draft)
    assert rows_of(history, 1) == rows_of(draft, 1) and not history.unscored
    assert history.n_without_rows == 0 and fork.n_without_rows == 1
