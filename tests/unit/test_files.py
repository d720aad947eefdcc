"""File operations: whole transfers out of short ones, and errors that name the path."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from power_cut import PowerCut
from store_faults import NOTHING, SHORT, FaultySystem

from kvmem_llama.errors import StoreFailed, StoreFull
from kvmem_llama.store import files as files_module
from kvmem_llama.store.files import Files, errno_of
from kvmem_llama.store.system import IOV_MAX


def buffers(sizes: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize("what", ["", SHORT])
def test_many_buffers_arrive_whole_however_short_the_calls_are(tmp_path: Path, what: str) -> None:
    system = FaultySystem()
    files = Files(system)
    if what:
        system.fail("pwritev", what, times=20)
        system.fail("preadv", what, times=20)
    written = buffers([7, 0, 4096, 1, 333] * 500)
    assert len(written) > IOV_MAX
    fd = files.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    files.write_from(fd, written, 11)
    found = [np.zeros_like(b) for b in written]
    n = files.read_into(fd, found, 11)
    files.close(fd)
    assert n == sum(b.nbytes for b in written)
    assert all(np.array_equal(a, b) for a, b in zip(written, found, strict=True))


def test_reading_stops_at_the_end_of_the_file(tmp_path: Path) -> None:
    files = Files()
    fd = files.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    files.pwrite(fd, b"abc", 0)
    buffer = np.zeros(5, np.uint8)
    assert files.read_into(fd, [buffer], 1) == 2
    assert files.pread(fd, 3, 0) == b"abc"
    with pytest.raises(StoreFailed, match="2 bytes early"):
        files.pread(fd, 4, 1)
    files.close(fd)


@pytest.mark.parametrize("what", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_is_named_with_what_was_needed_and_what_is_free(tmp_path: Path, what: str) -> None:
    system = FaultySystem()
    files = Files(system)
    fd = files.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    system.fail("pwritev", what)
    with pytest.raises(StoreFull) as caught:
        files.pwrite(fd, bytes(1000), 0)
    files.close(fd)
    assert caught.value.path == str(tmp_path / "a")
    assert caught.value.needed == 1000
    assert caught.value.free > 0


@pytest.mark.parametrize(
    ("call", "what"),
    [("open", "EACCES"), ("open", "EMFILE"), ("pwritev", "EIO"), ("pwritev", NOTHING), ("fsync", "EIO"),
     ("ftruncate", "EROFS")],
)  # fmt: skip
def test_any_other_error_is_named_with_its_path_and_its_cause(tmp_path: Path, call: str, what: str) -> None:
    system = FaultySystem()
    files = Files(system)
    system.fail(call, what)
    with pytest.raises(StoreFailed) as caught:
        fd = files.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
        files.pwrite(fd, b"abc", 0)
        files.truncate(fd, 10)
        files.fsync(fd)
    assert caught.value.path == str(tmp_path / "a")
    assert errno_of(caught.value) != 0


def test_a_path_with_a_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed):
        Files().open(tmp_path / "a\0b", os.O_RDONLY)


def test_what_is_made_belongs_to_the_user_alone(tmp_path: Path) -> None:
    files = Files()
    files.mkdir(tmp_path / "folder")
    files.mkdir(tmp_path / "folder")
    files.close(files.open(tmp_path / "folder" / "file", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "folder" / "file").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StoreFailed):
        files.mkdir(tmp_path / "folder" / "file")


def test_a_lock_excludes_others_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    files = Files()
    first, second = (files.open(tmp_path / "a", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert files.lock(first)
    assert not files.lock(second)
    assert not files.lock(second, shared=True)
    files.close(first)
    assert files.lock(second)
    files.close(second)


def test_erased_bytes_are_zeros_and_the_file_keeps_its_length(tmp_path: Path) -> None:
    files = Files()
    fd = files.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    files.pwrite(fd, b"x" * 12288, 0)
    files.erase(fd, 4096, 4096)
    assert files.pread(fd, 12288, 0) == b"x" * 4096 + bytes(4096) + b"x" * 4096
    assert files.length(fd) == files.size(tmp_path / "a") == 12288
    files.close(fd)


def test_installed_files_are_the_current_ones() -> None:
    mine = Files()
    before = files_module.install(mine)
    assert files_module.current() is mine
    assert files_module.install(before) is mine


def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path) -> None:
    system = PowerCut()
    files = Files(system)
    fd = files.open(tmp_path / "kept", os.O_RDWR | os.O_CREAT)
    files.pwrite(fd, b"old", 0)
    files.fsync(fd)
    files.sync_dir(tmp_path)
    files.pwrite(fd, b"newer", 0)
    files.close(files.open(tmp_path / "lost", os.O_RDWR | os.O_CREAT))
    system.cut()
    assert (tmp_path / "kept").read_bytes() == b"old"
    assert not (tmp_path / "lost").exists()
    files.close(fd)
