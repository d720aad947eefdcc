"""Locks of a store folder. They are flock locks: the system drops them when their holder ends, in any way."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Final

from kvmem_llama.errors import StoreError, StoreFailed, StoreLocked

from .files import Files
from .small_files import is_missing, read_file, remove_if_there

_GLANCE: Final = 0.25  # seconds; somebody may only look whether it is locked
CLOSE_FIRST: Final = "Close it there first."  # to do what nobody can do to a workspace that is in use
_WAIT: Final = 60.0  # seconds; what is done under a lock that is waited for takes milliseconds


class Lock:
    """A locked file. The file itself means nothing: it may stay behind."""

    def __init__(self, files: Files, path: Path, fd: int) -> None:
        self.path: Final = path
        self._files: Final = files
        self._fd: int | None = fd

    def release(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._files.close(fd)

    def remove(self) -> None:
        """Deletes the file while it is locked, then lets go: whoever waits for it sees that it is gone."""
        try:
            remove_if_there(self._files, self.path)
        finally:
            self.release()

    def write(self, data: bytes) -> None:
        """Makes `data` the content of the locked file. Raises StoreFull or StoreFailed."""
        assert self._fd is not None
        self._files.truncate(self._fd, 0)
        self._files.pwrite(self._fd, data, 0)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(files: Files, path: Path) -> bool:
    """Somebody has the lock, in this process or another. Makes no file. Raises StoreFailed."""
    try:
        fd = files.open(path, os.O_RDWR)
    except StoreFailed as error:
        if is_missing(error):
            return False
        raise
    try:
        return not files.lock(fd)
    finally:
        files.close(fd)


def try_lock(files: Files, path: Path) -> Lock | None:
    """The lock, or None if somebody else has it, in this process or another. Raises StoreFailed."""
    while True:
        fd = files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            locked = files.lock(fd)
            # The file may have been deleted between its opening and its locking: then this is no lock.
            is_current = locked and _is_file(fd, path)
        except BaseException:
            files.close(fd)
            raise
        if is_current:
            return Lock(files, path, fd)
        files.close(fd)
        if not locked:
            return None


def wait_lock(files: Files, path: Path, seconds: float = _WAIT) -> Lock:
    """The lock, as soon as it is free. Raises StoreFailed if that takes longer than `seconds`."""
    give_up = time.monotonic() + seconds
    pause = 0.0005
    while True:
        lock = try_lock(files, path)
        if lock is not None:
            return lock
        if time.monotonic() > give_up:
            raise StoreFailed(
                path, f"was locked for {seconds:g} s", hint="Is a process stopped that uses it?"
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def lock_workspace(files: Files, folder: Path, workspace: str, name: str, *, hint: str = "") -> Lock:
    """The right to write to one workspace; the file's content names the holder.

    folder: of the locks. workspace: its id. name: for messages. hint: what to do if somebody else has it;
    empty: that it can be opened read-only. Raises StoreLocked or StoreFailed.
    """
    path = folder / f"{workspace}.lock"
    give_up = time.monotonic() + _GLANCE
    while (lock := try_lock(files, path)) is None:
        if time.monotonic() > give_up:
            raise StoreLocked(name, holder_of(files, path), hint=hint)
        time.sleep(0.01)
    note = {"pid": os.getpid(), "host": socket.gethostname(), "time": int(time.time())}
    try:
        lock.write(json.dumps(note).encode())
    except StoreError:
        lock.release()
        raise
    return lock


def holder_of(files: Files, path: Path) -> str:
    """Who holds a workspace's lock, for messages."""
    for _ in range(5):  # it is written just after the lock is taken
        try:
            note = json.loads(read_file(files, path))
            pid, host, since = int(note["pid"]), str(note["host"]), int(note["time"])
            shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
            who = "this process" if (pid, host) == (os.getpid(), socket.gethostname()) else f"process {pid}"
            return f"{who} on {host:.80} since {shown}"
        except (StoreError, ValueError, KeyError, TypeError, OverflowError):
            time.sleep(0.01)
    return "another process"


def _is_file(fd: int, path: Path) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)
