"""Records of SmolLM2-135M's shape: 30 layers, 3 KV heads of 64, blocks of 32 tokens, V in f16."""

from __future__ import annotations

import numpy as np

from kvmem_llama.gguf_header import GGML_TYPES
from kvmem_llama.native.layout import ROW_TYPES
from kvmem_llama.store.raw_k import RawK
from kvmem_llama.store.records import Record
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


def raw_k(raw_k_type: str) -> RawK:
    """Between records in RAM and segments with raw K of this type."""
    n_rows, in_ram = N_LAYERS * BLOCK, ROW_TYPES[raw_k_type]
    return RawK(in_ram, raw_k_type, n_rows * row_nbytes(in_ram), n_rows * row_nbytes("f16"))


def random_record(rng: np.random.Generator, raw_k_type: str) -> Record:
    """A record in RAM: numbers for K, as a type with scales needs them, and bytes for V."""
    n_rows, in_ram = N_LAYERS * BLOCK, ROW_TYPES[raw_k_type]
    k = rng.normal(size=n_rows * ROW).astype("<f2" if in_ram == "f16" else "<f4").view(np.uint8)
    return np.concatenate([k, rng.integers(0, 256, n_rows * row_nbytes("f16"), np.uint8)])


def restore_error(raw_k_type: str) -> float:
    """Relative L2 distance of K that was stored from K that was computed, in f32 and of normal numbers."""
    exact = np.random.default_rng(0).normal(size=N_LAYERS * BLOCK * ROW).astype("<f4")
    in_ram = exact.astype("<f2" if ROW_TYPES[raw_k_type] == "f16" else "<f4")
    record = np.concatenate([in_ram.view(np.uint8), np.zeros(N_LAYERS * BLOCK * row_nbytes("f16"), np.uint8)])
    raw_k(raw_k_type).round(record)
    stored = record[: in_ram.nbytes].view(in_ram.dtype).astype(np.float64)
    return float(np.linalg.norm(stored - exact) / np.linalg.norm(exact))
