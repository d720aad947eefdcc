"""C declarations for cffi, parsed by the build: the parser alone takes as long as loading a small model."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any, Final

import _cffi_backend

UNUSABLE: Final[tuple[type[Exception], ...]] = (OSError, AttributeError, ValueError, _cffi_backend.FFI.error)
"""What cffi raises for a file that is no library, a function that a library lacks, and the size of an opaque
struct; an FFI that the build parsed has an error class of its own."""

_PREFIX: Final = "cdef_"


def module_of(cdef: str) -> str:
    """Name of the module of package `_lib` that holds the declarations as the build parsed them."""
    return _PREFIX + hashlib.sha256(cdef.encode()).hexdigest()[:16]


def has(lib: Any, name: str) -> bool:
    """Whether a library that cffi opened holds a function that was declared."""
    try:
        getattr(lib, name)
    except UNUSABLE:
        return False
    return True


def declared(cdef: str) -> Any:
    """A cffi FFI with these declarations; they are parsed now if the build did not know them."""
    try:
        return importlib.import_module(f"kvmem_llama._lib.{module_of(cdef)}").ffi
    except ImportError:  # the source was changed after the build
        import cffi

        ffi = cffi.FFI()
        ffi.cdef(cdef)
        return ffi
