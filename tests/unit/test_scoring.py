"""Block scores: the native scorer equals the float64 oracle over the same float16 index."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mean_k_data import Model, Shape

from kvmem_llama.errors import KernelsMissing
from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.memory.scoring import QueryRows, make_scorer
from kvmem_llama.memory.scoring.cpu import CpuScorer
from kvmem_llama.memory.scoring.reference import ReferenceScorer
from kvmem_llama.memory.selector import select
from kvmem_llama.native import kernels, kernels_cdef
from kvmem_llama.native.kernels import Isa
from kvmem_llama.settings import Settings

KERNELS = kernels.load()
ISAS = [isa for isa in Isa if Isa.AUTO < isa <= KERNELS.best_isa]
SHAPES: dict[str, Shape] = {
    "MHA": (4, 4, 64),
    "GQA": (6, 2, 64),
    "GQA 128": (8, 2, 128),
    "MQA 256": (4, 1, 256),
    "odd": (3, 1, 13),
}


def cpu(**options: object) -> CpuScorer:
    return CpuScorer(KERNELS, **options)  # type: ignore[arg-type]


def check(query: QueryRows, index: MeanKIndex, candidates: np.ndarray, scorer: CpuScorer) -> np.ndarray:
    """Relative 1e-4, the sum is the number of query tokens, and the same top-k outside ties."""
    expected = ReferenceScorer().score(query, index, candidates)
    got = scorer.score(query, index, candidates)
    assert got.dtype == np.float64 and got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-25)
    if len(candidates):
        assert abs(got.sum() / query.n_query - 1) < 1e-5
    for k in (1, 5, len(candidates) // 3):
        if 0 < k < len(candidates):
            best = np.sort(expected)[::-1]
            if best[k - 1] - best[k] > 2e-4 * best[k - 1]:
                assert set(select(got, candidates, k)) == set(select(expected, candidates, k))
    return got


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("n_query", [1, 5, 64, 600])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_native_equals_reference(shape: Shape, n_query: int, isa: Isa) -> None:
    model = Model([shape, shape], seed=n_query)
    index = model.index(331)
    check(model.query(n_query), index, np.arange(331), cpu(n_threads=2, isa=isa))


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("strength", [0.0, 1.0, 30.0, 1000.0])
def test_any_tile_size_gives_the_same_scores(strength: float, isa: Isa) -> None:
    """Flat and peaked softmaxes, 5,000 blocks in several chunks."""
    model = Model([(4, 2, 64), (2, 1, 24)], seed=7)
    index, query = model.index(5000, chunk_blocks=1024), model.query(9, strength)
    candidates = np.arange(5000)
    one = cpu(tile=1, isa=isa).score(query, index, candidates)
    assert np.isfinite(one).all() and abs(one.sum() / 9 - 1) < 1e-5
    for tile in (0, 7, 4096, 5000, 10**9):
        scores = cpu(tile=tile, isa=isa).score(query, index, candidates)
        np.testing.assert_allclose(scores, one, rtol=2e-6, atol=1e-25)
    if strength <= 30:  # beyond, q.k is so large that a float32 product has no four digits after the point
        for tile in (0, 1, 7, 4096, 5000):
            check(query, index, candidates, cpu(tile=tile, isa=isa))


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_the_number_of_threads_changes_no_bit(isa: Isa) -> None:
    model = Model([(6, 2, 64)] * 7, seed=1)
    index, query = model.index(700), model.query(40)
    candidates = np.arange(3, 697)
    one = cpu(n_threads=1, isa=isa).score(query, index, candidates)
    for n_threads in (2, 3, 8, 100):
        for _ in range(3):
            again = cpu(n_threads=n_threads, isa=isa).score(query, index, candidates)
            assert again.tobytes() == one.tobytes()


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@hypothesis_settings(max_examples=40)
@given(st.data())
def test_any_candidates_of_any_layers_are_scored(isa: Isa, data: st.DataObject) -> None:
    """Layers of different shapes, partial blocks, any ascending subset, any chunk and tile size."""
    shapes = data.draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([8, 16, 40, 64])),
            min_size=1,
            max_size=3,
        )
    )
    model = Model([(group * kv, kv, d) for group, kv, d in shapes], data.draw(st.integers(0, 999)))
    n_blocks = data.draw(st.integers(1, 300))
    index = model.index(n_blocks, chunk_blocks=data.draw(st.sampled_from([1, 32, 1024])))
    keep = data.draw(st.sampled_from([0.02, 0.5, 0.98, 1.0]))
    candidates = np.flatnonzero(model.rng.random(n_blocks) < keep)
    query = model.query(data.draw(st.integers(1, 20)), data.draw(st.sampled_from([0.1, 2.0, 20.0])))
    check(
        query, index, candidates, cpu(n_threads=2, tile=data.draw(st.sampled_from([0, 1, 7, 4096])), isa=isa)
    )


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("n_query", [1, 64, 513])
def test_one_candidate_scores_the_number_of_query_tokens(n_query: int, isa: Isa) -> None:
    model = Model([(9, 3, 64), (4, 1, 256)])
    index = model.index(10)
    assert cpu(isa=isa).score(model.query(n_query), index, np.array([4])).tolist() == [n_query]


def test_no_candidates_give_no_scores() -> None:
    model = Model([(4, 2, 16)])
    index = model.index(5)
    for scorer in (cpu(), ReferenceScorer()):
        assert scorer.score(model.query(3), index, np.zeros(0, np.int64)).shape == (0,)
        empty = scorer.score(model.query(0), index, np.arange(5))
        assert empty.tolist() == [0.0] * 5


def test_a_block_that_holds_the_asked_key_wins_by_far() -> None:
    """The formula by hand: one layer, one head, two blocks whose means are known."""
    model = Model([(1, 1, 8)], block_size=2)
    index = MeanKIndex(model.layers, model.layout)
    record = np.zeros(model.layout.nbytes, np.uint8)
    rows = model.layout.raw_k(record, 0, model.layers[0], 2)
    for value in (0.0, 2.0):
        rows[:] = value
        index.append(record, 2)
    query = QueryRows((np.ones((1, 1, 8), np.float32),), (0.25,))
    weight = 1 / (1 + np.exp(-0.25 * 16))  # q.k is 16 for the second block and 0 for the first
    for scorer in (cpu(), ReferenceScorer()):
        np.testing.assert_allclose(scorer.score(query, index, np.arange(2)), [1 - weight, weight], rtol=1e-6)


def test_an_unscored_layer_changes_nothing() -> None:
    model = Model([(4, 2, 32), (4, 2, 32), (4, 2, 32)])
    both = MeanKIndex(model.layers, model.layout, [0, 2])
    records = [model.record() for _ in range(50)]
    for record in records:
        both.append(record, 32)
    query = model.query(6)
    part = QueryRows((query.layers[0], query.layers[2]), (query.scales[0], query.scales[2]))
    check(part, both, np.arange(50), cpu())


@pytest.mark.parametrize("scorer", [cpu(), ReferenceScorer()], ids=lambda scorer: scorer.name)
def test_what_does_not_belong_together_is_refused(scorer: CpuScorer | ReferenceScorer) -> None:
    model = Model([(4, 2, 16), (4, 2, 16)])
    index, query = model.index(5), model.query(2)
    for bad in ([-1, 2], [3, 5], [2, 2], [3, 1]):
        with pytest.raises(ValueError, match="ascending"):
            scorer.score(query, index, np.array(bad))
    with pytest.raises(ValueError, match="candidates of"):
        scorer.score(query, index, np.array([0.0]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 layers"):
        scorer.score(QueryRows(query.layers[:1], query.scales[:1]), index, np.arange(5))
    with pytest.raises(ValueError, match="scored layer 1"):
        wrong = (query.layers[0], query.layers[1][:, :, :8])
        scorer.score(QueryRows(wrong, query.scales), index, np.arange(5))
    with pytest.raises(ValueError, match="differ between layers"):
        QueryRows((query.layers[0], query.layers[1][:1]), query.scales)


def test_the_settings_choose_the_scorer() -> None:
    assert make_scorer(Settings(scorer="reference")).name == "reference"
    assert make_scorer(Settings(n_threads=3)).name == "cpu"


def test_the_binding_declares_what_the_header_declares() -> None:
    header = Path(__file__).parents[2] / "kernels" / "cpu" / "kvmem_kernels.h"
    if not header.is_file():
        pytest.skip("the source tree is not here")
    text = header.read_text(encoding="utf-8")
    body = text[text.index("enum kvmem_kernels_error {") : text.rindex("#ifdef __cplusplus")]
    body = re.sub(r"//[^\n]*|KVMEM_KERNELS_API", "", body)
    assert body.split() == kernels_cdef.KERNELS_CDEF.split()
    assert f"#define KVMEM_KERNELS_ABI {kernels_cdef.KERNELS_ABI}\n" in text


def test_a_source_tree_without_a_build_is_told_from_a_broken_package(tmp_path: Path) -> None:
    path = tmp_path / "kvmem_llama" / "_lib" / "libkvmem_kernels.so"
    path.parent.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(KernelsMissing, match="another folder, or as `python -P`"):
        kernels.Kernels(path)
    (path.parent / "patch_id.txt").touch()
    with pytest.raises(KernelsMissing, match="Reinstall"):
        kernels.Kernels(path)


def test_a_missing_or_foreign_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(KernelsMissing, match="missing"):
        kernels.Kernels(tmp_path / "nothing.so")
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(KernelsMissing, match="cannot be used"):
        kernels.Kernels(tmp_path / "text.so")
