"""Records of SmolLM2-135M's shape: 30 layers, 3 KV heads of 64, blocks of 32 tokens, V in f16."""

from __future__ import annotations

from kvmem_llama.gguf_header import GGML_TYPES
from kvmem_llama.store.segment import SegmentFormat

N_LAYERS, ROW, BLOCK = 30, 3 * 64, 32  # ROW: elements of one token's K in one layer
TYPE_IDS = {"f16": 1, "f32": 0, "bf16": 30, "q8_0": 8}


def row_nbytes(type_name: str) -> int:
    """Bytes of one token's K or V in one layer."""
    _, block, size = GGML_TYPES[TYPE_IDS[type_name]]
    return ROW // block * size


def shape(raw_k_type: str) -> SegmentFormat:
    """The format of segments with raw K of this type."""
    n_rows = N_LAYERS * BLOCK
    return SegmentFormat(
        family="benchmark",
        layout=f"smollm2-{raw_k_type}",
        k_type=TYPE_IDS[raw_k_type],
        k_nbytes=n_rows * row_nbytes(raw_k_type),
        v_type=TYPE_IDS["f16"],
        v_nbytes=n_rows * row_nbytes("f16"),
    )
