"""libkvmem_chat: llama.cpp's chat templates, grammars, parsers of answers (C side: chat_shim/kvmem_chat.h).

Requests and results are JSON. Calls release the GIL. What may be called from which thread is in the header.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import (
    EngineError,
    InvalidRequest,
    KvmemError,
    LibraryMismatch,
    LibraryMissing,
    OutputMismatch,
    TemplateUnsupported,
)
from . import library
from .chat_cdef import CHAT_ABI, CHAT_CDEF
from .declarations import UNUSABLE, declared
from .once import Once
from .stock_cdef import STOCK_CDEF

LIBRARY_NAME: Final = {"darwin": "libkvmem_chat.dylib", "win32": "kvmem_chat.dll"}.get(
    sys.platform, "libkvmem_chat.so"
)
LIBRARY_PATH: Final = library.PACKAGE / "_lib" / LIBRARY_NAME

_N_REASON: Final = 800  # characters of an error text; it may quote a whole request


@Once
def load() -> ChatShim:
    """The library that was built with this package. Raises LibraryMissing or LibraryMismatch."""
    return ChatShim(LIBRARY_PATH)


class ChatShim:
    """The loaded library. `ffi` holds the types of native/chat_cdef.py."""

    def __init__(self, path: Path) -> None:
        """Raises LibraryMissing if there is no library at `path`, LibraryMismatch if it is another."""
        native = library.load()  # the libllama that the shim needs must be in the process before it
        self.ffi: Any = declared(CHAT_CDEF)
        if not path.is_file():
            raise LibraryMissing(f"the library of chat templates is missing: {path}")
        try:
            self._lib: Any = self.ffi.dlopen(str(path))
            abi = int(self._lib.kvmem_chat_abi())
        except UNUSABLE as error:
            raise LibraryMissing(f"{path} cannot be used: {error}") from error
        if abi != CHAT_ABI:
            raise LibraryMismatch(f"{path} has version {abi} of its interface, this package needs {CHAT_ABI}")
        patch_id = self.ffi.string(self._lib.kvmem_chat_patch_id()).decode("ascii", "replace")
        expected = library.expected_patch_id()
        if expected is not None and patch_id != expected:
            raise LibraryMismatch(f"{path} was built from source {patch_id}, this package from {expected}")
        if int(self.ffi.cast("uintptr_t", self._lib.kvmem_chat_llama())) != _address_in(native):
            raise LibraryMismatch(
                f"{path} uses another libllama than {native.path}",
                hint="Import kvmem_llama before any other package that loads llama.cpp.",
            )
        self.path = path

    def open_templates(self, model: int | None, request: Mapping[str, object]) -> tuple[Any, dict[str, Any]]:
        """A handle for `apply`, to be closed with `close_templates`, and what is known of the templates.

        model: address of a llama_model, which must outlive the call only.
        Raises InvalidRequest or TemplateUnsupported.
        """
        pointer = self.ffi.cast("struct llama_model *", model or 0)
        out = self.ffi.new("struct kvmem_chat_templates **")
        try:
            facts = self._call(self._lib.kvmem_chat_templates_open, pointer, *_json(request), out)
        except TemplateUnsupported as error:
            jinja = request.get("jinja", True)
            hint = "Give another template; it must be jinja." if jinja else "Give one of these names."
            raise TemplateUnsupported(error.why, hint=hint) from error
        return out[0], json.loads(facts)

    def close_templates(self, handle: Any) -> None:
        self._lib.kvmem_chat_templates_close(handle)

    def apply(self, handle: Any, request: Mapping[str, object]) -> dict[str, Any]:
        """llama.cpp's common_chat_params. Raises InvalidRequest or TemplateUnsupported."""
        applied: dict[str, Any] = json.loads(self._call(self._lib.kvmem_chat_apply, handle, *_json(request)))
        return applied

    def schema_to_grammar(self, schema: object) -> str:
        """GBNF. Raises InvalidRequest."""
        return self._call(self._lib.kvmem_chat_schema_to_grammar, *_json(schema)).decode("utf-8")

    def open_parser(self, request: Mapping[str, object]) -> Any:
        """A handle for `parse` and `feed`. `close_parser` closes it; the parser of an answer that nobody
        reads to its end goes with the handle."""
        out = self.ffi.new("struct kvmem_chat_parser **")
        self._call(self._lib.kvmem_chat_parser_open, *_json(request), out)
        return self.ffi.gc(out[0], self._lib.kvmem_chat_parser_close)

    def close_parser(self, handle: Any) -> None:
        self.ffi.release(handle)

    def parse(self, handle: Any, answer: str, is_partial: bool) -> dict[str, Any]:
        """A message of OpenAI's API. Raises OutputMismatch."""
        data = answer.encode("utf-8", errors="replace")
        text = self._call(self._lib.kvmem_chat_parse, handle, data, len(data), is_partial)
        message: dict[str, Any] = json.loads(text)
        return message

    def feed(self, handle: Any, piece: str, is_partial: bool) -> list[dict[str, Any]]:
        """Deltas of OpenAI's API. Raises OutputMismatch."""
        data = piece.encode("utf-8", errors="replace")
        text = self._call(self._lib.kvmem_chat_feed, handle, data, len(data), is_partial)
        deltas: list[dict[str, Any]] = json.loads(text)
        return deltas

    def grammar_sampler(self, vocab: int, request: Mapping[str, object]) -> Any:
        """A struct llama_sampler *, freed with llama_sampler_free. vocab: address of a llama_vocab.

        Raises InvalidRequest.
        """
        return self._sampler(self._lib.kvmem_chat_grammar_sampler, vocab, request)

    def reasoning_sampler(self, vocab: int, request: Mapping[str, object]) -> Any:
        """The same for the sampler that ends a reasoning. Raises InvalidRequest."""
        return self._sampler(self._lib.kvmem_chat_reasoning_sampler, vocab, request)

    def is_reasoning(self, reasoning: Any) -> bool:
        return bool(self._lib.kvmem_chat_is_reasoning(reasoning))

    def accept(self, grammar: Any, reasoning: Any, is_lazy: bool, token: int) -> None:
        """Tells both samplers, each may be None, of a token. Raises OutputMismatch; then both are spent."""
        null = self.ffi.NULL
        self._call(self._lib.kvmem_chat_accept, grammar or null, reasoning or null, is_lazy, token)

    def _sampler(self, function: Any, vocab: int, request: Mapping[str, object]) -> Any:
        out = self.ffi.new("struct llama_sampler **")
        self._call(function, self.ffi.cast("struct llama_vocab *", vocab), *_json(request), out)
        return out[0]

    def _call(self, function: Any, *arguments: Any) -> bytes:
        text = self.ffi.new("char **")
        code = int(function(*arguments, text))
        try:
            result: bytes = self.ffi.string(text[0]) if text[0] != self.ffi.NULL else b""
        finally:
            self._lib.kvmem_chat_free_text(text[0])
        if code != self._lib.KVMEM_CHAT_OK:
            raise self._error(code, result)
        return result

    def _error(self, code: int, result: bytes) -> KvmemError:
        error = json.loads(result) if result else {}
        # llama.cpp quotes the template, over several lines, and sometimes the whole request.
        what = " ".join(str(error.get("what", "out of memory")).split()).rstrip(".")
        what = what if len(what) <= _N_REASON else f"{what[:_N_REASON]} ..."
        invalid_argument = bool(error.get("invalid_argument"))
        if code == self._lib.KVMEM_CHAT_E_REQUEST:
            return InvalidRequest(what, invalid_argument=invalid_argument)
        if code == self._lib.KVMEM_CHAT_E_TEMPLATE:
            return TemplateUnsupported(
                what,
                hint="Change the messages to what this template takes, or use another template.",
                invalid_argument=invalid_argument,
            )
        if code == self._lib.KVMEM_CHAT_E_OUTPUT:
            return OutputMismatch(what)
        return EngineError(f"llama.cpp's chat code failed: {what}", hint="Run again with less at a time.")


def _address_in(native: library.NativeLibrary) -> int:
    """Where llama_model_get_vocab lies in the libllama of this process."""
    ffi = declared(STOCK_CDEF)
    lib = ffi.dlopen(str(native.path))
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, "llama_model_get_vocab")))


def _json(request: object) -> tuple[bytes, int]:
    """Text and length. Raises InvalidRequest for what JSON cannot hold."""
    try:
        data = json.dumps(request, allow_nan=False, default=_plain).encode("ascii")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"it cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("it nests too deep") from error
    return data, len(data)


def _plain(value: object) -> object:
    """Mappings and sequences that are not dict and list."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
