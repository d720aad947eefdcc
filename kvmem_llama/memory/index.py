"""The Mean-K index: one float16 vector per block, scored layer and KV head."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidOption
from ..native import kernels as native_kernels
from ..native.kernels import Kernels, MeanLayer
from ..native.layout import U8, LayerInfo, RecordLayout

F16 = NDArray[np.float16]

CHUNK_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class IndexLayer:
    """One scored layer of an index."""

    il: int  # layer number in the model
    n_head_kv: int
    d: int
    mean_offset: int  # elements of a block's means that come before this layer's


class MeanKIndex:
    """Row b is the Mean-K of block b; rows are appended, replaced at the end and truncated, in step with the
    table of blocks.

    A mean is always the float64 sum of the record's raw K rows, added row by row, over their count, rounded
    once: it depends on the rows alone, not on how they were evaluated, and nothing is ever subtracted.

    Memory grows by chunks of `chunk_blocks` blocks that never move. In a chunk the means of one layer and KV
    head lie side by side, [layer][kv head][block][d], as the scorer reads them. A fork shares the chunks; the
    one that is written to is copied first.
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
        if chunk_blocks < 1 or chunk_blocks & (chunk_blocks - 1):
            raise ValueError(f"{chunk_blocks} blocks per chunk is not a power of two")
        self._kernels = kernels if kernels is not None else native_kernels.load()
        self._block_size = layout.block_size
        self._record_nbytes = layout.nbytes
        self.chunk_shift = chunk_blocks.bit_length() - 1
        chosen = _chosen(layers, scored)
        self.layers = _index_layers([layers[i] for i in chosen])
        self._source = self._kernels.mean_layers(
            [
                MeanLayer(layout.k_offsets[i], layers[i].raw_k_row, at.mean_offset, at.n_head_kv, at.d)
                for i, at in zip(chosen, self.layers, strict=True)
            ],
            layout.raw_k_type,
        )
        self._row = sum(layer.n_head_kv * layer.d for layer in self.layers)  # elements of a block
        self.chunks: list[F16] = []  # each [chunk_blocks * elements of a block]
        self._own: list[bool] = []  # per chunk: no other index reads it
        self._counts = array("i")  # tokens of each block

    def __len__(self) -> int:
        """Blocks."""
        return len(self._counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks, shared ones included."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def bytes_per_token(self) -> float:
        """Index bytes that one token of a full block costs."""
        return self._row * 2 / self._block_size

    @property
    def counts(self) -> NDArray[np.int32]:
        """Tokens of each block, a copy: [n_blocks]."""
        return np.array(self._counts, np.int32)

    def append(self, record: U8, count: int) -> None:
        """Adds the mean of the first `count` rows of a block's record as the newest row."""
        self._check(record, count)
        number = len(self._counts)
        if number >> self.chunk_shift == len(self.chunks):
            self.chunks.append(np.empty(self._row << self.chunk_shift, np.float16))
            self._own.append(True)
        self._write(number, record, count)
        self._counts.append(count)

    def replace_last(self, record: U8, count: int) -> None:
        """Computes the newest row anew from a record that took its block's place."""
        self._check(record, count)
        if not self._counts:
            raise IndexError("the index is empty")
        self._write(len(self._counts) - 1, record, count)
        self._counts[-1] = count

    def replace(self, number: int, record: U8, count: int) -> None:
        """Computes any row anew."""
        self._check(record, count)
        if not 0 <= number < len(self):
            raise IndexError(f"no row {number} among {len(self)}")
        self._write(
            number, record, count, n_rows=len(self) - (number >> self.chunk_shift << self.chunk_shift)
        )

    def restore(self, chunks: Sequence[F16], counts: NDArray[np.int32]) -> None:
        """An empty index takes over rows as they were stored. counts: tokens of each block."""
        if len(self):
            raise ValueError("the index is not empty")
        self.chunks = list(chunks)
        self._own = [True] * len(self.chunks)
        self._counts = array("i", counts.astype(np.int32).tobytes())

    def truncate(self, n_blocks: int) -> None:
        """Keeps the first `n_blocks` rows; chunks that hold none of them are let go."""
        if not 0 <= n_blocks <= len(self):
            raise IndexError(f"{n_blocks} of {len(self)} blocks cannot be kept")
        del self._counts[n_blocks:]
        n_chunks = (n_blocks + (1 << self.chunk_shift) - 1) >> self.chunk_shift
        del self.chunks[n_chunks:]
        del self._own[n_chunks:]

    def fork(self) -> MeanKIndex:
        """An index of its own with the same rows. Chunks are shared until one side writes to them."""
        other = copy(self)
        self._own = [False] * len(self.chunks)
        other._own = list(self._own)
        other.chunks = list(self.chunks)
        other._counts = self._counts[:]
        return other

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

    def _check(self, record: U8, count: int) -> None:
        if not 0 < count <= self._block_size:
            raise ValueError(f"a block of {count} tokens, the block size is {self._block_size}")
        if record.dtype != np.uint8 or record.shape != (self._record_nbytes,):
            raise ValueError(f"a record of {record.nbytes} bytes, the layout has {self._record_nbytes}")

    def _write(self, number: int, record: U8, count: int, n_rows: int | None = None) -> None:
        """n_rows: of the chunk, that are to stay if it has to be copied; None: those before this one."""
        chunk, row = number >> self.chunk_shift, number & ((1 << self.chunk_shift) - 1)
        if not self._own[chunk]:
            self.chunks[chunk] = self._copy(self.chunks[chunk], row if n_rows is None else n_rows)
            self._own[chunk] = True
        self._kernels.mean_k(self._source, record, count, self.chunks[chunk], self.chunk_shift, row)

    def _copy(self, chunk: F16, n_rows: int) -> F16:
        """A chunk with the same first `n_rows` rows; memory of the others is not touched."""
        out = np.empty_like(chunk)
        size = 1 << self.chunk_shift
        for layer in self.layers:
            span = slice(layer.mean_offset * size, (layer.mean_offset + layer.n_head_kv * layer.d) * size)
            shape = (layer.n_head_kv, size, layer.d)
            out[span].reshape(shape)[:, :n_rows] = chunk[span].reshape(shape)[:, :n_rows]
        return out


def mean_of(layers: Sequence[LayerInfo], layout: RecordLayout) -> Callable[[U8, int], F16]:
    """A function (record, count) -> Mean-K of the record's first `count` rows in all full-attention layers,
    [elements] float16: what is stored of a block, whichever layers are scored."""
    index = MeanKIndex(layers, layout, chunk_blocks=1)

    def mean(record: U8, count: int) -> F16:
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
