"""Block scores over a token index: a block counts as the log-sum-exp of its tokens' attention logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...native.kernels import Isa, Kernels, ScoreLayer
from ..token_index import TokenIndex
from . import check_candidates


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Raw Q (before RoPE) of the query tokens, for the query heads that read one KV head of the index."""

    q: NDArray[np.float32]  # [n_query, n_heads, d]
    scale: float  # what multiplies q.k before the softmax


class HeadScorer(Protocol):
    """Scores the blocks of a token index for one query. The index is only read."""

    def score(
        self, rows: Sequence[HeadRows], index: TokenIndex, candidates: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """One score per candidate, larger is better: [n_candidates].

        Args:
            rows: one for each KV head of the index, in its order; each may be of as many query heads as it
                likes, all query heads count alike.
            candidates: block numbers of the index, strictly ascending, all of blocks that have a row.

        Raises:
            ValueError: rows and index differ in shape, or a candidate is not in the index.
        """
        ...


class TokenScorer:
    """Eq. 10 of the paper with every token in place of a block's mean, over chosen heads only: sum over query
    tokens and mean over heads of the softmax over all tokens of the candidates, a block having the part of
    its tokens. Native loops in float32; the scores do not depend on `n_threads`."""

    def __init__(self, kernels: Kernels, *, n_threads: int = 1, tile: int = 0, isa: Isa = Isa.AUTO) -> None:
        """tile: blocks per softmax tile, 0 = the kernel's own choice. isa: for comparisons."""
        self._kernels = kernels
        self._n_threads = n_threads
        self._tile = tile
        self._isa = isa

    def score(
        self, rows: Sequence[HeadRows], index: TokenIndex, candidates: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """See HeadScorer.score."""
        check_rows(rows, index)
        check_candidates(candidates, len(index))
        if not len(candidates) or not len(rows[0].q):
            return np.zeros(len(candidates))
        layers = [
            ScoreLayer(one.q, one.scale, head.offset, 1) for one, head in zip(rows, index.heads, strict=True)
        ]
        return self._kernels.score(
            layers,
            index.chunks,
            index.chunk_shift,
            candidates,
            index_type=index.index_type,
            counts=np.ascontiguousarray(index.counts[candidates]),
            block_tokens=index.block_size,
            n_threads=self._n_threads,
            tile=self._tile,
            isa=self._isa,
        )


def check_rows(rows: Sequence[HeadRows], index: TokenIndex) -> None:
    """Raises ValueError unless the query rows fit the heads of the index."""
    if len(rows) != len(index.heads) or len({len(one.q) for one in rows}) != 1:
        raise ValueError(f"Q of {len(rows)} KV heads for an index of {len(index.heads)}, or unlike lengths")
    for one, head in zip(rows, index.heads, strict=True):
        if one.q.ndim != 3 or one.q.shape[2] != head.d or not one.q.shape[1]:
            raise ValueError(f"layer {head.il}, KV head {head.head_kv}: Q of shape {one.q.shape}, d {head.d}")


class ReferenceTokenScorer:
    """The same in NumPy and float64: the oracle."""

    def score(
        self, rows: Sequence[HeadRows], index: TokenIndex, candidates: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """See HeadScorer.score."""
        check_rows(rows, index)
        check_candidates(candidates, len(index))
        total, n_heads = np.zeros(len(candidates)), 0
        if not len(candidates) or not len(rows[0].q):
            return total
        counts = index.counts[candidates]
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        for i, one in enumerate(rows):
            keys = np.concatenate([index.tokens(i, int(number)) for number in candidates]).astype(np.float64)
            logits = one.scale * np.einsum("mhd,td->mht", one.q.astype(np.float64), keys)
            weights = np.exp(logits - logits.max(axis=2, keepdims=True))
            share = np.add.reduceat(weights, starts, axis=2) / weights.sum(axis=2, keepdims=True)
            total += share.sum(axis=(0, 1))
            n_heads += one.q.shape[1]
        return total / n_heads
