"""The index on disk: the same bits again, whatever happened to the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mean_k_data import Model

from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.store.content import END, Span
from kvmem_llama.store.files import Files
from kvmem_llama.store.index_file import F16, IndexChunks, IndexedLayer, IndexFiles, IndexShape, mean_xxh
from kvmem_llama.store.rows import BlockRow, new_block

SHAPE = IndexShape("layout", 4, (IndexedLayer(0, 2, 8), IndexedLayer(3, 1, 24)))


def make_rows(n: int, seed: int = 0) -> F16:
    return np.random.default_rng(seed).normal(size=(n, SHAPE.n_elements)).astype(np.float16)


def blocks_of(rows: F16, lineage: int = 1) -> list[BlockRow]:
    return [new_block(lineage, i, 4 * i, 4, None, mean_xxh(row)) for i, row in enumerate(rows)]


def part(lineage: int, first: int, end: int = END) -> Span:
    return Span(lineage, (0, END), (first, end), (0, END))


@pytest.fixture
def index(tmp_path: Path) -> IndexFiles:
    return IndexFiles(tmp_path, "family", SHAPE, Files())


def loaded(index: IndexFiles, parts: list[Span], blocks: list[BlockRow]) -> tuple[list[F16], list[int]]:
    into = IndexChunks(SHAPE, None, len(blocks), 4)
    missing = index.load(parts, blocks, into)
    return into.chunks, missing


def expected_chunks(rows: F16, chunk: int = 4) -> list[F16]:
    into = IndexChunks(SHAPE, None, len(rows), chunk)
    for i, row in enumerate(rows):
        into.put(i, row[np.newaxis])
    return into.chunks


def same(chunks: list[F16], others: list[F16], n: int, chunk: int = 4) -> bool:
    """The first `n` rows are the same; what lies behind them is nobody's."""
    for number, (one, other) in enumerate(zip(chunks, others, strict=True)):
        n_here = min(n - number * chunk, chunk)
        offset = 0
        for layer in SHAPE.layers:
            end = offset + layer.n_head_kv * layer.d * chunk
            shape = (layer.n_head_kv, chunk, layer.d)
            a, b = (x[offset:end].reshape(shape)[:, :n_here] for x in (one, other))
            if a.tobytes() != b.tobytes():
                return False
            offset = end
    return True


def test_rows_come_back_as_the_scorer_keeps_them() -> None:
    """Chunks made of rows are bit for bit those of an index that was filled with the records."""
    model = Model([(4, 2, 64), (4, 1, 24), (3, 3, 8)])
    index = MeanKIndex(model.layers, model.layout, chunk_blocks=4)
    records = [model.record() for _ in range(11)]
    for record in records:
        index.append(record, 32)
    layers = tuple(IndexedLayer(layer.il, layer.n_head_kv, layer.d) for layer in index.layers)
    shape = IndexShape("x", 32, layers)
    into = IndexChunks(shape, None, 11, 4)
    rows = np.stack([np.concatenate([index.means(i)[:, b].reshape(-1) for i in range(3)]) for b in range(11)])
    into.put(0, rows[:3])
    into.put(3, rows[3:])
    for number in range(3):
        n_here = min(11 - 4 * number, 4)
        offset = 0
        for layer in index.layers:
            end = offset + layer.n_head_kv * layer.d * 4
            shape3 = (layer.n_head_kv, 4, layer.d)
            ours = into.chunks[number][offset:end].reshape(shape3)[:, :n_here]
            theirs = index.chunks[number][offset:end].reshape(shape3)[:, :n_here]
            assert ours.tobytes() == theirs.tobytes()
            offset = end


def test_only_the_scored_layers_are_kept() -> None:
    rows = make_rows(5)
    into = IndexChunks(SHAPE, [3], 5, 4)
    into.put(0, rows)
    assert [chunk.shape for chunk in into.chunks] == [(96,), (96,)]
    np.testing.assert_array_equal(into.chunks[0].reshape(1, 4, 24)[0], rows[:4, 16:])


@given(
    n=st.integers(1, 30),
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    slice_rows=st.integers(1, 7),
)
def test_rows_written_in_any_pieces_are_read_in_any_slices(
    tmp_path_factory: pytest.TempPathFactory, n: int, pieces: list[int], slice_rows: int
) -> None:
    folder = tmp_path_factory.mktemp("index")
    index = IndexFiles(folder, "family", SHAPE, Files(), durable=False)
    rows = make_rows(n)
    at = 0
    while at < n:
        for piece in pieces:
            index.put(1, 0, at, rows[at : at + piece])
            at += piece
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvmem_llama.store.row_files._SLICE", slice_rows * SHAPE.row_nbytes)
        chunks, missing = loaded(index, [part(1, 0)], blocks_of(rows))
    assert missing == [] and same(chunks, expected_chunks(rows), n)


def test_a_history_takes_its_rows_from_the_files_of_all_its_lineages(index: IndexFiles) -> None:
    rows = make_rows(12)
    index.put(1, 0, 0, rows)
    index.put(2, 5, 5, rows[5:9])
    index.put(7, 9, 9, rows[9:])
    parts = [part(1, 0, 5), part(2, 5, 9), part(7, 9)]
    chunks, missing = loaded(index, parts, blocks_of(rows))
    assert missing == [] and same(chunks, expected_chunks(rows), 12)


def test_a_row_that_took_anothers_place_is_the_one_that_counts(index: IndexFiles) -> None:
    rows = make_rows(6)
    index.put(1, 0, 0, rows)
    other = make_rows(1, seed=9)
    index.put(1, 0, 5, other)
    assert loaded(index, [part(1, 0)], blocks_of(rows))[1] == [5]
    rows[5] = other
    assert loaded(index, [part(1, 0)], blocks_of(rows))[1] == []


def test_every_flipped_bit_of_a_row_or_the_header_is_noticed(index: IndexFiles) -> None:
    rows = make_rows(6)
    index.put(1, 0, 0, rows)
    path = index.path(1)
    whole = path.read_bytes()
    n_header = len(whole) - rows.nbytes
    rng = np.random.default_rng(1)
    for bit in rng.integers(0, len(whole) * 8, 300).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        _, missing = loaded(index, [part(1, 0)], blocks_of(rows))
        if bit // 8 < n_header:
            assert missing == list(range(6))
        else:
            assert missing == [(bit // 8 - n_header) // SHAPE.row_nbytes]


def test_a_file_that_is_short_missing_or_anothers_is_made_again(index: IndexFiles, tmp_path: Path) -> None:
    rows = make_rows(6)
    blocks = blocks_of(rows)
    assert loaded(index, [part(1, 0)], blocks)[1] == list(range(6))
    index.put(1, 0, 0, rows)
    path = index.path(1)
    whole = path.read_bytes()
    path.write_bytes(whole[: -SHAPE.row_nbytes - 1])
    assert loaded(index, [part(1, 0)], blocks)[1] == [4, 5]
    path.write_bytes(whole[:100])
    assert loaded(index, [part(1, 0)], blocks)[1] == list(range(6))
    path.write_bytes(whole)
    path.rename(index.path(2))
    assert loaded(index, [part(2, 0)], blocks)[1] == list(range(6))
    for other in (
        IndexFiles(tmp_path, "another", SHAPE, Files()),
        IndexFiles(tmp_path, "family", replace(SHAPE, layout="another"), Files()),
        IndexFiles(tmp_path, "family", replace(SHAPE, block_size=8), Files()),
    ):
        index.path(1).write_bytes(whole)
        assert loaded(other, [part(1, 0)], blocks)[1] == list(range(6))
        other.put(1, 0, 5, rows[5:])  # begins the file anew
        assert loaded(other, [part(1, 0)], blocks)[1] == list(range(5))


def test_a_row_written_far_ahead_leaves_rows_that_do_not_pass(index: IndexFiles) -> None:
    rows = make_rows(6)
    index.put(1, 0, 4, rows[4:])
    assert loaded(index, [part(1, 0)], blocks_of(rows))[1] == [0, 1, 2, 3]


def test_cutting_and_dropping_give_the_space_back(index: IndexFiles) -> None:
    rows = make_rows(6)
    index.put(1, 2, 2, rows)
    assert index.path(1).stat().st_size == index.nbytes(6)
    index.cut(1, 2, 5)
    assert index.path(1).stat().st_size == index.nbytes(3)
    index.cut(1, 2, 7)
    assert index.path(1).stat().st_size == index.nbytes(3)
    index.drop(1)
    index.drop(1)
    index.cut(1, 2, 3)
    assert not index.path(1).exists()
