"""The two stages of a search in a long history: what the second one scores, and that it is exact there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mean_k_data import Model

from kvmem_llama.calibration import CalibratedHead, Calibration
from kvmem_llama.memory.channels import Channels
from kvmem_llama.memory.indexes import Indexes
from kvmem_llama.memory.retrieval import Query, Ranking, Retriever
from kvmem_llama.memory.scoring import QueryRows
from kvmem_llama.memory.scoring.reference import ReferenceScorer
from kvmem_llama.memory.scoring.tokens import HeadRows, ReferenceTokenScorer
from kvmem_llama.memory.scoring.two_stage import N_PEAKED, narrowed
from kvmem_llama.memory.texts import BlockTexts
from kvmem_llama.memory.token_index import TokenIndex

N, BLOCK = 60, 32
MODEL = Model([(6, 2, 32)] * 2)
HEADS = [(0, 1), (1, 0)]
RNG = np.random.default_rng(4)
IDS = RNG.integers(0, 90, N * BLOCK).astype(np.int32)


def made_index() -> TokenIndex:
    index = TokenIndex(MODEL.layers, MODEL.layout, HEADS, chunk_blocks=16)
    for _ in range(N):
        index.append(MODEL.record(), BLOCK)
    return index


INDEX = made_index()


class History:
    indexes = Indexes(None, INDEX)
    texts = BlockTexts(lambda tokens: " ".join(f"w{t}" for t in tokens), BLOCK)
    n_complete = N

    def tokens(self, start: int = 0, end: int | None = None) -> np.ndarray:
        return IDS[start:end]


def heads(n_query: int) -> list[HeadRows]:
    return [HeadRows(RNG.normal(size=(n_query, 2, 32)).astype(np.float32), 32**-0.5) for _ in HEADS]


@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.sets(st.integers(0, N - 1), min_size=1),
    st.permutations(range(N)),
)
def test_as_many_blocks_as_the_limit_come_to_the_second_stage(
    n_query: int, limit: int, some: set[int], hints: list[int]
) -> None:
    candidates = np.array(sorted(some))
    rows = heads(n_query)
    found = narrowed(ReferenceTokenScorer(), rows, INDEX, candidates, limit, np.array(hints))
    is_narrowed = len(candidates) > limit and n_query > N_PEAKED
    assert len(found) == (limit if is_narrowed else len(candidates))
    assert set(found.tolist()) <= some and np.all(np.diff(found) > 0)
    if is_narrowed:
        hinted = [h for h in hints if h in some][: limit // 4]
        assert set(hinted) <= set(found.tolist())


def test_the_first_stage_asks_with_the_largest_query_rows() -> None:
    rows, candidates, loud = heads(N_PEAKED), np.arange(N), []
    rng = np.random.default_rng(9)
    order = rng.permutation(N_PEAKED + 12)
    for one in rows:  # the others are too small to say anything
        both = np.concatenate([one.q, 0.01 * rng.normal(size=(12, 2, 32)).astype(np.float32)])
        loud.append(HeadRows(np.ascontiguousarray(both[order]), one.scale))
    scores = ReferenceTokenScorer().score(rows, INDEX, candidates)
    found = narrowed(ReferenceTokenScorer(), loud, INDEX, candidates, 10, candidates[:0])
    assert found.tolist() == sorted(np.argsort(-scores)[:10].tolist())


def search(score: str, limit: int, n: int = 12) -> Ranking:
    calibration = Calibration(
        "f", "made up", (CalibratedHead(0, 3, 0.9), CalibratedHead(1, 2, 0.8)), False, "q4_0",
        {"heads": 0.5}, {"heads": 0.3, "lexical": 0.2}, {"heads": 0.6, "lexical": 0.4}, {},
    )  # fmt: skip
    shares = {"heads": 1.0} if score == "heads" else calibration.shares
    channels = Channels(shares, calibration.spread, calibration)
    retriever = Retriever(channels, ReferenceScorer(), ReferenceTokenScorer(), MODEL.layers, scan_limit=limit)
    return retriever.rank(Query(QUERY, "w3 w8 w40"), History(), np.arange(2, N), n)


QUERY = QueryRows(MODEL.query(20).layers, tuple(layer.scale for layer in MODEL.layers), (0, 1))


@pytest.mark.parametrize("score", ["heads", "fused"])
def test_a_limit_that_is_not_reached_changes_nothing(score: str) -> None:
    exact = search(score, 0)
    for limit in (N - 2, N, 1000):
        found = search(score, limit)
        assert found.best.tolist() == exact.best.tolist()
        np.testing.assert_array_equal(found.scores, exact.scores)


@pytest.mark.parametrize("score", ["heads", "fused"])
def test_beyond_it_the_second_stage_ranks_what_the_first_one_keeps(score: str) -> None:
    found = search(score, 20)
    assert np.count_nonzero(found.own["heads"]) == 20 and len(found.best) == 12
    kept = found.candidates[found.own["heads"] > 0]
    exact = ReferenceTokenScorer().score(
        [HeadRows(QUERY.layers[i][:, [h]], 32**-0.5) for i, h in ((0, 3), (1, 2))], INDEX, kept
    )
    np.testing.assert_allclose(found.own["heads"][found.own["heads"] > 0], exact, rtol=1e-12)
    if score == "fused":
        words = found.candidates[found.orders["lexical"]]
        own = found.own["lexical"]
        best = found.candidates[np.lexsort((-found.candidates, -own))][:5]
        assert set(best.tolist()) <= set(kept.tolist()) and len(words)
