"""A few bytes beside the catalog that say how far it was acknowledged.

SQLite drops, without a word, the end of a write-ahead log in which a bit has flipped. This number tells: if
the catalog has fewer commits of a workspace than were acknowledged, some of them are lost.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

import xxhash

from kvmem_llama.errors import StoreFailed

from .files import Files
from .small_files import is_missing, read_file, remove_if_there

_HEAD: Final = struct.Struct("<8sQQ")
_MAGIC: Final = b"KVMEMHD1"


class Head:
    """The number of commits of one workspace that were acknowledged. Written after each, in place, and not
    synced: after a power cut it may be too low, never too high."""

    def __init__(self, files: Files, locks: Path, workspace: str) -> None:
        self._files: Final = files
        self._path: Final = locks / f"{workspace}.head"

    def read(self) -> int:
        """0 if there is none, or none that can be believed. Raises StoreFailed."""
        try:
            data = read_file(self._files, self._path)
        except StoreFailed as error:
            if is_missing(error):
                return 0
            raise
        if len(data) != _HEAD.size:
            return 0
        magic, commits, digest = _HEAD.unpack(data)
        if magic != _MAGIC or digest != xxhash.xxh3_64_intdigest(data[:16]):
            return 0
        return int(commits)

    def write(self, commits: int) -> None:
        """Raises StoreFull or StoreFailed."""
        bare = _HEAD.pack(_MAGIC, commits, 0)[:16]
        fd = self._files.open(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            self._files.pwrite(fd, bare + struct.pack("<Q", xxhash.xxh3_64_intdigest(bare)), 0)
        finally:
            self._files.close(fd)

    def remove(self) -> None:
        remove_if_there(self._files, self._path)
