"""Raw Q of the tokens that a recall scores with, collected while they are evaluated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from kvmem_llama.native.layout import F32, I32, LayerInfo
from kvmem_llama.settings import Settings

from .channels import Channels
from .ports import RowSource
from .scoring import QueryRows


class ScoredLayers:
    """The full-attention layers whose raw Q is read: those that some channel scores with."""

    def __init__(self, layers: Sequence[LayerInfo], chosen: Iterable[int] | None) -> None:
        """chosen: layer numbers of the model; None: all full-attention layers."""
        wanted = None if chosen is None else set(chosen)
        full = [layer for layer in layers if layer.cache == 0]
        self.indices = [i for i, layer in enumerate(full) if wanted is None or layer.il in wanted]
        self.numbers = tuple(full[i].il for i in self.indices)  # in the model
        self.scales = tuple(full[i].scale for i in self.indices)

    @classmethod
    def of(cls, channels: Channels, settings: Settings, layers: Sequence[LayerInfo]) -> ScoredLayers:
        """Those of the channels; none for a search by words alone."""
        if "mean_k" in channels and settings.scored_layers() is None:
            return cls(layers, None)
        chosen = set(settings.scored_layers() or ()) if "mean_k" in channels else set()
        if channels.calibration is not None:
            chosen |= {head.layer for head in channels.calibration.heads}
        return cls(layers, chosen)


class QueryBuffer:
    """Rows in the order the tokens were evaluated; at most the newest `n_most` of them."""

    def __init__(self, layers: ScoredLayers, n_most: int | None = None) -> None:
        self._layers = layers
        self._n_most = n_most
        self._chunks: deque[tuple[int, list[F32]]] = deque()  # tokens, and per layer [n, n_head, d_k]
        self.n = 0

    def add(self, hooks: RowSource, rows: I32) -> None:
        """Reads the raw Q of capture rows of the last decode."""
        if not len(rows):
            return
        self._chunks.append((len(rows), hooks.read_q(rows, self._layers.numbers)))
        self.n += len(rows)
        while self._n_most is not None and self.n > self._n_most:
            n_first, first = self._chunks.popleft()
            surplus = self.n - self._n_most
            self.n -= min(n_first, surplus)
            if n_first > surplus:
                self._chunks.appendleft((n_first - surplus, [layer[surplus:] for layer in first]))

    def take(self, other: QueryBuffer) -> None:
        """Adds the rows of another buffer of the same layers after its own."""
        assert self._n_most is None
        self._chunks.extend(other._chunks)
        self.n += other.n

    def clear(self) -> None:
        self._chunks.clear()
        self.n = 0

    def rows(self, *others: QueryBuffer) -> QueryRows:
        """All rows, those of `others` after them."""
        chunks = [chunk for buffer in (self, *others) for _, chunk in buffer._chunks]
        layers = tuple(np.concatenate([c[i] for c in chunks]) for i in range(len(self._layers.indices)))
        return QueryRows(layers, self._layers.scales, self._layers.numbers)
