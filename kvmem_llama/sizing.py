"""What an engine takes of a machine's memory, and each token of a history: estimates that load nothing.

They are made from the facts of a model's header, so they are the same everywhere; a test holds them to what
processes really take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .calibration import Calibration
from .engine.context import BITS, cells_needed
from .engine.machine import Machine
from .gguf_info import ModelInfo
from .memory.channels import Channels
from .settings import Settings

_PROGRAM: Final = 72 << 20  # Python, NumPy, llama.cpp and this package
_TOKENIZER: Final = 5 << 20  # and for each token and merge (src/llama-vocab.cpp keeps them in maps):
_PER_TOKEN: Final = 230
_PER_MERGE: Final = 180
_GPU_CONTEXT: Final = 400 << 20  # what a driver takes before anything is computed


@dataclass(frozen=True, slots=True)
class Needs:
    """What an engine takes, by part, in bytes."""

    mapped: int  # weights in the page cache: the system may drop them, and then reads them again
    host: Mapping[str, int]
    gpu: Mapping[str, int]
    least_records: int  # RAM for the records of one view of every sequence

    @property
    def n_host(self) -> int:
        return sum(self.host.values())

    @property
    def n_gpu(self) -> int:
        return sum(self.gpu.values())

    @property
    def n_memory(self) -> int:
        """RAM of the process with the mapped weights, before anything was read."""
        return self.n_host + self.mapped


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of each token, whatever the plan is."""

    cell: float
    record: float  # in RAM
    disk: float
    index: Mapping[str, float]  # by channel; that of words depends on the text

    @classmethod
    def of(cls, settings: Settings, info: ModelInfo, calibration: Calibration | None) -> Costs:
        """calibration: of the model, None if there is none."""
        v_bits = BITS[settings.cache_type_v]
        index = {"mean_k": info.cell_bytes(BITS["f16"], 0) / settings.block_size}
        if calibration is not None:
            group = {il: info.n_head // n for il, n in enumerate(info.n_head_kv) if n}
            heads_kv = {(h.layer, h.head // group[h.layer]) for h in calibration.heads if h.layer in group}
            index["heads"] = len(heads_kv) * info.d_k * BITS[calibration.index_type] / 8
        return cls(
            cell=info.cell_bytes(BITS[settings.cache_type_k], v_bits),
            record=info.cell_bytes(_raw_k_bits(settings), v_bits),
            disk=info.cell_bytes(BITS["f32" if settings.exact else settings.raw_k_type], v_bits),
            index=index,
        )

    def used_index(self, channels: Channels) -> float:
        """Bytes of the indexes that a score reads."""
        return sum(self.index.get(name, 0) for name in channels.shares)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the parts of an engine with these options for this model."""

    settings: Settings
    info: ModelInfo
    machine: Machine

    def needs(
        self, n_view: int, n_layers: int, n_ubatch: int, bits: tuple[float, float] | None = None
    ) -> Needs:
        """What an engine takes with a view and batches of so many tokens.

        n_layers: on the GPU; one more than the model has is the output too.
        bits: of an element of K and of V in cells, if not those of the settings.
        """
        info, settings = self.info, self.settings
        costs = Costs.of(settings, info, None)
        n_cells = cells_needed(settings, n_view)
        n_ubatch = min(n_ubatch, n_cells)
        on_gpu = min(n_layers / info.n_layer, 1.0)
        weights = int(info.layers_size * on_gpu)
        if n_layers > info.n_layer:
            weights = info.file_size
        repacked = sum(n for name, n in info.matrix_sizes if name in self.machine.repacked)
        cells = n_cells * (costs.cell if bits is None else info.cell_bytes(*bits))
        capture = n_ubatch * self._capture_row()
        host = {
            "program": _PROGRAM,
            "tokenizer": _TOKENIZER + info.n_vocab * _PER_TOKEN + info.n_merges * _PER_MERGE,
            "repacked weights": 0 if settings.exact else int(repacked * (1 - on_gpu)),
            "cells": int(cells * (1 - on_gpu)),
            "capture": int(capture * (1 - on_gpu)),
            "compute": self._computed(n_ubatch, n_cells),
        }
        if not settings.use_mmap:
            host["weights"] = info.file_size - weights
        gpu: dict[str, int] = {}
        if n_layers:
            gpu = {
                "driver": _GPU_CONTEXT,
                "weights": weights,
                "cells": int(cells * on_gpu),
                "capture": int(capture * on_gpu),
                "compute": self._reserved(n_ubatch, n_cells),
            }
        records = n_view * costs.record * settings.n_parallel if settings.policy == "kvmem" else 0
        return Needs(info.file_size - weights if settings.use_mmap else 0, host, gpu, int(records))

    def _capture_row(self) -> int:
        """Bytes of raw K and raw Q of one token. Q is captured of layers with full attention only: of a model
        with sliding windows at most every second one."""
        info = self.info
        attending = [n for n in info.n_head_kv if n]
        n_full = -(-len(attending) // 2) if info.n_swa else len(attending)
        raw_k = sum(attending) * info.d_k * _raw_k_bits(self.settings) / 8
        return int(raw_k) + n_full * info.n_head * info.d_k * 4

    def _computed(self, n_ubatch: int, n_cells: int) -> int:
        """What of the compute buffers in RAM is really written: the rows of a batch in one layer, the mask,
        and logits of one token of each sequence."""
        info = self.info
        row = 4 * (6 * info.n_embd + 3 * info.n_ff + 2 * info.n_head * info.d_k)
        return n_ubatch * (row + 2 * n_cells) + 2 * 4 * info.n_vocab * self.settings.n_parallel

    def _reserved(self, n_ubatch: int, n_cells: int) -> int:
        """Compute buffers on a GPU, as llama.cpp reserves them: for a batch whose tokens all have logits."""
        info = self.info
        logits = 4 * (info.n_vocab + 2 * info.n_embd)
        attention = 2 * n_cells + 4 * (2 * info.n_embd + 2 * info.n_ff + 2 * info.n_head * info.d_k)
        return n_ubatch * max(logits, attention)


def _raw_k_bits(settings: Settings) -> float:
    """Of an element of raw K in RAM."""
    return BITS["f32" if settings.exact or settings.raw_k_type == "f32" else "f16"]
