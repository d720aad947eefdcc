"""The weights and the vocabulary of one GGUF file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import EngineClosed, EngineError, KvmemError, ModelCorrupt, ModelUnsupported
from ..gguf_info import ModelInfo, check_policy, read_model_info
from ..native.library import import_binding
from ..settings import Settings
from . import llama_log
from .vocab import Vocab

_ALLOCATION = re.compile(
    r"(unable|failed) to allocate|out of memory|bad_alloc|std::length_error", re.IGNORECASE
)
_UNKNOWN_ARCH = re.compile(r"unknown model architecture: '([^']*)'")


class OutOfMemory(EngineError):
    """The model or its cells do not fit into memory."""


class Model:
    """A loaded model. Its facts may be read on any thread; `close` frees it, once its contexts are closed."""

    def __init__(self, pointer: int, info: ModelInfo, settings: Settings) -> None:
        """pointer: address of the llama_model, owned from here on. Use `load`."""
        self._llama: Any = import_binding()
        self._pointer: int | None = pointer
        self.info = info
        self.arch = info.arch
        self.vocab = Vocab(self._llama.llama_model_get_vocab(pointer))
        self.n_embd: int = self._llama.llama_model_n_embd(pointer)
        self.n_layer: int = self._llama.llama_model_n_layer(pointer)
        self.n_params: int = self._llama.llama_model_n_params(pointer)
        self.n_bytes: int = self._llama.llama_model_size(pointer)
        n_train: int = self._llama.llama_model_n_ctx_train(pointer)
        scale = settings.rope_freq_scale
        # The window grows as much as the rotation is slowed down.
        self.n_ctx_train = int(n_train / scale) if 0 < scale < 1 else n_train  # tokens
        template: bytes | None = self._llama.llama_model_chat_template(pointer, None)
        self.chat_template = template.decode("utf-8", errors="replace") if template else None

    @classmethod
    def load(cls, path: str | Path, settings: Settings) -> Model:
        """Loads the model at `path`.

        Raises ModelNotFound, ModelCorrupt, ModelUnsupported (unknown architecture, encoder, policy) or
        OutOfMemory; llama.cpp's own words are in the text where it is llama.cpp that refused.
        """
        info = read_model_info(Path(path), tokens=True)
        check_policy(info, settings.policy)
        llama: Any = import_binding()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = settings.n_gpu_layers
        params.load_mode = llama.LLAMA_LOAD_MODE_MMAP if settings.use_mmap else llama.LLAMA_LOAD_MODE_NONE
        # Repacked weights compute other roundings for other batch shapes.
        params.use_extra_bufts = not settings.exact
        llama_log.forget()
        pointer = llama.llama_model_load_from_file(str(path).encode("utf-8", "surrogateescape"), params)
        if not pointer:
            raise _load_error(info)
        if llama.llama_model_has_encoder(pointer) or not llama.llama_model_has_decoder(pointer):
            llama.llama_model_free(pointer)
            raise ModelUnsupported(
                info.arch, "it has an encoder", hint="Use a decoder-only model (llama, qwen, gemma ...)."
            )
        if llama.llama_model_is_diffusion(pointer):
            llama.llama_model_free(pointer)
            raise ModelUnsupported(
                info.arch, "it is a diffusion model", hint="Use a model that writes from left to right."
            )
        return cls(pointer, info, settings)

    @property
    def pointer(self) -> int:
        """Address of the llama_model. Raises EngineClosed after `close`."""
        if self._pointer is None:
            raise EngineClosed("the model is closed", hint="Load it again.")
        return self._pointer

    def close(self) -> None:
        """Frees the weights. Idempotent; not before every context of it is closed."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            self.vocab.close()
            self._llama.llama_model_free(pointer)


def _load_error(info: ModelInfo) -> KvmemError:
    """llama.cpp returns no reason, it only logs one."""
    lines = llama_log.last_lines()
    text = " | ".join(lines[-3:]) or "llama.cpp gave no reason"
    unknown = _UNKNOWN_ARCH.search(text)
    if unknown:
        return ModelUnsupported(
            unknown[1],
            f"llama.cpp does not know it ({text})",
            hint="No policy works with it: use another model.",
        )
    if is_allocation_failure(lines):
        mib = info.file_size / 2**20
        return OutOfMemory(
            f"the {mib:.0f} MiB of model {str(info.path)!r} do not fit into memory ({text})",
            hint="Use a smaller or more strongly quantised model, or leave --mmap on.",
        )
    return ModelCorrupt(info.path, text)


def is_allocation_failure(lines: list[str]) -> bool:
    """llama.cpp's messages speak of memory that it could not get."""
    return any(_ALLOCATION.search(line) for line in lines)
