"""Memory for records: where it comes from, and that a place is used by one record at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvmem_llama.errors import LibraryError
from kvmem_llama.native import host_memory as module
from kvmem_llama.native import library
from kvmem_llama.native.host_memory import SLAB_NBYTES, Device, HostMemory, find_device, host_memory
from kvmem_llama.settings import Settings
from kvmem_llama.store.pool import HostPool


class FakeDevice:
    """Arrays stand for pinned memory."""

    name = "Fake_Host"

    def __init__(self, n_slabs: int = 100) -> None:
        self.slabs: dict[int, np.ndarray] = {}  # type: ignore[type-arg]
        self.n_left = n_slabs

    def allocate(self, nbytes: int) -> tuple[int, Callable[[], None]] | None:
        if not self.n_left:
            return None
        self.n_left -= 1
        slab = np.zeros(nbytes, np.uint8)
        address = slab.ctypes.data
        self.slabs[address] = slab
        return address, lambda: self.slabs.__delitem__(address)

    def holds(self, array: np.ndarray) -> bool:  # type: ignore[type-arg]
        at = array.ctypes.data
        return any(start <= at and at + array.nbytes <= start + s.nbytes for start, s in self.slabs.items())


def test_places_of_a_slab_are_apart_and_are_used_again_when_nobody_holds_them() -> None:
    device = FakeDevice()
    memory = HostMemory(device)
    n = 5000  # bytes; two pages
    held = [memory.allocate(n) for _ in range(40)]
    for i, array in enumerate(held):
        array[:] = i
    assert [int(array[0]) for array in held] == [int(array[-1]) for array in held] == list(range(40))
    assert all(map(device.holds, held)) and len(device.slabs) == 1
    starts = {array.ctypes.data for array in held}
    view = held[3][10:20]
    kept = held[3].ctypes.data
    del held, array
    gc.collect()
    again = [memory.allocate(n) for _ in range(39)]
    assert {array.ctypes.data for array in again} == starts - {kept}
    assert int(view[0]) == 3  # a view holds its place, too
    del again, view, memory
    gc.collect()
    assert not device.slabs


def test_arrays_outlive_the_memory_they_came_from() -> None:
    device = FakeDevice()
    array = HostMemory(device).allocate(100)
    gc.collect()
    assert device.holds(array)
    del array
    gc.collect()
    assert not device.slabs


def test_a_device_without_more_memory_is_followed_by_ordinary_memory() -> None:
    device = FakeDevice(n_slabs=1)
    memory = HostMemory(device)
    arrays = [memory.allocate(SLAB_NBYTES // 2) for _ in range(3)]
    assert [device.holds(array) for array in arrays] == [True, True, False]


def test_records_that_are_put_are_copied_to_pinned_memory_and_only_to_that() -> None:
    device = FakeDevice()
    memory = HostMemory(device)
    for pool, is_pinned in ((HostPool(2**20, memory=memory), True), (HostPool(2**20), False)):
        record = np.arange(100, dtype=np.uint8)
        ref = pool.name()
        pool.put(ref, record)
        found = pool.get(ref.slot)
        assert found is not None and (device.holds(found), found is record) == (is_pinned, not is_pinned)
        assert found.tolist() == list(range(100)) and not found.flags.writeable


@pytest.mark.parametrize(
    ("n_gpu_layers", "found", "kind"),
    [
        (0, FakeDevice(), "ordinary memory"),
        (99, None, "ordinary memory"),
        (99, FakeDevice(), "pinned (Fake_Host)"),
    ],
)
def test_memory_is_pinned_where_a_gpu_holds_layers(
    monkeypatch: pytest.MonkeyPatch, n_gpu_layers: int, found: Device | None, kind: str
) -> None:
    monkeypatch.setattr(module, "find_device", lambda path: found)
    memory = host_memory(Settings(n_gpu_layers=n_gpu_layers), Path("lib"))
    assert (memory.kind, memory.is_pinned) == (kind, kind != "ordinary memory")


def test_a_library_without_the_functions_has_no_device(tmp_path: Path) -> None:
    assert find_device(tmp_path / "none.so") is None
    assert find_device(Path("libm.so.6")) is None


def test_the_library_is_asked_for_each_kind_of_device() -> None:
    try:
        path = library.load().path
    except LibraryError as error:
        pytest.skip(str(error))
    gpu = find_device(path)
    assert (gpu is None) == (host_memory(Settings(n_gpu_layers=99), path).kind == "ordinary memory")
    for device in (gpu, find_device(path, types=(0,))):  # a CPU may give out host memory, or none
        array = HostMemory(device).allocate(10_000)
        array[:] = 7
        assert array.sum() == 70_000
