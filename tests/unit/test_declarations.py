"""C declarations: what the build parsed is what the source declares; others are parsed when asked for."""

from __future__ import annotations

import importlib

import cffi
import pytest

from kvmem_llama.native.cdef import CDEF
from kvmem_llama.native.chat_cdef import CHAT_CDEF
from kvmem_llama.native.declarations import UNUSABLE, declared, has, module_of
from kvmem_llama.native.kernels_cdef import KERNELS_CDEF
from kvmem_llama.native.stock_cdef import STOCK_CDEF


@pytest.mark.parametrize("cdef", [CDEF, CHAT_CDEF, KERNELS_CDEF, STOCK_CDEF])
def test_the_build_parsed_what_the_source_declares(cdef: str) -> None:
    built = importlib.import_module(f"kvmem_llama._lib.{module_of(cdef)}").ffi
    fresh = cffi.FFI()
    fresh.cdef(cdef)
    assert declared(cdef) is built
    names, structs, unions = built.list_types()
    assert [sorted(kind) for kind in (names, structs, unions)] == [sorted(k) for k in fresh.list_types()]
    for name in structs:
        assert sizes(built, name) == sizes(fresh, name)


def sizes(ffi: object, struct: str) -> object:
    """Of a struct and its fields by name; None of an opaque one."""
    try:
        size = ffi.sizeof(f"struct {struct}")  # type: ignore[attr-defined]
    except UNUSABLE:
        return None
    fields = ffi.typeof(f"struct {struct}").fields  # type: ignore[attr-defined]
    return size, [(name, field.offset, field.type.cname) for name, field in fields]


def test_other_declarations_are_parsed_when_asked_for() -> None:
    ffi = declared("int abs(int); int no_such_function(int);")
    lib = ffi.dlopen(None)
    assert lib.abs(-3) == 3
    assert has(lib, "abs")
    assert not has(lib, "no_such_function")
