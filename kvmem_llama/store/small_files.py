"""Small files that are read and written whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvmem_llama.errors import StoreFailed

from .files import Files, errno_of


def read_file(files: Files, path: Path) -> bytes:
    """Raises StoreFailed."""
    fd = files.open(path, os.O_RDONLY)
    try:
        return files.pread(fd, files.length(fd), 0)
    finally:
        files.close(fd)


def replace_file(files: Files, path: Path, data: bytes, *, sync: bool = True) -> None:
    """Makes `data` the content of the file: at every moment it is the old one or the new one, whole.

    sync: and it is durable on return. Raises StoreFull or StoreFailed.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = files.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        files.pwrite(fd, data, 0)
        if sync:
            files.fsync(fd)
    finally:
        files.close(fd)
    files.rename(fresh, path)
    if sync:
        files.sync_dir(path.parent)


def remove_if_there(files: Files, path: Path) -> bool:
    """-> whether there was a file at `path`. Raises StoreFailed."""
    try:
        files.unlink(path)
    except StoreFailed as error:
        if is_missing(error):
            return False
        raise
    return True


def is_missing(error: StoreFailed) -> bool:
    """Whether the reason is that there is no such file or folder."""
    return errno_of(error) in (errno.ENOENT, errno.ENOTDIR)
