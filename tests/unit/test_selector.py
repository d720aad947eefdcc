"""Selection: the best blocks, in history order, the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.memory.selector import order, ranks, select

# few distinct scores, so that ties are common
scored = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0 + 2**-52]), max_size=40)


@given(scored, st.integers(0, 50), st.data())
def test_the_best_are_taken_and_of_equal_ones_the_newer(
    values: list[float], budget: int, data: st.DataObject
) -> None:
    candidates = np.cumsum(
        data.draw(st.lists(st.integers(1, 5), min_size=len(values), max_size=len(values))), dtype=np.int64
    )
    scores = np.array(values)
    chosen = select(scores, candidates, budget)
    expected = sorted(range(len(values)), key=lambda i: (values[i], candidates[i]), reverse=True)[:budget]
    assert chosen.tolist() == sorted(candidates[expected].tolist())
    assert chosen.dtype == np.int64


@given(scored, st.data())
def test_nothing_but_scores_and_block_numbers_matters(values: list[float], data: st.DataObject) -> None:
    candidates = np.arange(len(values), dtype=np.int64) * 3
    shuffle = np.array(data.draw(st.permutations(range(len(values)))), dtype=np.int64)
    budget = data.draw(st.integers(0, len(values)))
    scores = np.array(values)
    once = select(scores, candidates, budget)
    np.testing.assert_array_equal(once, select(scores, candidates, budget))
    np.testing.assert_array_equal(once, select(scores[shuffle], candidates[shuffle], budget))


def test_ranks_count_from_one_for_the_best() -> None:
    scores = np.array([0.5, 2.0, 0.5, 1.0])
    candidates = np.array([3, 4, 9, 12])
    assert ranks(scores, candidates).tolist() == [4, 1, 3, 2]
    assert candidates[order(scores, candidates)].tolist() == [4, 12, 9, 3]


def test_zero_means_zero() -> None:
    candidates = np.array([1, 2, 3])
    assert select(np.ones(3), candidates, 0).tolist() == []
    assert select(np.zeros(0), candidates[:0], 5).tolist() == []


def test_scores_that_are_not_numbers_are_refused() -> None:
    candidates = np.array([1, 2])
    with pytest.raises(ValueError, match="1 of 2 block scores"):
        select(np.array([0.0, np.nan]), candidates, 1)
    with pytest.raises(ValueError, match="budget of -1"):
        select(np.zeros(2), candidates, -1)
    with pytest.raises(ValueError, match="scores for"):
        select(np.zeros(3), candidates, 1)
