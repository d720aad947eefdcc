"""Locks end with their holder, and say who it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvmem_llama.errors import StoreFailed, StoreLocked
from kvmem_llama.store.files import Files
from kvmem_llama.store.head import Head
from kvmem_llama.store.lock import holder_of, lock_workspace, try_lock, wait_lock

FILES = Files()

CHILD = """
import sys, time
from pathlib import Path
from kvmem_llama.store.files import Files
from kvmem_llama.store.lock import lock_workspace
lock = lock_workspace(Files(), Path(sys.argv[1]), "w", "notes")
print("locked", flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_once_in_a_process_and_freed_by_release(tmp_path: Path) -> None:
    lock = lock_workspace(FILES, tmp_path, "w", "notes")
    with pytest.raises(StoreLocked, match="this process on"):
        lock_workspace(FILES, tmp_path, "w", "notes")
    lock_workspace(FILES, tmp_path, "other", "other").release()
    lock.release()
    lock.release()
    lock_workspace(FILES, tmp_path, "w", "notes").release()


def test_a_lock_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"locked\n"
        with pytest.raises(StoreLocked, match=f"process {child.pid} on .* since 20") as caught:
            lock_workspace(FILES, tmp_path, "w", "notes")
        assert caught.value.holder.startswith(f"process {child.pid} on ")
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    lock_workspace(FILES, tmp_path, "w", "notes").release()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"pid": "x", "host": 1, "time": 1e400}', b"null"]
)
def test_a_holder_that_cannot_be_read_is_another_process(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.lock"
    path.write_bytes(content)
    assert holder_of(FILES, path) == "another process"
    assert holder_of(FILES, tmp_path / "none") == "another process"


def test_a_lock_on_a_file_that_was_deleted_is_none(tmp_path: Path) -> None:
    path = tmp_path / "w.lock"

    class Deleting(Files):
        """Deletes the file between its opening and its locking, once."""

        def lock(self, fd: int, *, shared: bool = False) -> bool:
            if path.exists() and not self.done:
                self.done = True
                path.unlink()
            return super().lock(fd, shared=shared)

        done = False

    lock = try_lock(Deleting(), path)
    assert lock is not None and path.exists()
    assert try_lock(FILES, path) is None
    lock.remove()
    assert not path.exists()


def test_waiting_ends_when_the_lock_is_free_or_the_time_is_up(tmp_path: Path) -> None:
    path = tmp_path / "w.lock"
    lock = wait_lock(FILES, path)
    with pytest.raises(StoreFailed, match="was locked for"):
        wait_lock(FILES, path, 0.01)
    timer = threading.Timer(0.05, lock.release)
    timer.start()
    with wait_lock(FILES, path, 10):
        pass
    timer.join()


def test_a_folder_that_is_missing_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="No such file"):
        lock_workspace(FILES, tmp_path / "none", "w", "notes")


def test_a_head_is_read_as_written_and_damage_is_none(tmp_path: Path) -> None:
    head = Head(FILES, tmp_path, "w")
    assert head.read() == 0
    head.write(1)
    head.write(2**40)
    assert head.read() == 2**40
    whole = (tmp_path / "w.head").read_bytes()
    for bit in range(len(whole) * 8):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "w.head").write_bytes(data)
        assert head.read() == 0
    (tmp_path / "w.head").write_bytes(whole[:-1])
    assert head.read() == 0
    head.remove()
    head.remove()
