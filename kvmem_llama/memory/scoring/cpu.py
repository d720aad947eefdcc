"""Mean-K block scores on the CPU: native loops over the index where it lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...native.kernels import Isa, Kernels, ScoreLayer
from ..index import MeanKIndex
from . import QueryRows, check_query


class CpuScorer:
    """Eq. 10 of the paper in float32 with an online log-sum-exp over tiles of blocks.

    The scores do not depend on `n_threads`, and on `tile` only in rounding. Memory of a call, per thread:
    272 bytes x n_candidates + 640 bytes x head size; from 262,144 candidates on 64 MiB in place of the first
    256 bytes, until 64 bytes x n_candidates are more.
    """

    name = "cpu"

    def __init__(self, kernels: Kernels, *, n_threads: int = 1, tile: int = 0, isa: Isa = Isa.AUTO) -> None:
        """tile: blocks per softmax tile, 0 = the kernel's own choice. isa: for comparisons."""
        self._kernels = kernels
        self._n_threads = n_threads
        self._tile = tile
        self._isa = isa

    def score(
        self, query: QueryRows, index: MeanKIndex, candidates: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """See BlockScorer.score."""
        check_query(query, index, candidates)
        if not len(candidates) or not query.n_query:
            return np.zeros(len(candidates))
        layers = [
            ScoreLayer(q, scale, layer.mean_offset, layer.n_head_kv)
            for q, scale, layer in zip(query.layers, query.scales, index.layers, strict=True)
        ]
        return self._kernels.score(
            layers,
            index.chunks,
            index.chunk_shift,
            candidates,
            n_threads=self._n_threads,
            tile=self._tile,
            isa=self._isa,
        )
