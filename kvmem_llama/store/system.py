"""The operating system's file calls, one method each. They raise OSError and may come short."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

IOV_MAX: Final = min(os.sysconf("SC_IOV_MAX"), 1024)  # most buffers of one vectored call

_NOT_HERE: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV})
_PUNCH_HOLE: Final = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h


class System:
    """The real calls. A subclass may fail any of them."""

    def open(self, path: Path, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def preadv(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        return os.preadv(fd, [b.data for b in buffers], offset)

    def pwritev(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        return os.pwritev(fd, [b.data for b in buffers], offset)

    def fsync(self, fd: int) -> None:
        full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync stops at the drive's own cache
        if full is not None:
            fcntl.fcntl(fd, full)
        else:
            os.fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> bool:
        """Gives the blocks of a range back to the file system -> whether it can do that."""
        try:
            ffi, libc = _libc()
            rc = libc.fallocate(fd, _PUNCH_HOLE, offset, nbytes)
        except AttributeError:  # not Linux
            return False
        if rc == 0:
            return True
        if ffi.errno in _NOT_HERE:
            return False
        raise OSError(ffi.errno, os.strerror(ffi.errno))

    def no_read_ahead(self, fd: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def mkdir(self, path: Path, mode: int) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def stat(self, path: Path | int) -> os.stat_result:
        return os.stat(path)

    def free_bytes(self, folder: Path) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


@cache
def _libc() -> tuple[Any, Any]:
    """cffi's FFI and the C library; few runs give space back, so that few parse this."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef("int fallocate(int fd, int mode, int64_t offset, int64_t len);")
    return ffi, ffi.dlopen(None)
