"""The Mean-K index: one float16 vector per block, scored layer and KV head."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidOption
from ..native import kernels as native_kernels
from ..native.kernels import Kernels, MeanLayer
from ..native.layout import U8, LayerInfo, RecordLayout
from .block_rows import CHUNK_BLOCKS, BlockRows

F16 = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class IndexLayer:
    """One scored layer of an index."""

    il: int  # layer number in the model
    n_head_kv: int
    d: int
    mean_offset: int  # elements of a block's means that come before this layer's


class MeanKIndex(BlockRows):
    """Row b is the Mean-K of block b.

    A mean is always the float64 sum of the record's raw K rows, added row by row, over their count, rounded
    once: it depends on the rows alone, and nothing is ever subtracted. In a chunk the means of one layer and
    KV head lie side by side, [layer][kv head][block][d], as the scorer reads them.
    """

    def __init__(
        self,
        layers: Sequence[LayerInfo],
        layout: RecordLayout,
        scored: Iterable[int] | None = None,
        *,
        kernels: Kernels | None = None,
        chunk_blocks: int = CHUNK_BLOCKS,
    ) -> None:
        """An empty index.

        Args:
            layers: all captured layers, as the hooks report them.
            layout: of the records that blocks come in.
            scored: layer numbers of the model whose keys are scored; None: every full-attention layer.
            kernels: the native loops; None: those of this package.
            chunk_blocks: a power of two.

        Raises:
            InvalidOption: `scored` names a layer that has no full attention, or none is left.
            KernelsMissing: the native loops cannot be loaded.
        """
        self._kernels = kernels if kernels is not None else native_kernels.load()
        chosen = _chosen(layers, scored)
        self.layers = _index_layers([layers[i] for i in chosen])
        super().__init__(
            layout, 2 * sum(layer.n_head_kv * layer.d for layer in self.layers), np.float16, chunk_blocks
        )
        self._source = self._kernels.mean_layers(
            [
                MeanLayer(layout.k_offsets[i], layers[i].raw_k_row, at.mean_offset, at.n_head_kv, at.d)
                for i, at in zip(chosen, self.layers, strict=True)
            ],
            layout.raw_k_type,
        )

    def means(self, layer: int, blocks: NDArray[np.int64] | None = None) -> F16:
        """A copy of means of one scored layer: [n_head_kv, n_blocks, d].

        Args:
            layer: position in `layers`.
            blocks: block numbers in any order; None: all.
        """
        at = self.layers[layer]
        numbers = np.arange(len(self), dtype=np.int64) if blocks is None else blocks
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(self)):
            raise IndexError(f"a block is not among the {len(self)} of the index")
        return self._kernels.gather_means(
            self.chunks, self.chunk_shift, at.mean_offset, at.n_head_kv, at.d, numbers
        )

    def _put(self, record: U8, count: int, chunk: F16, row: int) -> None:
        self._kernels.mean_k(self._source, record, count, chunk, self.chunk_shift, row)

    def _spans(self) -> list[tuple[int, int]]:
        return [
            (layer.mean_offset + head * layer.d, layer.d)
            for layer in self.layers
            for head in range(layer.n_head_kv)
        ]


def mean_of(layers: Sequence[LayerInfo], layout: RecordLayout) -> Callable[[U8, int], F16]:
    """A function (record, count) -> Mean-K of the record's first `count` rows in all full-attention layers,
    [elements] float16: what is stored of a block, whichever layers are scored. Any thread."""
    index = MeanKIndex(layers, layout, chunk_blocks=1)
    in_use = threading.Lock()

    def mean(record: U8, count: int) -> F16:
        with in_use:
            index.append(record, count)
            row = index.chunks[0].copy()
            index.truncate(0)
            return row

    return mean


def _chosen(layers: Sequence[LayerInfo], scored: Iterable[int] | None) -> list[int]:
    """Positions in `layers` of those that are scored."""
    full = {layer.il: i for i, layer in enumerate(layers) if layer.cache == 0}
    numbers = set(full) if scored is None else set(scored)
    if not numbers or not numbers <= set(full):
        raise InvalidOption(
            "--layers-scored",
            ",".join(map(str, sorted(numbers))),
            f"the model's full-attention layers are {', '.join(map(str, sorted(full))) or 'none'}",
        )
    return [i for il, i in full.items() if il in numbers]


def _index_layers(layers: Sequence[LayerInfo]) -> tuple[IndexLayer, ...]:
    offset, out = 0, []
    for layer in layers:
        out.append(IndexLayer(layer.il, layer.n_head_kv, layer.d_k, offset))
        offset += layer.n_head_kv * layer.d_k
    return tuple(out)
