"""libkvmem_kernels: indexes, block scores and restore on the CPU (C side: kernels/cpu/kvmem_kernels.h).

Calls release the GIL and keep no state. Arrays must be C-contiguous and of the dtype named, because the
library reads and writes them where they lie; anything else is a ValueError.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelsMissing
from .declarations import UNUSABLE, declared
from .kernels_cdef import KERNELS_ABI, KERNELS_CDEF
from .layout import F32, I32, U8
from .once import Once

F16 = NDArray[np.float16]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

LIBRARY_NAME: Final = {"darwin": "libkvmem_kernels.dylib", "win32": "kvmem_kernels.dll"}.get(
    sys.platform, "libkvmem_kernels.so"
)
LIBRARY_PATH: Final = Path(__file__).resolve().parents[1] / "_lib" / LIBRARY_NAME

_ROW_TYPE: Final = {"f32": 0, "f16": 1}


class Isa(IntEnum):
    """Instruction sets. AUTO is the best one of this CPU."""

    AUTO = 0
    PORTABLE = 1
    AVX2 = 2
    AVX512 = 3


class IndexType(IntEnum):
    """What an index holds of a block; the numbers of enum ggml_type."""

    MEAN_F16 = 1  # one mean
    TOKENS_Q4_0 = 2  # raw K of every token
    TOKENS_Q8_0 = 8


class Pairing(IntEnum):
    """Which dims of a head rotate together."""

    ADJACENT = 0  # (2i, 2i+1)
    HALVES = 1  # (i, i + n_dims/2)


class RopeForm(IntEnum):
    """How y0 = x0*cos - x1*sin and y1 = x0*sin + x1*cos are rounded."""

    PLAIN = 0  # every product and sum on its own
    FMA_AA = 1  # fma(x0, cos, -(x1*sin)), fma(x0, sin, x1*cos)
    FMA_AB = 2  # fma(x0, cos, -(x1*sin)), fma(x1, cos, x0*sin)
    FMA_BA = 3  # fma(-x1, sin, x0*cos), fma(x0, sin, x1*cos)
    FMA_BB = 4  # fma(-x1, sin, x0*cos), fma(x1, cos, x0*sin)


@dataclass(frozen=True, slots=True)
class MeanLayer:
    """Where a record holds the raw K of one scored layer, and where the index wants its means."""

    k_offset: int  # bytes
    k_stride: int  # bytes of one token's row
    mean_offset: int  # elements of a block's means that come before this layer's
    n_head_kv: int
    d: int


@dataclass(frozen=True, slots=True)
class TokenHead:
    """Where a record holds the raw K of one KV head, and where a token index wants its rows."""

    k_offset: int  # bytes from the record's start to the head's dims in the first row
    k_stride: int  # bytes of one token's row
    head_offset: int  # bytes of a block in the index that come before this head's
    d: int  # a multiple of 32


@dataclass(frozen=True, slots=True)
class ScoreLayer:
    """The query rows of one scored layer; of a token index, those that read one KV head."""

    q: F32  # [n_query, n_head, d], before RoPE
    scale: float
    mean_offset: int  # as in MeanLayer; the head_offset in a TokenHead
    n_head_kv: int


@dataclass(frozen=True, slots=True)
class RestoreLayer:
    """One layer's rows in a record and in the cache. What the addresses point to must outlive the calls."""

    k_offset: int  # bytes, of slot 0 in the record
    k_stride: int  # bytes of one slot's raw K
    v_offset: int
    v_row: int  # bytes of one token's V, in records and in cells
    k_cells: int  # host address of cell 0; a cell row is n_head_kv * d float16
    v_cells: int
    k_cell_stride: int  # bytes
    v_cell_stride: int
    n_head_kv: int
    d: int
    n_dims: int  # rotated dims of a head; 0: a layer without rotation
    rot0: int = 0  # first rotated dim
    pairing: Pairing = Pairing.ADJACENT
    cos_sin: F32 | None = None  # [n_positions, n_dims/2, 2]


@dataclass(frozen=True, slots=True)
class RestoreBlock:
    """Record slots slot0, slot0+1, ... go to `cells` at view positions pos0, pos0+1, ..."""

    record: U8
    cells: I32  # [n], distinct over the whole call
    slot0: int
    pos0: int


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Layers in the library's own form, made once and used for many calls."""

    array: Any  # cffi array of structs
    n: int
    row_type: int
    keep: tuple[Any, ...] = ()  # what the structs point to


@Once
def load() -> Kernels:
    """The library that was built with this package. Raises KernelsMissing."""
    return Kernels(LIBRARY_PATH)


def _missing(path: Path) -> KernelsMissing:
    what = f"the library of scoring and restore loops is missing: {path}"
    package = path.parents[1]
    is_built = (path.parent / "patch_id.txt").is_file()  # what the build writes into every installed package
    if is_built or not (package.parent / "pyproject.toml").is_file():
        return KernelsMissing(what)
    return KernelsMissing(
        what,
        hint=f"Python took {package.name} from the source tree {package.parent}, where nothing is built: the "
        "working directory comes before what is installed. Run Python in another folder, or as `python -P` "
        "(or with PYTHONSAFEPATH=1). If it is not installed yet: `pip install .` there.",
    )


class Kernels:
    """The loaded library. Every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Raises KernelsMissing if there is no library at `path` or it is not of this version."""
        self._ffi: Any = declared(KERNELS_CDEF)
        if not path.is_file():
            raise _missing(path)
        try:
            self._lib: Any = self._ffi.dlopen(str(path))
            abi = int(self._lib.kvmem_kernels_abi())
        except UNUSABLE as error:
            raise KernelsMissing(f"{path} cannot be used: {error}") from error
        if abi != KERNELS_ABI:
            raise KernelsMissing(
                f"{path} has version {abi} of its interface, this package needs {KERNELS_ABI}"
            )
        self.path = path
        self.best_isa = Isa(self._lib.kvmem_kernels_isa())

    @property
    def isa(self) -> str:
        """Name of the instruction set that calls use by default."""
        return self.best_isa.name.lower()

    # -- Mean-K

    def mean_layers(self, layers: Sequence[MeanLayer], raw_k_type: str) -> LayerTable:
        """Layers for `mean_k`. raw_k_type: of the records, 'f16' or 'f32'."""
        array = self._ffi.new("struct kvmem_mean_layer[]", len(layers))
        for target, layer in zip(array, layers, strict=True):
            target.k_offset, target.k_stride = layer.k_offset, layer.k_stride
            target.mean_offset = layer.mean_offset
            target.n_head_kv, target.d = layer.n_head_kv, layer.d
        return LayerTable(array, len(layers), _ROW_TYPE[raw_k_type])

    def mean_k(
        self, layers: LayerTable, record: U8, count: int, chunk: F16, chunk_shift: int, row: int
    ) -> None:
        """Means of the first `count` rows of a record become block `row` of an index chunk.

        float64 sums row by row over `count`, rounded once to float16; means beyond +-65504 become +-65504.

        Args:
            layers: of `mean_layers`; together they must fill the chunk and lie inside the record.
            record: [bytes of a record].
            chunk: [layer][kv head][1 << chunk_shift][d], flat.
        """
        rc = self._lib.kvmem_mean_k(
            layers.array,
            layers.n,
            layers.row_type,
            self._in("uint8_t[]", record, np.uint8),
            count,
            self._out("uint16_t[]", chunk, np.float16),
            chunk_shift,
            row,
        )
        self._check(rc, "Mean-K")

    def gather_means(
        self, chunks: Sequence[F16], chunk_shift: int, mean_offset: int, n_head_kv: int, d: int, blocks: I64
    ) -> F16:
        """Copies of the means of `blocks` of one layer: [n_head_kv, n_blocks, d]."""
        out = np.empty((n_head_kv, len(blocks), d), np.float16)
        pointers, _keep = self._pointers(chunks)
        rc = self._lib.kvmem_gather_means(
            self._ffi.cast("uint16_t **", pointers),
            len(chunks),
            chunk_shift,
            mean_offset,
            n_head_kv,
            d,
            self._in("int64_t[]", np.ascontiguousarray(blocks, np.int64), np.int64),
            len(blocks),
            self._out("uint16_t[]", out, np.float16),
        )
        self._check(rc, "a copy of means")
        return out

    # -- token index

    def token_row_bytes(self, index_type: IndexType, d: int) -> int:
        """Bytes of one token's row of `d` dims; 0 if `d` is not a multiple of 32."""
        return int(self._lib.kvmem_token_row_bytes(index_type, d))

    def token_heads(self, heads: Sequence[TokenHead], raw_k_type: str) -> LayerTable:
        """KV heads for `token_rows`. raw_k_type: of the records, 'f16' or 'f32'."""
        array = self._ffi.new("struct kvmem_token_head[]", len(heads))
        for target, head in zip(array, heads, strict=True):
            target.k_offset, target.k_stride = head.k_offset, head.k_stride
            target.head_offset, target.d = head.head_offset, head.d
        return LayerTable(array, len(heads), _ROW_TYPE[raw_k_type])

    def token_rows(
        self,
        heads: LayerTable,
        record: U8,
        count: int,
        index_type: IndexType,
        block_tokens: int,
        chunk: U8,
        chunk_shift: int,
        row: int,
    ) -> None:
        """The first `count` rows of a record, quantized as ggml does it, become block `row` of a chunk.

        Args:
            heads: of `token_heads`; together they must fill the chunk and lie inside the record.
            record: [bytes of a record].
            chunk: [KV head][1 << chunk_shift][block_tokens][bytes of a row], flat.
        """
        rc = self._lib.kvmem_token_rows(
            heads.array,
            heads.n,
            heads.row_type,
            self._in("uint8_t[]", record, np.uint8),
            count,
            index_type,
            block_tokens,
            self._out("uint8_t[]", chunk, np.uint8),
            chunk_shift,
            row,
        )
        self._check(rc, "rows of a token index")

    # -- block scores

    def score(
        self,
        layers: Sequence[ScoreLayer],
        chunks: Sequence[F16] | Sequence[U8],
        chunk_shift: int,
        candidates: I64,
        *,
        index_type: IndexType = IndexType.MEAN_F16,
        counts: I32 | None = None,
        block_tokens: int = 0,
        n_threads: int = 1,
        tile: int = 0,
        isa: Isa = Isa.AUTO,
    ) -> F64:
        """Eq. 10 of the paper: [n_candidates], sum over query tokens and mean over (layer, query head) of the
        softmax over the candidates of scale * q . Mean-K. Over a token index a block counts as the
        log-sum-exp of scale * q . k over its tokens.

        Args:
            layers: all with the same number of query tokens, at least one.
            chunks: of the index, each flat as `mean_k` or `token_rows` fills it.
            candidates: [n] block numbers, strictly ascending.
            counts: [n] tokens of each candidate, and
            block_tokens: of a whole block: both only for a token index.
            tile: blocks per softmax tile; 0: the kernel's choice. Scores depend on it only in rounding.

        Memory of the call: see kvmem_score in the header. Scores do not depend on `n_threads`.
        """
        out = np.empty(len(candidates))
        table = self._ffi.new("struct kvmem_score_layer[]", len(layers))
        keep = [np.ascontiguousarray(layer.q, np.float32) for layer in layers]
        n_query = {len(q) for q in keep}
        if len(n_query) != 1:
            raise ValueError(f"query tokens differ between layers: {sorted(n_query)}")
        for target, layer, q in zip(table, layers, keep, strict=True):
            target.q = self._ffi.from_buffer("float[]", q)
            target.scale, target.mean_offset = layer.scale, layer.mean_offset
            target.n_head, target.n_head_kv, target.d = q.shape[1], layer.n_head_kv, q.shape[2]
        pointers, _keep = self._pointers(chunks)
        args = self._ffi.new("struct kvmem_score_args *")
        args.layers, args.n_layers, args.n_query = table, len(layers), n_query.pop()
        args.chunks, args.n_chunks, args.chunk_shift = pointers, len(chunks), chunk_shift
        numbers = np.ascontiguousarray(candidates)
        args.candidates = self._in("int64_t[]", numbers, np.int64)
        args.n_candidates = len(candidates)
        args.index_type, args.block_tokens = index_type, block_tokens
        if counts is not None:
            if len(counts) != len(candidates):
                raise ValueError(f"{len(counts)} counts for {len(candidates)} candidates")
            args.counts = self._in("int32_t[]", counts, np.int32)
        args.scores = self._out("double[]", out, np.float64)
        args.tile, args.n_threads, args.isa = tile, n_threads, isa
        self._check(self._lib.kvmem_score(args), "block scores")
        return out

    # -- restore

    def restore_layers(self, layers: Sequence[RestoreLayer], raw_k_type: str) -> LayerTable:
        """Layers for `restore_f16`. raw_k_type: of the records, 'f16' or 'f32'."""
        array = self._ffi.new("struct kvmem_restore_layer[]", len(layers))
        keep = []
        for target, layer in zip(array, layers, strict=True):
            for name in ("k_offset", "k_stride", "v_offset", "v_row", "k_cell_stride", "v_cell_stride"):
                setattr(target, name, getattr(layer, name))
            for name in ("n_head_kv", "d", "n_dims", "rot0", "pairing"):
                setattr(target, name, int(getattr(layer, name)))
            target.k_cells = self._ffi.cast("uint8_t *", layer.k_cells)
            target.v_cells = self._ffi.cast("uint8_t *", layer.v_cells)
            if layer.cos_sin is not None:
                if layer.cos_sin.shape[1:] != (layer.n_dims // 2, 2):
                    raise ValueError(
                        f"a table of shape {layer.cos_sin.shape} for {layer.n_dims} rotated dims"
                    )
                table = self._in("float[]", layer.cos_sin, np.float32)
                keep.append((table, layer.cos_sin))
                target.cos_sin, target.n_positions = table, len(layer.cos_sin)
        return LayerTable(array, len(layers), _ROW_TYPE[raw_k_type], tuple(keep))

    def restore_f16(
        self,
        layers: LayerTable,
        blocks: Sequence[RestoreBlock],
        n_cells: int,
        form: RopeForm,
        *,
        n_threads: int = 1,
        isa: Isa = Isa.AUTO,
    ) -> None:
        """Raw K of blocks -> rotation at their view positions -> float16 cells; V bytes -> cells.

        Args:
            layers: of `restore_layers`.
            n_cells: cells of the cache; a larger cell number is an error.
            form: the rounding that ggml's own rope has on this machine.

        Raises:
            ValueError: a cell, a position or a size is out of range; nothing was written then.
        """
        array = self._ffi.new("struct kvmem_restore_block[]", len(blocks))
        keep = []
        for target, block in zip(array, blocks, strict=True):
            record = self._in("uint8_t[]", block.record, np.uint8)
            cells = self._in("int32_t[]", np.ascontiguousarray(block.cells, np.int32), np.int32)
            keep.append((record, cells))
            target.record, target.cells = record, cells
            target.slot0, target.n, target.pos0 = block.slot0, len(block.cells), block.pos0
        rc = self._lib.kvmem_restore_f16(
            layers.array, layers.n, layers.row_type, array, len(blocks), n_cells, form, n_threads, isa
        )
        self._check(rc, "restore")

    # -- private

    def _in(self, ctype: str, array: NDArray[Any], dtype: type) -> Any:
        """The array's memory; the result keeps the array alive."""
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"an array of {array.dtype}, contiguous {np.dtype(dtype)} is needed")
        return self._ffi.from_buffer(ctype, array)

    def _out(self, ctype: str, array: NDArray[Any], dtype: type) -> Any:
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"an array of {array.dtype}, contiguous {np.dtype(dtype)} is needed")
        return self._ffi.from_buffer(ctype, array, require_writable=True)

    def _pointers(self, chunks: Sequence[F16] | Sequence[U8]) -> tuple[Any, list[Any]]:
        """Array of the chunks' addresses, and what keeps them valid."""
        keep = [self._in("uint8_t[]", chunk.view(np.uint8), np.uint8) for chunk in chunks]
        pointers = self._ffi.new("void *[]", [self._ffi.cast("void *", one) for one in keep])
        return pointers, keep

    def _check(self, rc: int, what: str) -> None:
        if rc == self._lib.KVMEM_KERNELS_OK:
            return
        if rc == self._lib.KVMEM_KERNELS_E_MEMORY:
            raise MemoryError(f"out of memory for {what}")
        if rc == self._lib.KVMEM_KERNELS_E_ISA:
            raise ValueError(f"this CPU does not have the instruction set asked for; it has {self.isa}")
        raise ValueError(f"{what}: an argument is out of range")
