#!/usr/bin/env python3
"""Parses the C declarations of kvmem_llama/native into Python modules: a step of the build (CMakeLists.txt).

    scripts/compile_cdefs.py FOLDER

Needs cffi alone: the package itself cannot be imported before it is built.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kvmem_llama" / "native"))

from cdef import CDEF
from chat_cdef import CHAT_CDEF
from declarations import module_of
from kernels_cdef import KERNELS_CDEF
from stock_cdef import STOCK_CDEF


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for cdef in (CDEF, CHAT_CDEF, KERNELS_CDEF, STOCK_CDEF):
        ffi = cffi.FFI()
        ffi.cdef(cdef)
        name = module_of(cdef)
        ffi.set_source(name, None)
        ffi.emit_python_code(str(folder / f"{name}.py"))


if __name__ == "__main__":
    main()
