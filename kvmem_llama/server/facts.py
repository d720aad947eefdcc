"""What clients are told about the model."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

from .. import __version__
from ..engine.model import Model
from ..native.library import import_binding
from .flags import ServerOptions

BUILD_INFO: Final = f"b0-kvmem_llama-{__version__}"
"""In place of llama-server's `b<number>-<commit>`; clients look for the b."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Counts in tokens, sizes in bytes."""

    name: str  # for clients: the first alias by the alphabet, or that of the file
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    path: str
    ftype: str
    vocab_type: int
    n_vocab: int
    n_ctx: int  # of the view of one slot
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    bos_token: str
    eos_token: str

    @classmethod
    def of(cls, model: Model, n_view: int, options: ServerOptions) -> ModelFacts:
        """n_view: tokens of the view of one slot."""
        llama: Any = import_binding()
        vocab, pointer = model.vocab, model.pointer

        def text(token: int) -> str:
            return vocab.piece(token).decode("utf-8", "replace") if token >= 0 else ""

        path = model.info.path
        names = options.aliases or (path.name,)
        ftype: bytes | None = llama.llama_ftype_name(llama.llama_model_ftype(pointer))
        return cls(
            name=names[0],
            aliases=names,
            tags=options.tag_list,
            path=str(path),
            ftype=ftype.decode() if ftype else "",
            vocab_type=llama.llama_vocab_type(ctypes.c_void_p(vocab.pointer)),
            n_vocab=vocab.n_tokens,
            n_ctx=n_view,
            n_ctx_train=model.n_ctx_train,
            n_embd=llama.llama_model_n_embd_inp(pointer),
            n_params=model.n_params,
            size=model.n_bytes,
            bos_token=text(vocab.bos),
            eos_token=text(vocab.eos),
        )
