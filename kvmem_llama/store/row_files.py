"""Rows of an index on disk: one file per lineage, row after row.

    header   64 bytes and the stamp as JSON, filled up to a multiple of 4096
    row i    of block `first` + i

What a row is and whether it can be trusted is the business of index_file.py and token_file.py. A file is
never the only place where something is known: any row can be made again from the block's record.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from kvmem_llama.errors import StoreFailed
from kvmem_llama.native.layout import U8

from .content import Span
from .files import Files
from .small_files import is_missing, remove_if_there

FORMAT: Final = 1

_HEADER: Final = struct.Struct("<8sIIIIqq16sQ")  # 64 bytes, the last field is the checksum of those before it
_SLICE: Final = 1 << 20  # bytes read at once: they are still in the cache when they are put into place
_STAMP_MOST: Final = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class RowFormat:
    """What the rows of a file are. Two files of one format have equal headers but for lineage and place."""

    magic: bytes  # [8]
    stamp: bytes  # JSON
    row_nbytes: int

    @classmethod
    def of(cls, magic: bytes, stamp: Mapping[str, Any], row_nbytes: int) -> RowFormat:
        return cls(magic, json.dumps(stamp, separators=(",", ":")).encode(), row_nbytes)

    @property
    def rows_at(self) -> int:
        """Bytes before the first row."""
        return -(-(_HEADER.size + len(self.stamp)) // 4096) * 4096

    def header(self, lineage: int, first: int) -> bytes:
        """[rows_at] bytes of the file of a lineage whose first own block is number `first`."""
        fixed = (self.magic, FORMAT, self.rows_at, self.row_nbytes, len(self.stamp), lineage, first)
        stamp = xxhash.xxh3_128_digest(self.stamp)
        bare = _HEADER.pack(*fixed, stamp, 0)
        whole = _HEADER.pack(*fixed, stamp, xxhash.xxh3_64_intdigest(bare + self.stamp))
        return (whole + self.stamp).ljust(self.rows_at, b"\0")


class RowFiles:
    """The files of one index of a family. Any thread."""

    def __init__(self, folder: Path, suffix: str, files: Files, *, synced: bool, point: str) -> None:
        """synced: a row is durable when `put` returns. point: name of the moments that Files.at is told."""
        self._folder: Final = folder
        self._suffix: Final = suffix
        self._files: Final = files
        self._synced: Final = synced
        self._point: Final = point

    def path(self, lineage: int) -> Path:
        return self._folder / f"{lineage}.{self._suffix}"

    def put(self, form: RowFormat, lineage: int, first: int, number: int, rows: U8) -> None:
        """Writes the rows of the blocks from `number` on.

        first: number of the lineage's first own block. rows: [n, bytes of a row].
        Raises StoreFull or StoreFailed.
        """
        if not len(rows):
            return
        self._files.at(f"{self._point}.before")
        fd, is_new = self._open(form, lineage, first)
        try:
            at = form.rows_at + (number - first) * form.row_nbytes
            self._files.write_from(fd, [rows.reshape(-1)], at)
            self._files.at(f"{self._point}.rows")
            if self._synced:
                self._files.fsync(fd)
        finally:
            self._files.close(fd)
        if is_new and self._synced:
            self._files.sync_dir(self._folder)
        self._files.at(f"{self._point}.after")

    def load(
        self,
        form: RowFormat,
        parts: Iterable[Span],
        n_blocks: int,
        is_right: Callable[[int, U8], bool],
        into: Callable[[int, U8], None] | None,
    ) -> list[int]:
        """Reads the rows of a history -> numbers of the blocks whose rows have to be made again.

        parts: of the history. is_right: of a block's number and its row. into: takes rows in ascending order,
        (first number, [n, bytes of a row]), wrong ones too, valid during the call; None: only check.
        """
        missing: list[int] = []
        for part in parts:
            low, high = part.blocks[0], min(part.blocks[1], n_blocks)
            if low < high:
                missing += self._load_file(form, part.lineage, low, high, is_right, into)
        return missing

    def row(self, form: RowFormat, lineage: int, first: int, number: int) -> U8 | None:
        """The row of one block as it lies in the file, unchecked; None if there is none."""
        fd = self._descriptor(lineage)
        if fd is None:
            return None
        try:
            row = np.empty(form.row_nbytes, np.uint8)
            n_read = self._files.read_into(fd, [row], form.rows_at + (number - first) * form.row_nbytes)
            return row if n_read == form.row_nbytes else None
        finally:
            self._files.close(fd)

    def form_of(self, lineage: int, magic: bytes) -> RowFormat | None:
        """What the file of a lineage holds, by its header; None: there is none, or its header is damaged."""
        fd = self._descriptor(lineage)
        if fd is None:
            return None
        try:
            n = self._files.length(fd)
            if n < _HEADER.size:
                return None
            fields = _HEADER.unpack(self._files.pread(fd, _HEADER.size, 0))
            n_stamp = fields[4]
            if fields[0] != magic or not 0 < n_stamp <= min(n - _HEADER.size, _STAMP_MOST):
                return None
            form = RowFormat(magic, self._files.pread(fd, n_stamp, _HEADER.size), fields[3])
            is_whole = form.row_nbytes > 0 and fields[5] == lineage
            return form if is_whole and self._has_header(fd, form.header(lineage, fields[6])) else None
        finally:
            self._files.close(fd)

    def cut(self, form: RowFormat, lineage: int, first: int, end: int) -> None:
        """Gives back the space of rows from block `end` on; a row that stays is harmless."""
        path = self.path(lineage)
        try:
            n = form.rows_at + max(end - first, 0) * form.row_nbytes
            if self._files.size(path) > n:
                fd = self._files.open(path, os.O_RDWR)
                try:
                    self._files.truncate(fd, n)
                finally:
                    self._files.close(fd)
        except StoreFailed as error:
            if not is_missing(error):
                raise

    def drop(self, lineage: int) -> None:
        remove_if_there(self._files, self.path(lineage))

    # -- private

    def _descriptor(self, lineage: int) -> int | None:
        """For reading; None if there is no file."""
        try:
            return self._files.open(self.path(lineage), os.O_RDONLY)
        except StoreFailed as error:
            if is_missing(error):
                return None
            raise

    def _open(self, form: RowFormat, lineage: int, first: int) -> tuple[int, bool]:
        """A descriptor for writing, of a file with the right header -> (it, whether the file is new)."""
        fd = self._files.open(self.path(lineage), os.O_RDWR | os.O_CREAT)
        try:
            header = form.header(lineage, first)
            if self._has_header(fd, header):
                return fd, False
            self._files.truncate(fd, 0)  # whatever it held, it was not such rows of this lineage
            self._files.pwrite(fd, header, 0)
        except BaseException:
            self._files.close(fd)
            raise
        return fd, True

    def _has_header(self, fd: int, header: bytes) -> bool:
        return self._files.length(fd) >= len(header) and self._files.pread(fd, len(header), 0) == header

    def _load_file(
        self,
        form: RowFormat,
        lineage: int,
        low: int,
        high: int,
        is_right: Callable[[int, U8], bool],
        into: Callable[[int, U8], None] | None,
    ) -> list[int]:
        fd = self._descriptor(lineage)
        if fd is None:
            return list(range(low, high))
        try:
            if not self._has_header(fd, form.header(lineage, low)):
                return list(range(low, high))
            missing = []
            n_slice = max(_SLICE // form.row_nbytes, 1)
            buffer = np.empty((min(n_slice, high - low), form.row_nbytes), np.uint8)
            for start in range(low, high, n_slice):
                rows = buffer[: min(n_slice, high - start)]
                at = form.rows_at + (start - low) * form.row_nbytes
                n_whole = self._files.read_into(fd, [rows.reshape(-1)], at) // form.row_nbytes
                missing += [
                    start + i for i, row in enumerate(rows) if i >= n_whole or not is_right(start + i, row)
                ]
                if into is not None:
                    into(start, rows)  # a wrong row is overwritten by whoever makes it again
            return missing
        finally:
            self._files.close(fd)
