"""The fused path of a rebuild: raw K -> RoPE -> f16 cell in one loop on the CPU.

It is used only where it is byte-equal to the graph. The rotation's cosines and sines come from ggml itself
(rows of ones put through the layer's own ROPE node). How a compiler contracts the two products of a rotation
into fused multiply-adds differs between builds, so the form is found by trying each against the graph when
the hooks are attached; if none agrees byte for byte, the graph stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from ..errors import KernelsMissing
from . import kernels
from .kernels import Kernels, LayerTable, Pairing, RestoreBlock, RestoreLayer, RopeForm
from .layout import F32, I32, BlockWrite, LayerInfo

if TYPE_CHECKING:
    from .hooks import Hooks

_F16: Final = 1  # enum ggml_type
_PAIRING: Final = {
    0: Pairing.ADJACENT,
    2: Pairing.HALVES,
    8: Pairing.HALVES,
    40: Pairing.HALVES,
}  # by rope mode
_TABLE_STEP: Final = 1024  # positions a table grows by
_MAX_POSITIONS: Final = 1 << 17  # a table beyond this would outgrow its use; the graph serves what lies there


class FusedRestore:
    """The fused loop for the layers of one context. Owner thread only."""

    def __init__(self, hooks: Hooks, kernels: Kernels, n_threads: int) -> None:
        self._hooks = hooks
        self._kernels = kernels
        self._n_threads = n_threads
        self._form = RopeForm.PLAIN
        self._n_positions = 0
        self._tables: dict[
            int, F32
        ] = {}  # layer -> [n_positions, n_dims/2, 2], shared by layers that rotate alike
        self._layers: LayerTable | None = None

    @classmethod
    def try_create(cls, hooks: Hooks, n_threads: int) -> Self | None:
        """None where the graph must do it: other cache types, cells outside host memory, no equal form."""
        try:
            loaded = kernels.load()
        except KernelsMissing:
            return None
        if not all(_is_served(layer) for layer in hooks.layers):
            return None
        fused = cls(hooks, loaded, n_threads)
        return fused if fused._find_form() else None

    def write(self, seq: int, blocks: Sequence[BlockWrite]) -> bool:
        """Rebuilds blocks in empty cells -> False, with nothing written, for positions beyond the tables."""
        end = max(block.pos0 + len(block.cells) for block in blocks)
        if end > _MAX_POSITIONS:
            return False
        layers = self._layers_for(end)
        cells = np.concatenate([block.cells for block in blocks]).astype(np.int32)
        restores = [RestoreBlock(block.record, block.cells, block.slot0, block.pos0) for block in blocks]
        positions = np.concatenate([_run(block.pos0, len(block.cells)) for block in blocks])
        tokens = np.concatenate([block.tokens for block in blocks]).astype(np.int32)
        self._hooks.show(seq, cells, positions, tokens)  # first: it refuses occupied cells
        try:
            self._kernels.restore_f16(
                layers, restores, self._hooks.n_cells, self._form, n_threads=self._n_threads
            )
        except BaseException:
            self._hooks.free(cells)
            raise
        return True

    def _layers_for(self, n_positions: int) -> LayerTable:
        if self._layers is None or n_positions > self._n_positions:
            self._n_positions = -(-n_positions // _TABLE_STEP) * _TABLE_STEP
            self._tables = self._make_tables(self._n_positions)
            layout = self._hooks.layout
            self._layers = self._kernels.restore_layers(
                [
                    RestoreLayer(
                        k_offset=layout.k_offsets[i],
                        k_stride=layer.raw_k_row,
                        v_offset=layout.v_offsets[i],
                        v_row=layer.v_row,
                        k_cells=layer.k_base,
                        v_cells=layer.v_base,
                        k_cell_stride=layer.k_row,
                        v_cell_stride=layer.v_row,
                        n_head_kv=layer.n_head_kv,
                        d=layer.d_k,
                        n_dims=layer.rope_params[1] if layer.rope else 0,
                        pairing=_PAIRING[layer.rope_params[2]] if layer.rope else Pairing.ADJACENT,
                        cos_sin=self._tables.get(i),
                    )
                    for i, layer in enumerate(self._hooks.layers)
                ],
                layout.raw_k_type,
            )
        return self._layers

    def _make_tables(self, n: int) -> dict[int, F32]:
        """Layers with equal parameters share a table; frequency factors may differ, so they prevent it."""
        tables: dict[int, F32] = {}
        shared: dict[tuple[int, tuple[int, ...]], F32] = {}
        for i, layer in enumerate(self._hooks.layers):
            if layer.rope:
                key = (i if layer.rope_factors else -1, layer.rope_params)
                if key not in shared:
                    shared[key] = self._table(i, layer, n)
                tables[i] = shared[key]
        return tables

    def _table(self, i: int, layer: LayerInfo, n: int) -> F32:
        """cos and sin per pair: a row of (1, 0) pairs comes back as (1*cos - 0*sin, 1*sin + 0*cos)."""
        half = layer.rope_params[1] // 2
        adjacent = _PAIRING[layer.rope_params[2]] is Pairing.ADJACENT
        first = np.arange(half) * (2 if adjacent else 1)
        second = first + (1 if adjacent else half)
        rows = np.zeros((n, 1, layer.d_k), np.float32)
        rows[:, 0, first] = 1
        rotated = self._hooks.rotate(i, rows, _run(0, n))
        return np.ascontiguousarray(np.stack([rotated[:, 0, first], rotated[:, 0, second]], axis=-1))

    def _find_form(self) -> bool:
        """Tries each form on a random record in the (empty) first cells, at small and at large positions."""
        hooks = self._hooks
        block = hooks.layout.block_size
        n = min(block, hooks.n_cells)
        cells, tokens = _run(0, n), np.zeros(n, np.int32)
        dtype = np.float16 if hooks.layout.raw_k_type == "f16" else np.float32
        values = np.random.default_rng(0).normal(size=hooks.layout.nbytes // dtype().itemsize)
        record = values.astype(dtype).view(np.uint8)
        writes = [[BlockWrite(record, 0, cells, pos0, tokens)] for pos0 in (0, _TABLE_STEP - n)]
        want = []
        for write in writes:
            hooks.write_blocks(0, write, graph=True)
            want.append(hooks.read_rows(cells)[0])
            hooks.free(cells)
        for form in RopeForm:
            self._form = form
            equal = True
            for write, rows in zip(writes, want, strict=True):
                self.write(0, write)
                got = hooks.read_rows(cells)[0]
                hooks.free(cells)
                equal = equal and all(np.array_equal(a, b) for a, b in zip(got, rows, strict=True))
            if equal:
                return True
        return False


def _is_served(layer: LayerInfo) -> bool:
    n_dims, mode, offset = layer.rope_params[1], layer.rope_params[2], layer.rope_params[15]
    is_known = not layer.rope or (
        mode in _PAIRING and offset == 0 and 0 < n_dims <= layer.d_k and n_dims % 2 == 0
    )
    return is_known and layer.type_k == _F16 and not layer.k_rotated and bool(layer.k_base and layer.v_base)


def _run(first: int, n: int) -> I32:
    return np.arange(first, first + n, dtype=np.int32)
