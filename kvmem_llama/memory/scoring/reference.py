"""Mean-K block scores in NumPy and float64: the oracle that the native scorer is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..index import MeanKIndex
from . import QueryRows, check_query


class ReferenceScorer:
    """Eq. 10 of the paper as it is written, over the same float16 index. Slow."""

    name = "reference"

    def score(
        self, query: QueryRows, index: MeanKIndex, candidates: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """See BlockScorer.score."""
        check_query(query, index, candidates)
        total = np.zeros(len(candidates))
        if not len(candidates):
            return total
        n_heads = 0
        for i, (rows, scale) in enumerate(zip(query.layers, query.scales, strict=True)):
            q = rows.astype(np.float64)  # [n_query, n_head, d]
            k = index.means(i, candidates).astype(np.float64)  # [n_head_kv, n_candidates, d]
            group = q.shape[1] // k.shape[0]
            for head in range(q.shape[1]):
                logits = scale * (q[:, head] @ k[head // group].T)  # [n_query, n_candidates]
                weights = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
                total += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
            n_heads += q.shape[1]
        return total / n_heads
