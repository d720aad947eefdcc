"""GPUs that the library can use, as their drivers tell them: no model and no context is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from .declarations import UNUSABLE, declared
from .stock_cdef import STOCK_CDEF

GPU_TYPES: Final = (1, 2)  # enum ggml_backend_dev_type: GPU, integrated GPU


def gpu_memory(path: Path) -> list[tuple[str, int, int]]:
    """(name, bytes in all, bytes free) of each GPU of the library at `path`; empty if it has none."""
    ffi = declared(STOCK_CDEF)
    try:
        lib: Any = ffi.dlopen(str(path))
        found = []
        for index in range(lib.ggml_backend_dev_count()):
            device = lib.ggml_backend_dev_get(index)
            if lib.ggml_backend_dev_type(device) in GPU_TYPES:
                free, total = ffi.new("size_t *"), ffi.new("size_t *")
                lib.ggml_backend_dev_memory(device, free, total)
                name = ffi.string(lib.ggml_backend_dev_description(device)).decode(errors="replace")
                found.append((name, int(total[0]), int(free[0])))
        return found
    except UNUSABLE:  # another build: a function may be missing, or elsewhere
        return []
