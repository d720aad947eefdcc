"""Raw Q of the tokens that a recall scores with, collected while they are evaluated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvmem_llama.native.layout import F32, I32, LayerInfo

from .ports import RowSource
from .scoring import QueryRows


class ScoredLayers:
    """The full-attention layers whose blocks are scored, as positions in `Hooks.read_q`."""

    def __init__(self, layers: Sequence[LayerInfo], chosen: Sequence[int] | None) -> None:
        """chosen: layer numbers of the model; None: all full-attention layers."""
        full = [layer for layer in layers if layer.cache == 0]
        self.indices = [i for i, layer in enumerate(full) if chosen is None or layer.il in chosen]
        self.scales = tuple(full[i].scale for i in self.indices)


class QueryBuffer:
    """Rows in the order the tokens were evaluated; at most the newest `n_most` of them."""

    def __init__(self, layers: ScoredLayers, n_most: int | None = None) -> None:
        self._layers = layers
        self._n_most = n_most
        self._chunks: deque[list[F32]] = deque()  # per layer [n, n_head, d_k]
        self.n = 0

    def add(self, hooks: RowSource, rows: I32) -> None:
        """Reads the raw Q of capture rows of the last decode."""
        if not len(rows):
            return
        q = hooks.read_q(rows)
        self._chunks.append([q[i] for i in self._layers.indices])
        self.n += len(rows)
        while self._n_most is not None and self.n > self._n_most:
            first = self._chunks.popleft()
            n_first, surplus = len(first[0]), self.n - self._n_most
            self.n -= min(n_first, surplus)
            if n_first > surplus:
                self._chunks.appendleft([layer[surplus:] for layer in first])

    def clear(self) -> None:
        self._chunks.clear()
        self.n = 0

    def rows(self, *others: QueryBuffer) -> QueryRows:
        """All rows, those of `others` after them."""
        chunks = [chunk for buffer in (self, *others) for chunk in buffer._chunks]
        layers = tuple(np.concatenate([c[i] for c in chunks]) for i in range(len(self._layers.indices)))
        return QueryRows(layers, self._layers.scales)
