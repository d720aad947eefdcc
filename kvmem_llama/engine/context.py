"""One llama_context: the cells, and the calls that evaluate tokens over them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from ..errors import EngineClosed, EngineError, InvalidOption, ModelUnsupported
from ..native.library import import_binding
from ..settings import Settings
from . import llama_log
from .machine import free_memory, physical_cores
from .model import Model, OutOfMemory, is_allocation_failure
from .requests import F32, Batch

UBATCH: Final = 128  # tokens, where nothing else was chosen
CELL_MULTIPLE: Final = 256  # llama.cpp rounds n_ctx up to this (llama-context.cpp)
_TYPES: Final = {"f16": "GGML_TYPE_F16", "q8_0": "GGML_TYPE_Q8_0", "q4_0": "GGML_TYPE_Q4_0"}
_SMALLER: Final = "Use a smaller view (-c), fewer sequences (-np) or a quantised cache (-ctk q8_0 -ctv q8_0)."
BITS: Final = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
"""Bits of one element in cells and records (ggml's block sizes)."""


def view_size(settings: Settings, model: Model) -> int:
    """Budget of the execution view of one sequence, tokens: -c, but never more than the trained window."""
    return min(settings.n_ctx or model.n_ctx_train, model.n_ctx_train)


def cells_needed(settings: Settings, n_view: int) -> int:
    """Cells for `n_parallel` views with their slack, a multiple of 256."""
    n_cells = settings.n_parallel * (n_view + int(settings.slack * n_view))
    return -(-n_cells // CELL_MULTIPLE) * CELL_MULTIPLE


class Context:
    """Evaluates batches over the cells of one context; the Decoder of the scheduler. Owner thread only."""

    def __init__(self, model: Model, settings: Settings, n_cells: int) -> None:
        """Raises OutOfMemory, ModelUnsupported (no KV cache: not a decoder), InvalidOption or EngineError."""
        _refuse_more_than_memory(model, settings, n_cells)
        llama: Any = import_binding()
        self._llama = llama
        self._pointer: int | None = None
        params: Any = llama.llama_context_default_params()
        params.n_ctx = n_cells
        # One ubatch per call, so that cancel can come between any two; but llama.cpp wants room in a batch
        # for one output of every sequence.
        n_ubatch = min(settings.n_ubatch or UBATCH, n_cells)
        params.n_ubatch = n_ubatch
        params.n_batch = max(n_ubatch, settings.n_parallel)
        params.n_seq_max = settings.n_parallel
        params.n_threads = settings.n_threads or physical_cores()
        params.n_threads_batch = settings.n_threads_batch or params.n_threads
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED  # else V is stored transposed
        params.type_k = getattr(llama, _TYPES[settings.cache_type_k])
        params.type_v = getattr(llama, _TYPES[settings.cache_type_v])
        params.kv_unified = True  # one address space of cells for all sequences
        params.swa_full = True  # both caches of a sliding-window model have the same cells
        params.offload_kqv = True
        params.no_perf = True
        params.rope_freq_base = settings.rope_freq_base
        params.rope_freq_scale = settings.rope_freq_scale
        llama_log.forget()
        pointer = llama.llama_init_from_model(model.pointer, params)
        if not pointer:
            raise _context_error(settings, n_cells)
        self._pointer = pointer
        self._memory = llama.llama_get_memory(pointer)
        if not self._memory:
            self.close()
            raise ModelUnsupported(
                model.arch, "it keeps no KV cache: it is an encoder or a diffusion model",
                hint="No policy works with it: use a decoder (llama, qwen, gemma ...).",
            )  # fmt: skip
        self._n_cells: int = llama.llama_n_ctx(pointer)
        self._n_batch: int = min(n_ubatch, llama.llama_n_ubatch(pointer))
        self._n_vocab = model.vocab.n_tokens
        self.n_threads: int = params.n_threads
        self.n_threads_batch: int = params.n_threads_batch
        self._row_logits = ctypes.c_float * self._n_vocab
        self._rows: dict[int, F32] = {}  # by address
        self._bound: Batch | None = None
        self._c_batch: Any = None
        self._keep: tuple[object, ...] = ()

    @property
    def pointer(self) -> int:
        """Address of the llama_context. Raises EngineClosed after `close`."""
        if self._pointer is None:
            raise EngineClosed("the context is closed")
        return self._pointer

    @property
    def n_vocab(self) -> int:
        return self._n_vocab

    @property
    def n_cells(self) -> int:
        return self._n_cells

    @property
    def n_batch(self) -> int:
        return self._n_batch

    def decode(self, batch: Batch) -> int:
        """llama_decode -> its return code, 0 for success. The cells are those the hooks were given."""
        if self._bound is not batch:
            self._bind(batch)
        self._c_batch.n_tokens = batch.n
        llama_log.forget()
        rc: int = self._llama.llama_decode(self.pointer, self._c_batch)
        if rc == 0:
            self._llama.llama_synchronize(self.pointer)
        return rc

    def _bind(self, batch: Batch) -> None:
        """Points a llama_batch at the arrays of `batch`, which never move."""
        n, batch.n = batch.n, batch.capacity
        seqs = batch.seqs
        # seq_id holds one pointer for each token, into the array of sequence ids.
        pointers = seqs.ctypes.data + seqs.itemsize * np.arange(batch.n, dtype=np.uintp)
        ones = np.ones(batch.n, dtype=np.int32)
        llama = self._llama
        self._c_batch = llama.llama_batch(
            n_tokens=0,
            token=batch.tokens.ctypes.data_as(llama.llama_token_p),
            embd=None,
            pos=batch.positions.ctypes.data_as(ctypes.POINTER(llama.llama_pos)),
            n_seq_id=ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama.llama_seq_id))),
            logits=batch.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self._bound, self._keep = batch, (pointers, ones)  # ctypes does not keep what it points to
        batch.n = n

    def logits(self, index: int) -> F32:
        """Logits of token `index` of the last batch, [n_vocab]; overwritten by the next decode.

        Raises EngineError if none were asked for at that token.
        """
        row = self._llama.llama_get_logits_ith(self.pointer, index)
        if not row:
            raise EngineError(
                f"there are no logits for token {index} of the batch", hint="Ask for them with the request."
            )
        address = ctypes.addressof(row.contents)
        if address not in self._rows:  # llama.cpp has few such addresses, and rarely new ones
            self._rows[address] = np.ctypeslib.as_array(self._row_logits.from_address(address))
        return self._rows[address]

    def remove(self, seq: int, first: int = 0, end: int = -1) -> bool:
        """Empties the cells of `seq` at view positions first <= p < end (-1: no end). False: not possible."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, seq, first, end))

    @property
    def can_shift(self) -> bool:
        """`shift` works with this memory."""
        return bool(self._llama.llama_memory_can_shift(self._memory))

    def shift(self, seq: int, first: int, end: int, delta: int) -> bool:
        """Moves view positions first <= p < end (-1: no end) of `seq` by `delta`, K included.

        llama.cpp's own K-shift, for sequences without hooks. False: this memory cannot be shifted.
        """
        if not self.can_shift:
            return False
        self._llama.llama_memory_seq_add(self._memory, seq, first, end, delta)
        return True

    def close(self) -> None:
        """Frees the context. Idempotent; hooks on it must be closed before."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self._llama.llama_free(pointer)


def _refuse_more_than_memory(model: Model, settings: Settings, n_cells: int) -> None:
    """Raises OutOfMemory before llama.cpp fills cells with zeros until the system kills the process."""
    if settings.n_gpu_layers:
        return
    per_cell = model.info.cell_bytes(BITS[settings.cache_type_k], BITS[settings.cache_type_v])
    needed, free = n_cells * per_cell, free_memory()
    if free is not None and needed > free:
        raise OutOfMemory(
            f"{n_cells} cells for {settings.n_parallel} sequence(s) need {needed / 2**20:,.0f} MiB, "
            f"{free / 2**20:,.0f} MiB are free",
            hint=_SMALLER,
        )


def _context_error(settings: Settings, n_cells: int) -> EngineError | OutOfMemory | InvalidOption:
    lines = llama_log.last_lines()
    text = " | ".join(lines[-3:]) or "llama.cpp gave no reason"
    if is_allocation_failure(lines):
        return OutOfMemory(
            f"{n_cells} cells ({settings.n_parallel} views and their slack) do not fit into memory ({text})",
            hint=_SMALLER,
        )
    if "quantized" in text or "V cache" in text:
        return InvalidOption("-ctk/-ctv", f"{settings.cache_type_k}/{settings.cache_type_v}", text)
    return EngineError(f"llama.cpp could not make a context ({text})", hint="Run with --verbose to see more.")
