"""Two stages for a history that is too long to score every token for every token of the query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..token_index import TokenIndex
from .tokens import HeadRows, HeadScorer

I64 = NDArray[np.int64]

N_PEAKED: Final = 8  # query tokens of the first stage: with fewer, reading the index takes the time
_HINTED: Final = 4  # one of so many places of the second stage is for what other channels have found


def narrowed(
    scorer: HeadScorer,
    rows: Sequence[HeadRows],
    index: TokenIndex,
    candidates: I64,
    limit: int,
    hints: I64,
) -> I64:
    """The candidates that are worth an exact score, ascending: `limit` of them; all if there are no more, or
    if choosing would cost as much.

    The first stage scores every token of the history, but only for the query tokens with the largest Q: their
    softmax is the most peaked, and what they find comes closest to what all tokens find. Means of Q over runs
    of tokens, tokens at even distances, and Mean-K of the same heads do worse.

    Args:
        rows, candidates: as HeadScorer.score takes them.
        hints: block numbers that other channels have found, from the best on; up to a quarter of the
            places are theirs.
    """
    if len(candidates) <= limit or len(rows[0].q) <= N_PEAKED:
        return candidates
    hinted = hints[np.isin(hints, candidates)][: limit // _HINTED]
    scores = scorer.score([_peaked(one) for one in rows], index, candidates)
    others = candidates[np.lexsort((-candidates, -scores))]
    others = others[~np.isin(others, hinted)][: limit - len(hinted)]
    return np.union1d(hinted, others)


def _peaked(rows: HeadRows) -> HeadRows:
    """The query tokens whose Q is largest, the sum of its heads' norms."""
    norms = np.linalg.norm(rows.q, axis=2).sum(axis=1)
    chosen = np.sort(np.argsort(-norms, kind="stable")[:N_PEAKED])
    return HeadRows(rows.q[chosen], rows.scale)
