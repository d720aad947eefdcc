"""The token index: raw K of every token, quantized, of the few KV heads that calibrated query heads read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.store.token_file import TokenShape, TokenSource

from ..errors import InvalidOption
from ..native import kernels as native_kernels
from ..native.kernels import IndexType, Kernels, TokenHead
from ..native.layout import U8, LayerInfo, RecordLayout
from .block_rows import CHUNK_BLOCKS, BlockRows

INDEX_TYPES = {"q4_0": IndexType.TOKENS_Q4_0, "q8_0": IndexType.TOKENS_Q8_0}
_ELEMENT = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class IndexedHead:
    """One KV head of a token index."""

    il: int  # layer number in the model
    head_kv: int
    d: int
    offset: int  # bytes of a block that come before this head's


class TokenIndex(BlockRows):
    """Row b holds the tokens of block b. In a chunk those of one KV head lie side by side,
    [kv head][block][token][bytes], as the scorer reads them."""

    def __init__(
        self,
        layers: Sequence[LayerInfo],
        layout: RecordLayout,
        heads_kv: Iterable[tuple[int, int]],
        index_type: str = "q4_0",
        *,
        kernels: Kernels | None = None,
        chunk_blocks: int = CHUNK_BLOCKS,
    ) -> None:
        """An empty index.

        Args:
            layers: all captured layers, as the hooks report them.
            layout: of the records that blocks come in.
            heads_kv: (layer number in the model, KV head), each once.
            index_type: a name of INDEX_TYPES.

        Raises:
            InvalidOption: there is no such head, it has no full attention, or its size is not a multiple
                of 32.
            KernelsMissing: the native loops cannot be loaded.
        """
        self._kernels = kernels if kernels is not None else native_kernels.load()
        self.index_type = INDEX_TYPES[index_type]
        full = {layer.il: i for i, layer in enumerate(layers) if layer.cache == 0}
        heads, sources, offset = [], [], 0
        for il, head in sorted(set(heads_kv)):
            layer = layers[full[il]] if il in full else None
            if layer is None or not 0 <= head < layer.n_head_kv:
                raise InvalidOption("heads", f"{il}.{head}", "no KV head with full attention has this name")
            nbytes = layout.block_size * self._kernels.token_row_bytes(self.index_type, layer.d_k)
            if not nbytes:
                raise InvalidOption("heads", f"{il}.{head}", f"its {layer.d_k} dims are not a multiple of 32")
            first = layout.k_offsets[full[il]] + head * layer.d_k * _ELEMENT[layout.raw_k_type]
            sources.append(TokenHead(first, layer.raw_k_row, offset, layer.d_k))
            heads.append(IndexedHead(il, head, layer.d_k, offset))
            offset += nbytes
        if not heads:
            raise InvalidOption("heads", "none", "a token index needs at least one KV head")
        super().__init__(layout, offset, np.uint8, chunk_blocks)
        self.heads = tuple(heads)
        self._source = self._kernels.token_heads(sources, layout.raw_k_type)

    def tokens(self, head: int, number: int) -> NDArray[np.float32]:
        """Raw K of the tokens of one block as the index has them: [count, d]. head: position in `heads`."""
        at, size = self.heads[head], self.block_size
        row = self._kernels.token_row_bytes(self.index_type, at.d)
        first = (at.offset << self.chunk_shift) + (number & ((1 << self.chunk_shift) - 1)) * size * row
        rows = self.chunks[number >> self.chunk_shift][first : first + size * row].reshape(size, row)
        from gguf import GGMLQuantizationType, quants  # takes long to import, and is rarely needed

        kind = GGMLQuantizationType(int(self.index_type))
        keys: NDArray[np.float32] = quants.dequantize(rows[: self._counts[number]], kind).astype(np.float32)
        return keys

    def row(self, number: int) -> U8:
        """See BlockRows.row; of a partial block the tokens that it lacks are zeros."""
        row: U8 = super().row(number)
        count = self._counts[number]
        for first, n in self._spans():
            row[first + n // self.block_size * count : first + n] = 0
        return row

    def _put(self, record: U8, count: int, chunk: U8, row: int) -> None:
        self._kernels.token_rows(
            self._source, record, count, self.index_type, self.block_size, chunk, self.chunk_shift, row
        )

    def _spans(self) -> list[tuple[int, int]]:
        ends = [*(head.offset for head in self.heads[1:]), self.row_nbytes]
        return [(head.offset, end - head.offset) for head, end in zip(self.heads, ends, strict=True)]


def token_source(
    layers: Sequence[LayerInfo], layout: RecordLayout, heads_kv: Iterable[tuple[int, int]], index_type: str
) -> TokenSource:
    """What a durable workspace keeps of its token index, and the function that makes a row of it, on any
    thread. The arguments and errors are those of TokenIndex."""
    index = TokenIndex(layers, layout, heads_kv, index_type, chunk_blocks=1)
    in_use = threading.Lock()

    def row_of(record: U8, count: int) -> U8:
        with in_use:
            index.append(record, count)
            row = index.row(0)
            index.truncate(0)
            return row

    heads = tuple((head.il, head.head_kv, head.d) for head in index.heads)
    widths = tuple(n for _, n in index._spans())
    return TokenSource(TokenShape(layout.block_size, index_type, heads, widths), row_of)
