"""The memory hooks of one llama_context: capture, cells, moves, rebuild (C side: patches/llama-kvmem.h)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.errors import HookFailed, ModelUnsupported
from kvmem_llama.native.layout import F32, I32, ROW_TYPES, U8, BlockWrite, LayerInfo, RecordLayout
from kvmem_llama.native.library import NativeLibrary
from kvmem_llama.native.restore import FusedRestore

GGML_TYPE = {"f32": 0, "f16": 1}


def _i32(values: I32) -> I32:
    return np.ascontiguousarray(values, dtype=np.int32)


class Hooks:
    """Every call belongs on the thread that decodes, between two `llama_decode` calls.

    Raises HookFailed with the C side's text when a call is refused. A cell number addresses the same row
    in the full and in the sliding-window cache of a model that has both.
    """

    def __init__(
        self,
        native: NativeLibrary,
        ctx: int,
        *,
        n_rows: int,
        raw_k_type: str = "f16",
        block_size: int = 32,
        arch: str = "?",
        fused_restore: bool = True,
        n_threads: int = 1,
    ) -> None:
        """Attach to the context at address `ctx`.

        Args:
            n_rows: capture rows; at least the largest batch, in tokens.
            raw_k_type: what raw K is stored as, see layout.ROW_TYPES; records in RAM have rows of f16 or f32.
            block_size: tokens of a record.
            arch: the model's architecture, for the error text.
            fused_restore: use the fused CPU loop where it is byte-equal to the graph.
            n_threads: of the fused loop.

        Raises:
            ModelUnsupported: the architecture's raw K cannot be found, or its blocks cannot be moved.
            InvalidOption: its keys do not fit `raw_k_type`.
        """
        self._ffi: Any = native.ffi
        self._lib: Any = native.lib
        self._km: Any = None
        params = self._ffi.new(
            "struct kvmem_params *", (n_rows, block_size, GGML_TYPE[ROW_TYPES[raw_k_type]])
        )
        out = self._ffi.new("struct llama_kvmem **")
        err = self._ffi.new("char[512]")
        rc = self._lib.kvmem_init(self._ffi.cast("struct llama_context *", ctx), params[0], out, err, 512)
        if rc != 0:
            text = self._ffi.string(err).decode("utf-8", "replace")
            if rc == self._lib.KVMEM_E_UNSUPPORTED:
                raise ModelUnsupported(arch, text, hint="It still runs with --policy full_context.")
            raise HookFailed(rc, text)
        self._km = out[0]
        self.n_rows = n_rows
        rows = np.empty(n_rows, np.int32), np.empty(n_rows, np.int32)
        self._captured = (*rows, self._in(rows[0]), self._in(rows[1]))
        self.n_cells: int = self._lib.kvmem_n_cells(self._km)
        try:
            self.layers = tuple(self._layer(i) for i in range(self._lib.kvmem_n_layer(self._km)))
            self.layout = RecordLayout.of(self.layers, block_size, raw_k_type)
            if self.layout.nbytes != self._lib.kvmem_record_bytes(self._km):
                raise HookFailed(-5, "the library lays records out differently from this package")
        except BaseException:
            self.close()
            raise
        self._fused: FusedRestore | None = None
        if fused_restore:
            self._fused = FusedRestore.try_create(self, n_threads)

    # -- lifecycle

    def close(self) -> None:
        """Detach; to be called before the context is freed. Idempotent."""
        if self._km is not None:
            self._lib.kvmem_free(self._km)
            self._km = None

    @property
    def restore_path(self) -> str:
        """How blocks return to cells: 'fused' (CPU loop) or 'graph'."""
        return "graph" if self._fused is None else "fused"

    def _check(self, rc: int) -> int:
        if rc < 0:
            raise HookFailed(
                rc, self._ffi.string(self._lib.kvmem_last_error(self._km)).decode("utf-8", "replace")
            )
        return rc

    def _in(self, array: I32) -> Any:
        return self._ffi.from_buffer("int32_t[]", array)

    def _address(self, pointer: Any) -> int:
        return int(self._ffi.cast("uintptr_t", pointer))

    def _layer(self, i: int) -> LayerInfo:
        info = self._ffi.new("struct kvmem_layer_info *")
        self._check(self._lib.kvmem_layer(self._km, i, info))
        return LayerInfo(
            il=info.il,
            cache=info.cache,
            rope=info.status == self._lib.KVMEM_LAYER_ROPE,
            n_head=info.n_head,
            n_head_kv=info.n_head_kv,
            d_k=info.d_k,
            d_v=info.d_v,
            raw_k_row=info.raw_k_row,
            k_row=info.k_row,
            v_row=info.v_row,
            scale=info.scale,
            type_k=info.type_k,
            type_v=info.type_v,
            k_rotated=bool(info.k_rotated),
            rope_params=tuple(info.rope),
            rope_factors=bool(info.rope_factors),
            k_base=self._address(info.k_base),
            v_base=self._address(info.v_base),
        )

    def set_exact(self, on: bool) -> None:
        """Use the CPU backend's reference kernels: batch shape and neighbours then change nothing, as long as
        the weights are quantized."""
        self._check(self._lib.kvmem_set_exact(self._km, int(on)))

    # -- capture

    def capture(self, *, k: bool, q: bool) -> None:
        """Choose what the next batch captures and forget the rows of the last one."""
        flags = (self._lib.KVMEM_CAPTURE_K if k else 0) | (self._lib.KVMEM_CAPTURE_Q if q else 0)
        self._check(self._lib.kvmem_capture(self._km, flags))

    def captured(self) -> tuple[I32, I32]:
        """(sequence, position) of each row captured since `capture`; row i is the i-th token decoded. Valid
        until the next call."""
        seq, pos, *pointers = self._captured
        n = self._check(self._lib.kvmem_captured(self._km, *pointers, self.n_rows))
        return seq[:n], pos[:n]

    def read_q(self, rows: I32, layers: Collection[int] | None = None) -> list[F32]:
        """Raw Q of capture rows, per full-attention layer: [n, n_head, d_k].

        layers: numbers of those that are wanted; None: all.
        """
        rows = _i32(rows)
        out = []
        for i, layer in enumerate(self.layers):
            if layer.cache == 0 and (layers is None or layer.il in layers):
                dst = np.empty((len(rows), layer.n_head, layer.d_k), np.float32)
                target = self._ffi.from_buffer("float[]", dst)
                self._check(self._lib.kvmem_read_q(self._km, i, self._in(rows), len(rows), target))
                out.append(dst)
        return out

    def read_k(self, rows: I32) -> list[F32]:
        """Raw K of capture rows, per layer: [n, n_head_kv, d_k], widened to float32."""
        rows = _i32(rows)
        dtype = np.float16 if self.layout.raw_k_type == "f16" else np.float32
        out = []
        for i, layer in enumerate(self.layers):
            dst: NDArray[Any] = np.empty((len(rows), layer.n_head_kv, layer.d_k), dtype)
            target = self._ffi.from_buffer(dst)
            self._check(self._lib.kvmem_read_k(self._km, i, self._in(rows), len(rows), target))
            out.append(dst.astype(np.float32))
        return out

    def stage_out(self, record: U8, slot0: int, rows: I32, cells: I32) -> None:
        """Copy raw K of capture rows and V of cells into record slots slot0, slot0+1, ..."""
        rows, cells = _i32(rows), _i32(cells)
        if len(rows) != len(cells) or record.nbytes != self.layout.nbytes:
            raise HookFailed(-1, f"{len(rows)} rows, {len(cells)} cells, a record of {record.nbytes} bytes")
        target = self._ffi.from_buffer("uint8_t[]", record, require_writable=True)
        self._check(
            self._lib.kvmem_stage_out(self._km, target, slot0, self._in(rows), self._in(cells), len(rows))
        )

    # -- cells

    def place(self, cells: I32) -> None:
        """Give the cells of exactly the tokens of the next batch, in batch order; all must be empty."""
        cells = _i32(cells)
        self._check(self._lib.kvmem_place(self._km, self._in(cells), len(cells)))

    def cells(self) -> tuple[I32, I32]:
        """(position, sequence) of every cell, -1 where empty: [n_cells] each."""
        pos = np.empty(self.n_cells, np.int32)
        seq = np.empty(self.n_cells, np.int32)
        self._check(self._lib.kvmem_cells(self._km, self._in(pos), self._in(seq), self.n_cells))
        return pos, seq

    def free(self, cells: I32) -> None:
        """Make cells empty. Only metadata changes: the rows stay and can be shown again."""
        cells = _i32(cells)
        self._check(self._lib.kvmem_free_cells(self._km, self._in(cells), len(cells)))

    def show(self, seq: int, cells: I32, positions: I32, tokens: I32 | None = None) -> None:
        """Make hidden cells visible at the positions they are baked for. Only metadata changes."""
        cells, positions = _i32(cells), _i32(positions)
        ids = np.full(len(cells), -1, np.int32) if tokens is None else _i32(tokens)
        self._check(
            self._lib.kvmem_show_cells(
                self._km, seq, self._in(cells), self._in(positions), self._in(ids), len(cells)
            )
        )

    def move(self, seq: int, cells: I32, positions: I32) -> None:
        """Re-position visible cells in place by rotating their stored K (one more rounding each time)."""
        cells, positions = _i32(cells), _i32(positions)
        self._check(
            self._lib.kvmem_move_cells(self._km, seq, self._in(cells), self._in(positions), len(cells))
        )

    def write_blocks(self, seq: int, blocks: Sequence[BlockWrite], *, graph: bool = False) -> None:
        """Rebuild blocks in empty cells: raw K -> RoPE at the position -> cache type -> cell; V as it is.

        Args:
            graph: insist on the ggml graph where the fused loop would be used.
        """
        if not blocks:
            return
        if self._fused is not None and not graph and self._fused.write(seq, blocks):
            return
        array = self._ffi.new("struct kvmem_block_write[]", len(blocks))
        keep = []  # cffi does not keep what the structs point to
        for target, block in zip(array, blocks, strict=True):
            refs = (
                self._ffi.from_buffer("uint8_t[]", block.record),
                self._in(_i32(block.cells)),
                self._in(_i32(block.tokens)),
            )
            keep.append(refs)
            target.record, target.cells, target.tokens = refs
            target.slot0, target.n, target.pos0 = block.slot0, len(block.cells), block.pos0
        self._check(self._lib.kvmem_write_blocks(self._km, seq, array, len(blocks)))

    def read_rows(self, cells: I32) -> tuple[list[U8], list[U8]]:
        """K and V of cells as the cache holds them, per layer: [n, k_row] and [n, v_row] bytes."""
        cells = _i32(cells)
        out: tuple[list[U8], list[U8]] = ([], [])
        for i, layer in enumerate(self.layers):
            for is_v, row in ((0, layer.k_row), (1, layer.v_row)):
                dst = np.empty((len(cells), row), np.uint8)
                target = self._ffi.from_buffer(dst)
                self._check(self._lib.kvmem_read_rows(self._km, i, is_v, self._in(cells), len(cells), target))
                out[is_v].append(dst)
        return out

    def read_raw_k(self, cells: I32) -> list[F32]:
        """Raw K recovered from visible cells by undoing the rotation, per layer: [n, n_head_kv, d_k]."""
        cells = _i32(cells)
        out = []
        for i, layer in enumerate(self.layers):
            dst = np.empty((len(cells), layer.n_head_kv, layer.d_k), np.float32)
            target = self._ffi.from_buffer("float[]", dst)
            self._check(self._lib.kvmem_read_raw_k(self._km, i, self._in(cells), len(cells), target))
            out.append(dst)
        return out

    def rotate(self, layer: int, rows: F32, positions: I32) -> F32:
        """The layer's own RoPE over rows [n, heads, d_k], row i at positions[i], computed by ggml."""
        rows, positions = np.ascontiguousarray(rows, np.float32), _i32(positions)
        n, n_head, d_k = rows.shape
        if d_k != self.layers[layer].d_k or len(positions) != n:
            raise HookFailed(
                -1, f"rows of shape {rows.shape} and {len(positions)} positions for layer {layer}"
            )
        dst = np.empty_like(rows)
        source, target = self._ffi.from_buffer("float[]", rows), self._ffi.from_buffer("float[]", dst)
        self._check(self._lib.kvmem_rotate(self._km, layer, n_head, self._in(positions), n, source, target))
        return dst
