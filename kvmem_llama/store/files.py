"""Every call the store makes to the operating system, in two layers.

`System` holds the raw calls, which raise OSError: the seam where tests make any of them fail or come short.
`Files` is what the store uses: whole transfers, and errors that say which path and what to do.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.errors import StoreFailed, StoreFull

from .system import IOV_MAX, System

Buffer: TypeAlias = NDArray[np.uint8]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class Files:
    """File operations that raise StoreFull or StoreFailed, with the OSError as their cause."""

    def __init__(self, system: System | None = None) -> None:
        self._system: Final = system or System()
        self._paths: dict[int, Path] = {}  # of open descriptors, for messages

    def at(self, point: str) -> None:
        """A named point of the store's work was reached. Tests end the process there."""

    # -- descriptors

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """A descriptor; `mode` is for a file that is created."""
        with self._errors(path):
            fd = self._system.open(path, flags | os.O_CLOEXEC, mode)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        path = self._paths.pop(fd, Path("?"))
        with self._errors(path):
            self._system.close(fd)

    def path_of(self, fd: int) -> Path:
        """The path a descriptor was opened with."""
        return self._paths.get(fd, Path("?"))

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        """Tries to lock the file -> whether it is locked. The lock ends with the descriptor."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with self._errors(self.path_of(fd)):
            try:
                self._system.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    # -- data

    def read_into(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fills the buffers in turn, as far as the file goes -> bytes read."""
        n_read = 0
        left = [b for b in buffers if b.nbytes]
        with self._errors(self.path_of(fd)):
            while left:
                n = self._system.preadv(fd, left[:IOV_MAX], offset + n_read)
                if n == 0:
                    break
                n_read += n
                left = _after(left, n)
        return n_read

    def write_from(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Writes the buffers one after the other."""
        left = [b for b in buffers if b.nbytes]
        with self._errors(self.path_of(fd), sum(b.nbytes for b in left)):
            while left:
                n = self._system.pwritev(fd, left[:IOV_MAX], offset)
                if n == 0:
                    raise OSError(errno.EIO, "nothing could be written")
                offset += n
                left = _after(left, n)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Exactly `nbytes` bytes. Raises StoreFailed if the file ends before."""
        buffer = np.empty(nbytes, np.uint8)
        n = self.read_into(fd, [buffer], offset)
        if n < nbytes:
            raise StoreFailed(self.path_of(fd), f"the file ends {nbytes - n} bytes early")
        return buffer.tobytes()

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        """All of `data`."""
        self.write_from(fd, [np.frombuffer(data, np.uint8)], offset)

    def fsync(self, fd: int) -> None:
        """Returns when the data, and what is needed to find it again, is on the device."""
        with self._errors(self.path_of(fd)):
            self._system.fsync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Sets the length of the file; what is added reads as zeros."""
        with self._errors(self.path_of(fd), nbytes):
            self._system.ftruncate(fd, nbytes)

    def erase(self, fd: int, offset: int, nbytes: int) -> None:
        """Makes a range read as zeros; gives its space back where the file system can."""
        with self._errors(self.path_of(fd), nbytes):
            is_punched = self._system.punch(fd, offset, nbytes)
        if not is_punched:
            self.write_from(fd, [np.zeros(nbytes, np.uint8)], offset)

    def no_read_ahead(self, fd: int) -> None:
        """What is read is all that is wanted: around a scattered block the kernel would read megabytes."""
        with self._errors(self.path_of(fd)):
            self._system.no_read_ahead(fd)

    # -- names

    def sync_dir(self, path: Path) -> None:
        """Makes names that were created, renamed or removed in a folder durable."""
        with self._errors(path):
            fd = self._system.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
            try:
                self._system.fsync(fd)
            finally:
                self._system.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Replaces `new`."""
        with self._errors(new):
            self._system.rename(old, new)

    def unlink(self, path: Path) -> None:
        with self._errors(path):
            self._system.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Makes a folder with mode 0700 unless it is there."""
        with self._errors(path):
            try:
                self._system.mkdir(path, 0o700)
            except FileExistsError:
                if not path.is_dir():
                    raise

    def rmdir(self, path: Path) -> None:
        """Removes an empty folder."""
        with self._errors(path):
            self._system.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        """The names in a folder, sorted."""
        with self._errors(path):
            return sorted(self._system.listdir(path))

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def size(self, path: Path) -> int:
        """Length of a file in bytes."""
        with self._errors(path):
            return self._system.stat(path).st_size

    def length(self, fd: int) -> int:
        """Length of an open file in bytes."""
        with self._errors(self.path_of(fd)):
            return self._system.stat(fd).st_size

    def free_bytes(self, folder: Path) -> int:
        """Bytes an ordinary user may still write to the file system of `folder`."""
        with self._errors(folder):
            return self._system.free_bytes(folder)

    # -- private

    @contextmanager
    def _errors(self, path: Path, needed: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFull(path, needed, self._free_near(path)) from error
            raise StoreFailed(path, error.strerror or str(error)) from error
        except ValueError as error:  # a NUL in a path
            raise StoreFailed(path, str(error)) from error

    def _free_near(self, path: Path) -> int:
        try:
            return self._system.free_bytes(path.parent)
        except OSError:
            return -1


def errno_of(error: StoreFailed | StoreFull) -> int:
    """The errno that an error of Files came from; 0 if there was none."""
    cause = error.__cause__
    return (cause.errno or 0) if isinstance(cause, OSError) else 0


def _after(buffers: list[Buffer], n: int) -> list[Buffer]:
    """What is left of the buffers after their first `n` bytes."""
    for i, buffer in enumerate(buffers):
        if n < buffer.nbytes:
            return [buffer[n:], *buffers[i + 1 :]]
        n -= buffer.nbytes
    return []


_current = Files()


def current() -> Files:
    """What is used where no Files was passed."""
    return _current


def install(files: Files) -> Files:
    """Makes `files` the current ones of this process -> those that were. For test drivers."""
    global _current
    previous, _current = _current, files
    return previous
