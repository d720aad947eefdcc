"""Which candidate blocks return to the execution view."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


def order(scores: F64, candidates: I64) -> I64:
    """Indices of the candidates from the best to the worst; of equal scores the newer block comes first.

    Args:
        scores: [n], one per candidate.
        candidates: [n] block numbers; a larger number is a newer block.

    Raises:
        ValueError: shapes differ, or a score is not a number (the model's keys hold NaN or infinity).
    """
    if scores.shape != candidates.shape or scores.ndim != 1:
        raise ValueError(f"{scores.shape} scores for {candidates.shape} candidates")
    if np.isnan(scores).any():
        raise ValueError(f"{int(np.isnan(scores).sum())} of {len(scores)} block scores are not numbers")
    return np.lexsort((-candidates, -scores))


def ranks(scores: F64, candidates: I64) -> I64:
    """Rank of each candidate, 1 for the best: [n]."""
    best_first = order(scores, candidates)
    out = np.empty(len(best_first), np.int64)
    out[best_first] = np.arange(1, len(best_first) + 1)
    return out


def select(scores: F64, candidates: I64, n_blocks: int) -> I64:
    """The `n_blocks` best candidates in history order; all of them if there are fewer, none for 0.

    A function of its arguments alone, so that the same history and query select the same blocks.

    Args:
        scores: [n], one per candidate.
        candidates: [n] block numbers.
        n_blocks: budget in blocks.

    Returns:
        Block numbers, ascending.

    Raises:
        ValueError: as `order`; or the budget is negative.
    """
    if n_blocks < 0:
        raise ValueError(f"a budget of {n_blocks} blocks")
    return np.sort(candidates[order(scores, candidates)[:n_blocks]])
