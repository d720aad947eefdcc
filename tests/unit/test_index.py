"""The Mean-K index: right, the same however it was filled, and cheap to fork."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mean_k_data import Model, layer_info

from kvmem_llama.errors import InvalidOption
from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.native.layout import RecordLayout

SHAPES = [(4, 2, 64), (4, 1, 24), (3, 3, 8)]


def expected_mean(model: Model, record: np.ndarray, layer: int, count: int) -> np.ndarray:
    """float64 sum row by row, divided and rounded once: [n_head_kv, d] float16."""
    total = np.zeros((model.layers[layer].n_head_kv, model.layers[layer].d_k))
    for row in model.layout.raw_k(record, layer, model.layers[layer], count):
        total += row.astype(np.float64)
    return np.clip(total / count, -65504.0, 65504.0).astype(np.float16)


def bits(index: MeanKIndex) -> list[bytes]:
    return [index.means(layer).tobytes() for layer in range(len(index.layers))]


@pytest.mark.parametrize("raw_k_type", ["f16", "f32"])
@pytest.mark.parametrize("count", [1, 2, 3, 31, 32])
def test_a_mean_is_the_rounded_float64_mean_of_the_rows(raw_k_type: str, count: int) -> None:
    model = Model(SHAPES, raw_k_type=raw_k_type)
    record = model.record()
    index = MeanKIndex(model.layers, model.layout)
    index.append(record, count)
    for layer in range(len(SHAPES)):
        np.testing.assert_array_equal(index.means(layer)[:, 0], expected_mean(model, record, layer, count))


def test_every_rounding_case_agrees_with_numpy() -> None:
    """Means on and beside ties, subnormal, tiny, huge and zero: one row is its own mean."""
    info = layer_info(0, (1, 1, 4096), "f32")
    layout = RecordLayout.of([info], 2, "f32")
    halves = np.arange(0, 0x7C00, 61, dtype=np.uint16).view(np.float16).astype(np.float64)
    steps = np.concatenate([halves, (halves[:-1] + halves[1:]) / 2])
    values = np.concatenate(
        [steps, -steps, steps * (1 + 2**-22), [0.0, -0.0, 1e-30, 1e6, -np.inf, 65519.9, 65520.0]]
    )
    values = np.resize(values, (2, 4096))
    index = MeanKIndex([info], layout, chunk_blocks=2)
    record = np.zeros(layout.nbytes, np.uint8)
    rows = layout.raw_k(record, 0, info, 2)
    for row in (0, 1):
        rows[:] = values[row].reshape(1, 1, -1)
        index.append(record, 1)
        expected = np.clip(0.0 + rows[0].astype(np.float64), -65504, 65504).astype(np.float16)
        assert index.means(0)[:, row].tobytes() == expected.tobytes()
    # two rows: the float64 mean needs more bits than a float32 holds
    rows[0], rows[1] = values[0].reshape(1, -1), values[1].reshape(1, -1)
    index.replace_last(record, 2)
    total = 0.0 + rows[0].astype(np.float64) + rows[1].astype(np.float64)
    expected = np.clip(total / 2, -65504, 65504).astype(np.float16)
    assert index.means(0)[:, 1].tobytes() == expected.tobytes()


@given(
    st.lists(st.integers(1, 32), min_size=1, max_size=12),
    st.sampled_from(["f16", "f32"]),
    st.integers(0, 2**32 - 1),
)
def test_the_same_rows_give_the_same_bits_however_they_were_batched(
    batches: list[int], raw_k_type: str, seed: int
) -> None:
    """Rows reach a record in batches of any size and the block is indexed along the way."""
    model = Model(SHAPES, seed, raw_k_type)
    whole = model.record()
    expected = MeanKIndex(model.layers, model.layout, chunk_blocks=4)
    expected.append(whole, model.layout.block_size)

    index = MeanKIndex(model.layers, model.layout, chunk_blocks=4)
    record = np.zeros_like(whole)
    filled = 0
    for n in batches:
        end = min(filled + n, model.layout.block_size)
        for layer, info in enumerate(model.layers):
            rows = model.layout.raw_k(record, layer, info, end)
            rows[filled:] = model.layout.raw_k(whole, layer, info, end)[filled:]
        index.replace_last(record, end) if filled else index.append(record, end)
        filled = end
    index.replace_last(whole, model.layout.block_size)
    assert bits(index) == bits(expected)


@given(st.data())
def test_truncation_and_appending_again_give_the_same_bits(data: st.DataObject) -> None:
    model = Model(SHAPES, data.draw(st.integers(0, 99)))
    records = [model.record() for _ in range(11)]
    expected = MeanKIndex(model.layers, model.layout, chunk_blocks=4)
    for record in records:
        expected.append(record, 32)

    index = MeanKIndex(model.layers, model.layout, chunk_blocks=4)
    for record in records[: data.draw(st.integers(1, 11))]:
        index.append(record, 32)
    for keep in data.draw(st.lists(st.integers(0, 11), max_size=4)):
        index.truncate(min(keep, len(index)))
        other = model.record()
        index.append(other, data.draw(st.integers(1, 32)))
        index.truncate(len(index) - 1)
    for record in records[len(index) :]:
        index.append(record, 32)
    assert bits(index) == bits(expected)
    assert index.nbytes == expected.nbytes


@given(st.data())
def test_forks_never_see_each_other(data: st.DataObject) -> None:
    """Any mix of appends, replacements, truncations and forks equals separate indexes that share nothing."""
    model = Model(SHAPES[:2], 3)
    pool = [model.record() for _ in range(6)]
    indexes = [MeanKIndex(model.layers, model.layout, chunk_blocks=4)]
    contents: list[list[tuple[int, int]]] = [[]]  # (record, count) of every row
    for _ in range(data.draw(st.integers(1, 25))):
        which = data.draw(st.integers(0, len(indexes) - 1))
        index, rows = indexes[which], contents[which]
        record, count = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 32))
        match data.draw(st.sampled_from(["append", "replace", "truncate", "fork"])):
            case "append":
                index.append(pool[record], count)
                rows.append((record, count))
            case "replace" if rows:
                index.replace_last(pool[record], count)
                rows[-1] = (record, count)
            case "truncate":
                keep = data.draw(st.integers(0, len(rows)))
                index.truncate(keep)
                del rows[keep:]
            case "fork" if len(indexes) < 4:
                indexes.append(index.fork())
                contents.append(list(rows))
    for index, rows in zip(indexes, contents, strict=True):
        alone = MeanKIndex(model.layers, model.layout, chunk_blocks=4)
        for record, count in rows:
            alone.append(pool[record], count)
        assert bits(index) == bits(alone)
        assert index.counts.tolist() == [count for _, count in rows]


def test_a_fork_shares_full_chunks_and_growth_moves_nothing() -> None:
    model = Model(SHAPES)
    record = model.record()
    index = MeanKIndex(model.layers, model.layout, chunk_blocks=4)
    for _ in range(10):
        index.append(record, 32)
    first = [chunk.ctypes.data for chunk in index.chunks]
    fork = index.fork()
    fork.append(record, 32)
    assert [chunk.ctypes.data for chunk in fork.chunks][:2] == first[:2]
    assert fork.chunks[2].ctypes.data != first[2]
    for _ in range(10):
        index.append(record, 32)
    assert [chunk.ctypes.data for chunk in index.chunks][:2] == first[:2]
    assert fork.bytes_per_token == sum(layer.n_head_kv * layer.d * 2 for layer in index.layers) / 32


def test_means_are_gathered_in_any_order() -> None:
    model = Model(SHAPES)
    index = model.index(150)
    whole = index.means(1)
    blocks = np.array([149, 0, 64, 63, 64, 7])
    np.testing.assert_array_equal(index.means(1, blocks), whole[:, blocks])
    assert index.means(1, blocks[:0]).shape == (1, 0, 24)
    for bad in (-1, 150):
        with pytest.raises(IndexError):
            index.means(0, np.array([bad]))


def test_only_full_attention_layers_can_be_scored() -> None:
    layers = [layer_info(il, (2, 1, 16), cache=il % 2) for il in range(5)]
    layout = RecordLayout.of(layers, 32, "f16")
    assert [layer.il for layer in MeanKIndex(layers, layout).layers] == [0, 2, 4]
    assert [layer.il for layer in MeanKIndex(layers, layout, [4, 2]).layers] == [2, 4]
    for wrong in ([1], [0, 9], []):
        with pytest.raises(InvalidOption, match="0, 2, 4"):
            MeanKIndex(layers, layout, wrong)


def test_wrong_use_is_refused() -> None:
    model = Model(SHAPES)
    record = model.record()
    index = MeanKIndex(model.layers, model.layout)
    with pytest.raises(IndexError):
        index.replace_last(record, 1)
    for count in (0, 33):
        with pytest.raises(ValueError, match="block size is 32"):
            index.append(record, count)
    with pytest.raises(ValueError, match="a record of"):
        index.append(record[1:], 32)
    with pytest.raises(IndexError):
        index.truncate(1)
    with pytest.raises(ValueError, match="power of two"):
        MeanKIndex(model.layers, model.layout, chunk_blocks=1000)
    assert len(index) == 0 and index.nbytes == 0
