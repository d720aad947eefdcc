"""The token index and its scorer: rows as ggml quantizes them, scores as the float64 oracle has them."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from mean_k_data import Model

from kvmem_llama.errors import InvalidOption
from kvmem_llama.memory.scoring.tokens import HeadRows, ReferenceTokenScorer, TokenScorer
from kvmem_llama.memory.token_index import INDEX_TYPES, TokenIndex
from kvmem_llama.native import kernels
from kvmem_llama.native.kernels import Isa

KERNELS = kernels.load()
ISAS = [isa for isa in Isa if Isa.AUTO < isa <= KERNELS.best_isa]
HEADS = [(0, 1), (2, 0), (2, 1)]


def model(d: int = 64, seed: int = 3, raw_k_type: str = "f16") -> Model:
    return Model([(6, 2, d)] * 3, seed, raw_k_type)


def filled(of: Model, n_blocks: int, index_type: str = "q4_0", chunk_blocks: int = 16) -> TokenIndex:
    """The last block is partial."""
    index = TokenIndex(of.layers, of.layout, HEADS, index_type, chunk_blocks=chunk_blocks)
    for b in range(n_blocks):
        index.append(of.record(), 32 if b < n_blocks - 1 else 5)
    return index


def rows(of: Model, n_query: int, strength: float = 1.0) -> list[HeadRows]:
    """As many query heads for each KV head as it likes."""
    d = of.layers[0].d_k
    return [
        HeadRows((strength * of.rng.normal(size=(n_query, n, d))).astype(np.float32), d**-0.5)
        for n in (2, 1, 3)
    ]


@pytest.mark.parametrize("raw_k_type", ["f16", "f32"])
@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize("d", [32, 64, 256])
def test_rows_are_quantized_as_ggml_does_it(d: int, index_type: str, raw_k_type: str) -> None:
    of = model(d, raw_k_type=raw_k_type)
    record = of.record()
    index = TokenIndex(of.layers, of.layout, HEADS, index_type, chunk_blocks=4)
    index.append(of.record(), 32)
    index.append(record, 7)
    kind = GGMLQuantizationType(int(INDEX_TYPES[index_type]))
    for i, (il, head) in enumerate(HEADS):
        raw = of.layout.raw_k(record, il, of.layers[il], 32)[:7, head].astype(np.float32)
        expected = quants.dequantize(quants.quantize(raw, kind), kind)
        np.testing.assert_array_equal(index.tokens(i, 1), expected)


def test_what_is_not_a_number_becomes_zero() -> None:
    of = model()
    record = of.record()
    of.layout.raw_k(record, 0, of.layers[0], 32)[2, 1, 5] = np.nan
    of.layout.raw_k(record, 0, of.layers[0], 32)[3, 1, 40] = np.inf
    index = TokenIndex(of.layers, of.layout, HEADS)
    index.append(record, 32)
    got = index.tokens(0, 0)
    assert np.isfinite(got).all()
    assert not got[2, :32].any() and got[2, 32:].any()
    assert not got[3, 32:].any() and got[3, :32].any()


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize("n_query", [1, 5, 64])
@pytest.mark.parametrize("strength", [1.0, 12.0])
def test_native_equals_reference(isa: Isa, index_type: str, n_query: int, strength: float) -> None:
    of = model()
    index = filled(of, 40, index_type)
    query = rows(of, n_query, strength=strength)
    every, some = np.arange(40), np.array([0, 3, 4, 5, 15, 16, 31, 39])
    for candidates in (every, some, some[:1], some[:0]):
        expected = ReferenceTokenScorer().score(query, index, candidates)
        for tile in (0, 1, 7, 64):
            got = TokenScorer(KERNELS, isa=isa, tile=tile).score(query, index, candidates)
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-25)
        if len(candidates):
            assert abs(got.sum() / n_query - 1) < 1e-5


def test_scores_do_not_depend_on_threads() -> None:
    of = model()
    index, query = filled(of, 300), rows(of, 64)
    one = TokenScorer(KERNELS, n_threads=1).score(query, index, np.arange(300))
    four = TokenScorer(KERNELS, n_threads=4).score(query, index, np.arange(300))
    np.testing.assert_array_equal(one, four)


def test_a_fork_and_its_origin_do_not_see_each_other() -> None:
    of = model()
    index = filled(of, 20, chunk_blocks=8)
    before = [index.tokens(1, b) for b in range(20)]
    fork = index.fork()
    fork.replace_last(of.record(), 32)
    fork.append(of.record(), 32)
    index.truncate(18)
    index.append(of.record(), 9)
    fork.replace(3, of.record(), 32)
    for b in range(18):
        np.testing.assert_array_equal(index.tokens(1, b), before[b])
        if b != 3:
            np.testing.assert_array_equal(fork.tokens(1, b), before[b])
    assert not np.array_equal(fork.tokens(1, 3), before[3])
    assert (len(index), len(fork)) == (19, 21)


@pytest.mark.parametrize("heads", [[], [(5, 0)], [(0, 2)], [(0, -1)]])
def test_heads_that_are_not_there_are_refused(heads: list[tuple[int, int]]) -> None:
    of = model()
    with pytest.raises(InvalidOption, match="heads"):
        TokenIndex(of.layers, of.layout, heads)


def test_a_head_size_that_no_group_fits_is_refused() -> None:
    of = Model([(2, 1, 40)])
    with pytest.raises(InvalidOption, match="multiple of 32"):
        TokenIndex(of.layers, of.layout, [(0, 0)])
