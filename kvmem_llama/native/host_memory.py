"""Memory for records in RAM: pinned by the GPU that holds layers of the model, where there is one.

Pinned memory is what a GPU copies from and to at its full speed. A device gives it out in large pieces that
take long to make, so records of one size share slabs; a place is used again when nobody holds its array.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kvmem_llama.settings import Settings

from . import library
from .declarations import UNUSABLE, declared
from .layout import U8
from .stock_cdef import STOCK_CDEF

SLAB_NBYTES: Final = 64 << 20
_ALIGNMENT: Final = 4096  # bytes
_GPU, _IGPU = 1, 2  # enum ggml_backend_dev_type


class Device(Protocol):
    """What gives out pinned memory."""

    @property
    def name(self) -> str: ...

    def allocate(self, nbytes: int) -> tuple[int, Callable[[], None]] | None:
        """Address of pinned memory, and what frees it; None if there is no more. Any thread."""
        ...


class GgmlDevice:
    """The host buffer type of a device of ggml."""

    def __init__(self, ffi: Any, lib: Any, buffer_type: Any) -> None:
        self._ffi, self._lib, self._buffer_type = ffi, lib, buffer_type
        self.name: Final[str] = ffi.string(lib.ggml_backend_buft_name(buffer_type)).decode()

    def allocate(self, nbytes: int) -> tuple[int, Callable[[], None]] | None:
        lib = self._lib
        buffer = lib.ggml_backend_buft_alloc_buffer(self._buffer_type, nbytes)
        if buffer == self._ffi.NULL:
            return None
        address = int(self._ffi.cast("uintptr_t", lib.ggml_backend_buffer_get_base(buffer)))
        return address, lambda: lib.ggml_backend_buffer_free(buffer)


class HostMemory:
    """Gives out arrays for records. Any thread."""

    def __init__(self, device: Device | None = None) -> None:
        """device: None: ordinary memory."""
        self._device: Final = device
        self._free: Final[dict[int, deque[int]]] = {}  # addresses by their size

    @property
    def is_pinned(self) -> bool:
        return self._device is not None

    @property
    def kind(self) -> str:
        """For a person."""
        return "ordinary memory" if self._device is None else f"pinned ({self._device.name})"

    def allocate(self, nbytes: int) -> U8:
        """[nbytes] uint8, with any content; ordinary memory also where the device has no more of its own."""
        if self._device is None:
            return np.empty(nbytes, np.uint8)
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        free = self._free.setdefault(size, deque())
        try:
            address = free.pop()
        except IndexError:
            n = max(SLAB_NBYTES // size, 1)
            slab = self._device.allocate(n * size)
            if slab is None:
                return np.empty(nbytes, np.uint8)
            first, release = slab
            weakref.finalize(self, release).atexit = False  # then the driver may be gone already
            free.extend(first + i * size for i in range(1, n))
            address = first
        place = (ctypes.c_uint8 * nbytes).from_address(address)
        # `self` is kept by what is to be done, so its slabs live as long as any of the arrays
        weakref.finalize(place, self._give_back, size, address).atexit = False
        array: U8 = np.ctypeslib.as_array(place)
        return array

    def _give_back(self, size: int, address: int) -> None:
        self._free[size].append(address)


def host_memory(settings: Settings, path: Path | None = None) -> HostMemory:
    """Memory for the records of an engine with these settings.

    path: of the library; None: the one that is loaded. Raises what library.load raises.
    """
    if not settings.n_gpu_layers:
        return HostMemory()
    return HostMemory(find_device(path or library.load().path))


def find_device(path: Path, types: tuple[int, ...] = (_GPU, _IGPU)) -> Device | None:
    """The first GPU that the library at `path` has and that gives out host memory; None: there is none."""
    ffi = declared(STOCK_CDEF)
    try:
        lib = ffi.dlopen(str(path))
        for kind in types:
            device = lib.ggml_backend_dev_by_type(kind)
            if device == ffi.NULL:
                continue
            buffer_type = lib.ggml_backend_dev_host_buffer_type(device)
            if buffer_type != ffi.NULL:
                return GgmlDevice(ffi, lib, buffer_type)
    except UNUSABLE:  # another build: a function may be missing, or elsewhere
        pass
    return None
