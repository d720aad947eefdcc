"""The Mean-K index on disk: one file per lineage, row after row.

    header   64 bytes and the stamp as JSON, filled up to a multiple of 4096
    row i    Mean-K of block `first` + i: [all KV heads of all full-attention layers][d] float16

A row is worth reading if its checksum is the one that the block's row in the catalog has; any other row is
made again from the block's record. So it does not matter what a crash, a flipped bit or an older program left
in the file: the catalog is the truth.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvmem_llama.errors import StoreFailed

from .content import Span
from .files import Files
from .rows import BlockRow
from .small_files import is_missing, remove_if_there

F16 = NDArray[np.float16]

FORMAT: Final = 1
MAGIC: Final = b"KVMEMMK1"

_HEADER: Final = struct.Struct("<8sIIIIqq16sQ")  # 64 bytes, the last field is the checksum of those before it
_SLICE: Final = 1 << 20  # bytes read at once: they are still in the cache when they are put into place


@dataclass(frozen=True, slots=True)
class IndexedLayer:
    il: int  # layer number in the model
    n_head_kv: int
    d: int


@dataclass(frozen=True, slots=True)
class IndexShape:
    """What a row consists of."""

    layout: str  # hash of the record layout
    block_size: int  # tokens
    layers: tuple[IndexedLayer, ...]

    @property
    def n_elements(self) -> int:
        return sum(layer.n_head_kv * layer.d for layer in self.layers)

    @property
    def row_nbytes(self) -> int:
        return 2 * self.n_elements


def mean_xxh(row: F16) -> bytes:
    """[16] bytes: what the catalog keeps of a row."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(row, "<f2").data)


class RowSink(Protocol):
    """What takes rows of the index, in ascending order."""

    def put(self, first: int, rows: F16) -> None:
        """Rows of the blocks from number `first` on: [n, elements of a row]; valid during the call."""
        ...


class IndexChunks:
    """Means as the scorer reads them: chunks of a power of two of blocks, [layer][KV head][block][d]."""

    def __init__(
        self, shape: IndexShape, scored: Sequence[int] | None, n_blocks: int, chunk_blocks: int
    ) -> None:
        """scored: numbers of the layers to keep; None: all."""
        self.chunk_blocks: Final = chunk_blocks
        self._columns: Final = []  # (first column in a row, offset in a chunk, KV heads, d)
        column = offset = 0
        for layer in shape.layers:
            n = layer.n_head_kv * layer.d
            if scored is None or layer.il in scored:
                self._columns.append((column, offset * chunk_blocks, layer.n_head_kv, layer.d))
                offset += n
            column += n
        n_chunks = -(-n_blocks // chunk_blocks)
        self.chunks: Final[list[F16]] = [np.empty(offset * chunk_blocks, np.float16) for _ in range(n_chunks)]

    def put(self, first: int, rows: F16) -> None:
        """Rows of the blocks from number `first` on: [n, elements of a row]."""
        done = 0
        while done < len(rows):
            number, at = divmod(first + done, self.chunk_blocks)
            n = min(self.chunk_blocks - at, len(rows) - done)
            for column, offset, n_head, d in self._columns:
                into = self.chunks[number][offset : offset + n_head * self.chunk_blocks * d]
                rows_here = rows[done : done + n, column : column + n_head * d].reshape(n, n_head, d)
                into.reshape(n_head, self.chunk_blocks, d)[:, at : at + n] = rows_here.transpose(1, 0, 2)
            done += n


class IndexFiles:
    """The index files of one family."""

    def __init__(
        self, folder: Path, family: str, shape: IndexShape, files: Files, *, durable: bool = True
    ) -> None:
        self._folder: Final = folder
        self._shape: Final = shape
        self._files: Final = files
        self._durable: Final = durable
        stamp = {
            "family": family,
            "layout": shape.layout,
            "block_size": shape.block_size,
            "layers": [[layer.il, layer.n_head_kv, layer.d] for layer in shape.layers],
        }
        self._stamp: Final = json.dumps(stamp, separators=(",", ":")).encode()
        self._rows_at: Final = -(-(_HEADER.size + len(self._stamp)) // 4096) * 4096

    def path(self, lineage: int) -> Path:
        return self._folder / f"{lineage}.mk"

    def put(self, lineage: int, first: int, number: int, rows: F16) -> None:
        """Writes the rows of the blocks from `number` on; durable on return.

        first: number of the lineage's first own block. rows: [n, elements of a row].
        Raises StoreFull or StoreFailed.
        """
        if not len(rows):
            return
        self._files.at("index_append.before")
        fd, is_new = self._open(lineage, first)
        try:
            data = np.ascontiguousarray(rows, "<f2").view(np.uint8).reshape(-1)
            at = self._rows_at + (number - first) * self._shape.row_nbytes
            self._files.write_from(fd, [data], at)
            self._files.at("index_append.rows")
            if self._durable:
                self._files.fsync(fd)
        finally:
            self._files.close(fd)
        if is_new and self._durable:
            self._files.sync_dir(self._folder)
        self._files.at("index_append.after")

    def load(self, parts: Iterable[Span], blocks: Sequence[BlockRow], into: RowSink | None) -> list[int]:
        """Reads the rows of a history -> numbers of the blocks whose rows have to be made again.

        parts: of the history. blocks: all of them, with the checksums of their rows. into: None: only check.
        """
        missing: list[int] = []
        for part in parts:
            low, high = part.blocks[0], min(part.blocks[1], len(blocks))
            if low < high:
                missing += self._load_file(part.lineage, low, high, blocks, into)
        return missing

    def row(self, lineage: int, first: int, number: int) -> F16 | None:
        """The row of one block as it lies in the file, unchecked; None if there is none."""
        try:
            fd = self._files.open(self.path(lineage), os.O_RDONLY)
        except StoreFailed as error:
            if is_missing(error):
                return None
            raise
        try:
            row = np.empty(self._shape.n_elements, "<f2")
            at = self._rows_at + (number - first) * self._shape.row_nbytes
            n_read = self._files.read_into(fd, [row.view(np.uint8)], at)
            return row if n_read == self._shape.row_nbytes else None
        finally:
            self._files.close(fd)

    def cut(self, lineage: int, first: int, end: int) -> None:
        """Gives back the space of rows from block `end` on; a row that stays is harmless."""
        path = self.path(lineage)
        try:
            n = self._rows_at + max(end - first, 0) * self._shape.row_nbytes
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

    def nbytes(self, n_blocks: int) -> int:
        """Length of a file with so many rows."""
        return self._rows_at + n_blocks * self._shape.row_nbytes

    # -- private

    def _header(self, lineage: int, first: int) -> bytes:
        fixed = (MAGIC, FORMAT, self._rows_at, self._shape.row_nbytes, len(self._stamp), lineage, first)
        stamp = xxhash.xxh3_128_digest(self._stamp)
        bare = _HEADER.pack(*fixed, stamp, 0)
        whole = _HEADER.pack(*fixed, stamp, xxhash.xxh3_64_intdigest(bare + self._stamp))
        return (whole + self._stamp).ljust(self._rows_at, b"\0")

    def _open(self, lineage: int, first: int) -> tuple[int, bool]:
        """A descriptor for writing, of a file with the right header -> (it, whether the file is new)."""
        path = self.path(lineage)
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            header = self._header(lineage, first)
            if self._has_header(fd, header):
                return fd, False
            self._files.truncate(fd, 0)  # whatever it held, it was not rows of this lineage
            self._files.pwrite(fd, header, 0)
        except BaseException:
            self._files.close(fd)
            raise
        return fd, True

    def _has_header(self, fd: int, header: bytes) -> bool:
        return self._files.length(fd) >= len(header) and self._files.pread(fd, len(header), 0) == header

    def _load_file(
        self, lineage: int, low: int, high: int, blocks: Sequence[BlockRow], into: RowSink | None
    ) -> list[int]:
        everything = list(range(low, high))
        try:
            fd = self._files.open(self.path(lineage), os.O_RDONLY)
        except StoreFailed as error:
            if is_missing(error):
                return everything
            raise
        try:
            if not self._has_header(fd, self._header(lineage, low)):
                return everything
            missing = []
            n_slice = max(_SLICE // self._shape.row_nbytes, 1)
            buffer = np.empty((min(n_slice, high - low), self._shape.n_elements), "<f2")
            for start in range(low, high, n_slice):
                n = min(n_slice, high - start)
                view = buffer[:n]
                at = self._rows_at + (start - low) * self._shape.row_nbytes
                n_read = self._files.read_into(fd, [view.view(np.uint8).reshape(-1)], at)
                n_whole = n_read // self._shape.row_nbytes
                good = [
                    i < n_whole and xxhash.xxh3_128_digest(view[i].data) == blocks[start + i].mean_xxh
                    for i in range(n)
                ]
                if into is not None:
                    into.put(start, view)  # a wrong row is overwritten by whoever makes it again
                missing += [start + i for i in range(n) if not good[i]]
            return missing
        finally:
            self._files.close(fd)
