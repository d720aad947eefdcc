"""Facts of the attention layers and the byte layout of a block's record, as the library reports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.errors import InvalidOption

ROW_TYPES: Final = {"f16": "f16", "f32": "f32", "bf16": "f16", "q8_0": "f16"}
"""What raw K may be stored as, and the type of its rows in RAM: what rebuilds cells takes f16 and f32."""

Q8_0_BLOCK: Final = 32  # elements that share a scale

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One attention layer that owns K and V. Rows are bytes of one token over all KV heads."""

    il: int  # layer number in the model
    cache: int  # 0 = full attention, 1 = sliding window
    rope: bool  # False: a layer without rotation
    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    raw_k_row: int  # in a record
    k_row: int  # in a cell
    v_row: int  # in a cell and in a record
    scale: float  # what multiplies q.k before the softmax
    type_k: int  # enum ggml_type
    type_v: int
    k_rotated: bool  # K is Hadamard-rotated before it is stored
    rope_params: tuple[int, ...]  # op_params of the captured ROPE node
    rope_factors: bool  # the rotation uses frequency factors
    k_base: int  # host address of cell 0, 0 when not in host memory
    v_base: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Fixed-size record of one block: raw K of all layers, then V of all layers, `block_size` rows each."""

    block_size: int  # tokens
    raw_k_type: str  # 'f16' | 'f32'
    k_offsets: tuple[int, ...]  # bytes, per layer
    v_offsets: tuple[int, ...]
    nbytes: int
    stored_k_type: str  # of raw K on disk, see ROW_TYPES

    @classmethod
    def of(cls, layers: Sequence[LayerInfo], block_size: int, raw_k_type: str) -> RecordLayout:
        """The layout that the hooks use: offsets grow in layer order, K first.

        raw_k_type: what raw K is stored as. Raises InvalidOption if the keys of a layer do not fit it.
        """
        if raw_k_type not in ROW_TYPES:
            raise InvalidOption("--raw-k-type", raw_k_type, "must be one of " + ", ".join(ROW_TYPES))
        widths = sorted({layer.d_k for layer in layers if layer.d_k % Q8_0_BLOCK})
        if raw_k_type == "q8_0" and widths:
            raise InvalidOption(
                "--raw-k-type", raw_k_type, f"keys of width {widths[0]} are not whole blocks of {Q8_0_BLOCK}",
                hint="Use f16 or bf16 with this model.",
            )  # fmt: skip
        offset, k_offsets, v_offsets = 0, [], []
        for layer in layers:
            k_offsets.append(offset)
            offset += block_size * layer.raw_k_row
        for layer in layers:
            v_offsets.append(offset)
            offset += block_size * layer.v_row
        return cls(block_size, ROW_TYPES[raw_k_type], tuple(k_offsets), tuple(v_offsets), offset, raw_k_type)

    @property
    def k_nbytes(self) -> int:
        """Bytes of the raw K of a record in RAM."""
        return self.v_offsets[0] if self.v_offsets else self.nbytes

    def raw_k(self, record: U8, layer: int, info: LayerInfo, count: int) -> NDArray[np.floating]:
        """View of the first `count` raw K rows of a layer: [count, n_head_kv, d_k] in the record's type."""
        start = self.k_offsets[layer]
        dtype = np.dtype(np.float16 if self.raw_k_type == "f16" else np.float32)
        rows: NDArray[np.floating] = record[start : start + count * info.raw_k_row].view(dtype)
        return rows.reshape(count, info.n_head_kv, info.d_k)


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """A block on its way into cells: record slots slot0.. go to `cells` at view positions pos0, pos0+1..."""

    record: U8  # [layout.nbytes]
    slot0: int
    cells: I32  # [n]
    pos0: int
    tokens: I32  # [n] token ids
