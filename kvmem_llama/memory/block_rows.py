"""Rows of an index in RAM: one for each block, in chunks that never move and that forks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..native.layout import U8, RecordLayout

CHUNK_BLOCKS = 1024


class BlockRows(ABC):
    """Row b belongs to block b; rows are appended, replaced and truncated in step with the table of blocks.

    A row depends on the block's record alone, not on how it was evaluated, and is never changed by
    arithmetic on itself. Memory grows by chunks of `chunk_blocks` blocks that never move; how rows lie in one
    is the business of the subclass. A fork shares the chunks; the one that is written to is copied first.
    """

    def __init__(self, layout: RecordLayout, row_nbytes: int, dtype: type, chunk_blocks: int) -> None:
        """layout: of the records that blocks come in. row_nbytes: of one block.

        chunk_blocks: a power of two.
        """
        if chunk_blocks < 1 or chunk_blocks & (chunk_blocks - 1):
            raise ValueError(f"{chunk_blocks} blocks per chunk is not a power of two")
        self.chunk_shift = chunk_blocks.bit_length() - 1
        self.block_size = layout.block_size
        self.row_nbytes = row_nbytes
        self._record_nbytes = layout.nbytes
        self._dtype = np.dtype(dtype)
        self.chunks: list[NDArray[Any]] = []  # each flat, row_nbytes << chunk_shift bytes
        self._own: list[bool] = []  # per chunk: no other index reads it
        self._counts = array("i")  # tokens of each block

    def __len__(self) -> int:
        """Blocks."""
        return len(self._counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks, shared ones included."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def bytes_per_token(self) -> float:
        """Index bytes that one token of a full block costs."""
        return self.row_nbytes / self.block_size

    @property
    def counts(self) -> NDArray[np.int32]:
        """Tokens of each block, a copy: [n_blocks]; 0: the block has no row."""
        return np.array(self._counts, np.int32)

    def append(self, record: U8, count: int) -> None:
        """Adds the row of the first `count` tokens of a block's record."""
        self._check(record, count)
        number = len(self._counts)
        if number >> self.chunk_shift == len(self.chunks):
            n = (self.row_nbytes << self.chunk_shift) // self._dtype.itemsize
            self.chunks.append(np.empty(n, self._dtype))
            self._own.append(True)
        self._write(number, record, count)
        self._counts.append(count)

    def replace_last(self, record: U8, count: int) -> None:
        """Makes the newest row anew from a record that took its block's place."""
        self._check(record, count)
        if not self._counts:
            raise IndexError("the index is empty")
        self._write(len(self._counts) - 1, record, count)
        self._counts[-1] = count

    def replace(self, number: int, record: U8, count: int) -> None:
        """Makes any row anew, also one that is missing."""
        self._check(record, count)
        if not 0 <= number < len(self):
            raise IndexError(f"no row {number} among {len(self)}")
        self._write(number, record, count, n_rows=self._n_rows(number))
        self._counts[number] = count

    def take(self, other: Self, number: int) -> None:
        """Row `number` becomes that of another index of the same kind."""
        chunk, row = self._owned(number, self._n_rows(number))
        source = other.chunks[number >> self.chunk_shift]
        for first, n in self._spans():
            at = (first << self.chunk_shift) + row * n
            chunk[at : at + n] = source[at : at + n]
        self._counts[number] = other._counts[number]

    def restore(self, chunks: Sequence[NDArray[Any]], counts: NDArray[np.int32]) -> None:
        """An empty index takes over rows as they were stored. counts: tokens of each block, 0 for
        one whose row is missing."""
        if len(self):
            raise ValueError("the index is not empty")
        self.chunks = list(chunks)
        self._own = [True] * len(self.chunks)
        self._counts = array("i", counts.astype(np.int32).tobytes())

    def row(self, number: int) -> NDArray[Any]:
        """A copy of one row as it is stored: [elements of a row]."""
        chunk, at = self.chunks[number >> self.chunk_shift], number & ((1 << self.chunk_shift) - 1)
        parts = [chunk[(first << self.chunk_shift) + at * n :][:n] for first, n in self._spans()]
        return np.concatenate(parts)

    def truncate(self, n_blocks: int) -> None:
        """Keeps the first `n_blocks` rows; chunks that hold none of them are let go."""
        if not 0 <= n_blocks <= len(self):
            raise IndexError(f"{n_blocks} of {len(self)} blocks cannot be kept")
        del self._counts[n_blocks:]
        n_chunks = (n_blocks + (1 << self.chunk_shift) - 1) >> self.chunk_shift
        del self.chunks[n_chunks:]
        del self._own[n_chunks:]

    def fork(self) -> Self:
        """An index of its own with the same rows. Chunks are shared until one side writes to them."""
        other = copy(self)
        self._own = [False] * len(self.chunks)
        other._own = list(self._own)
        other.chunks = list(self.chunks)
        other._counts = self._counts[:]
        return other

    @abstractmethod
    def _put(self, record: U8, count: int, chunk: NDArray[Any], row: int) -> None:
        """Makes the row of a block in a chunk."""

    @abstractmethod
    def _spans(self) -> list[tuple[int, int]]:
        """What lies side by side for all rows of a chunk: (first element, elements of one row) of each, for
        chunks of one block."""

    def _check(self, record: U8, count: int) -> None:
        if not 0 < count <= self.block_size:
            raise ValueError(f"a block of {count} tokens, the block size is {self.block_size}")
        if record.dtype != np.uint8 or record.shape != (self._record_nbytes,):
            raise ValueError(f"a record of {record.nbytes} bytes, the layout has {self._record_nbytes}")

    def _write(self, number: int, record: U8, count: int, n_rows: int | None = None) -> None:
        """n_rows: see _owned."""
        self._put(record, count, *self._owned(number, n_rows))

    def _owned(self, number: int, n_rows: int | None = None) -> tuple[NDArray[Any], int]:
        """The chunk of a row that no other index reads, and the row in it. n_rows: of the chunk, that are to
        stay if it has to be copied; None: those before this one."""
        chunk, row = number >> self.chunk_shift, number & ((1 << self.chunk_shift) - 1)
        if not self._own[chunk]:
            self.chunks[chunk] = self._copy(self.chunks[chunk], row if n_rows is None else n_rows)
            self._own[chunk] = True
        return self.chunks[chunk], row

    def _n_rows(self, number: int) -> int:
        """Rows in the chunk of this one."""
        return min(len(self) - (number >> self.chunk_shift << self.chunk_shift), 1 << self.chunk_shift)

    def _copy(self, chunk: NDArray[Any], n_rows: int) -> NDArray[Any]:
        """A chunk with the same first `n_rows` rows; memory of the others is not touched."""
        out = np.empty_like(chunk)
        for first, n in self._spans():
            start = first << self.chunk_shift
            out[start : start + n * n_rows] = chunk[start : start + n * n_rows]
        return out
