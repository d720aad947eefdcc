"""The token index on disk: raw K of every token of a few KV heads, quantized.

A row is what memory.token_index keeps of a block, [KV head][token][bytes], zeros for the tokens it lacks, and
then what it was made of: tokens of the block, checksum of its Mean-K, and a checksum over all of this. Mean-K
and token row are made of the same raw K, so a row is worth reading if it names the tokens and the Mean-K that
the catalog has of the block, wherever the block's record lies and whether or not there still is one.

The stamp names the heads: other heads begin a file anew. Nothing waits for these files to be on disk. A row
that a power cut took is made again from the block's record; if that is gone, the block has no row.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from kvmem_llama.native.layout import U8

from .content import Span
from .files import Files
from .row_chunks import RowChunks
from .row_files import RowFiles, RowFormat
from .rows import BlockRow

MAGIC: Final = b"KVMEMTK1"

_PAGE: Final = 4096  # bytes that reach a disk, or do not, together
_BITS: Final = 8  # of what a row was made of, that may have changed in a damaged one

_TRAILER: Final = struct.Struct("<I16s16s")  # tokens, checksum of Mean-K, checksum of the row up to here


@dataclass(frozen=True, slots=True)
class TokenShape:
    """What a row consists of."""

    block_size: int  # tokens
    index_type: str  # q4_0 | q8_0
    heads: tuple[tuple[int, int, int], ...]  # (layer number in the model, KV head, head size)
    widths: tuple[int, ...]  # bytes of one block, by head

    @property
    def row_nbytes(self) -> int:
        return sum(self.widths)


@dataclass(frozen=True, slots=True)
class TokenSource:
    """What makes rows of a token index."""

    shape: TokenShape
    row_of: Callable[[U8, int], U8]
    """(record, count) -> its first `count` tokens, [shape.row_nbytes]."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """What the files of a history hold, by what is written in them."""

    index_type: str
    heads: tuple[tuple[int, int, int], ...]  # as in TokenShape
    n_rows: int  # that fit their blocks
    n_missing: int  # blocks without one


class TokenChunks(RowChunks):
    """Rows as the scorer reads them: [KV head][block of a chunk][token][bytes]."""

    def __init__(self, shape: TokenShape, n_blocks: int, chunk_blocks: int) -> None:
        ends = np.cumsum(shape.widths).tolist()
        columns = [(end - width, 1, width) for end, width in zip(ends, shape.widths, strict=True)]
        super().__init__(columns, np.uint8, n_blocks, chunk_blocks)


class TokenFiles:
    """The token index of one family, one file per lineage. What is raised: StoreFull or StoreFailed."""

    def __init__(self, folder: Path, family: str, layout: str, files: Files) -> None:
        """layout: hash of the record layout."""
        self._family: Final = family
        self._layout: Final = layout
        self._rows: Final = RowFiles(folder, "tk", files, synced=False, point="token_append")

    def path(self, lineage: int) -> Path:
        return self._rows.path(lineage)

    def put(
        self,
        shape: TokenShape,
        lineage: int,
        first: int,
        number: int,
        rows: U8,
        blocks: Sequence[tuple[int, bytes]],
    ) -> None:
        """Writes the rows of the blocks from `number` on.

        first: number of the lineage's first own block. rows: [n, bytes of a row]. blocks: (tokens, checksum
        of Mean-K) of each.
        """
        whole = np.empty((len(rows), shape.row_nbytes + _TRAILER.size), np.uint8)
        whole[:, : shape.row_nbytes] = rows
        for row, (count, mean) in zip(whole, blocks, strict=True):
            _stamp(row, count, mean)
        self._rows.put(self._form(shape), lineage, first, number, whole)

    def holds_others(self, shape: TokenShape, lineage: int) -> bool:
        """The file of a lineage holds rows of other heads or of another type."""
        form = self._rows.form_of(lineage, MAGIC)
        return form is not None and form != self._form(shape)

    def load(
        self, shape: TokenShape, parts: Iterable[Span], blocks: Sequence[BlockRow], into: RowChunks
    ) -> list[int]:
        """Reads the rows of a history -> numbers of the blocks whose rows have to be made again. See
        IndexFiles.load."""
        return self._rows.load(self._form(shape), parts, len(blocks), _fits(blocks), into.put)

    def copy(self, shape: TokenShape, old: tuple[int, int], new: tuple[int, int], number: int) -> None:
        """The row of a block that was copied to another lineage. old, new: (lineage, number of its first own
        block). What the row is worth is found out when it is loaded."""
        row = self._rows.row(self._form(shape), *old, number)
        if row is not None:
            self._rows.put(self._form(shape), *new, number, row[np.newaxis])

    def describe(self, parts: Sequence[Span], blocks: Sequence[BlockRow]) -> TokenFile | None:
        """What is there of a history; None if its newest lineage that has blocks has no such file."""
        lineages = [part.lineage for part in parts if part.blocks[0] < min(part.blocks[1], len(blocks))]
        form = self._rows.form_of(lineages[-1], MAGIC) if lineages else None
        if form is None:
            return None
        stamp: dict[str, Any] = json.loads(form.stamp)
        missing = self._rows.load(form, parts, len(blocks), _fits(blocks), None)
        heads = tuple((int(il), int(head), int(d)) for il, head, d in stamp["heads"])
        return TokenFile(str(stamp["type"]), heads, len(blocks) - len(missing), len(missing))

    def check(self, parts: Sequence[Span], blocks: Sequence[BlockRow]) -> list[int]:
        """Numbers of the blocks whose rows are damaged. A row that was never written, or only in part because
        the power failed, or is that of another block which was at its place, is not: it is only missing."""
        damaged: list[int] = []
        for part in parts:
            form = self._rows.form_of(part.lineage, MAGIC)
            if form is None:
                continue
            is_whole = _was_whole(form, part.blocks[0], blocks)

            def is_sound(number: int, row: U8, is_whole: Callable[[int, U8], bool] = is_whole) -> bool:
                if _checksum(row) != row[-16:].tobytes() and is_whole(number, row):
                    damaged.append(number)
                return True

            self._rows.load(form, [part], len(blocks), is_sound, None)
        return damaged

    def restamp(self, first: int, block: BlockRow, mean_xxh: bytes) -> None:
        """The Mean-K of a block was made anew, of other keys of the same tokens. Its row stays, of whatever
        heads it is: what finds the block must not depend on which file was damaged.

        first: as in `put`. block: as it was before; mean_xxh: [16], its Mean-K now."""
        form = self._rows.form_of(block.lineage, MAGIC)
        row = None if form is None else self._rows.row(form, block.lineage, first, block.number)
        if form is not None and row is not None and _is_of(row, block):
            _stamp(row, block.count, mean_xxh)
            self._rows.put(form, block.lineage, first, block.number, row[np.newaxis])

    def erase(self, lineage: int, first: int, number: int) -> None:
        """Makes the row of a block one that was never written. first: as in `put`."""
        form = self._rows.form_of(lineage, MAGIC)
        if form is not None:
            self._rows.put(form, lineage, first, number, np.zeros((1, form.row_nbytes), np.uint8))

    def cut(self, lineage: int, first: int, end: int) -> None:
        """Gives back the space of rows from block `end` on, whatever heads they are of."""
        form = self._rows.form_of(lineage, MAGIC)
        if form is not None:
            self._rows.cut(form, lineage, first, end)

    def drop(self, lineage: int) -> None:
        self._rows.drop(lineage)

    def nbytes(self, shape: TokenShape, n_blocks: int) -> int:
        """Length of a file with so many rows."""
        return self._form(shape).rows_at + n_blocks * self._form(shape).row_nbytes

    # -- private

    def _form(self, shape: TokenShape) -> RowFormat:
        stamp = {
            "family": self._family,
            "layout": self._layout,
            "block_size": shape.block_size,
            "type": shape.index_type,
            "heads": [list(head) for head in shape.heads],
        }
        return RowFormat.of(MAGIC, stamp, shape.row_nbytes + _TRAILER.size)


def _checksum(row: U8) -> bytes:
    return xxhash.xxh3_128_digest(row[:-16].data)


def _stamp(row: U8, count: int, mean: bytes) -> None:
    """Writes down what a row was made of."""
    _TRAILER.pack_into(row.data, len(row) - _TRAILER.size, count, mean, bytes(16))
    row[-16:] = np.frombuffer(_checksum(row), np.uint8)


def _is_of(row: U8, block: BlockRow) -> bool:
    """A row is whole, and that of the block."""
    count, mean, check = _TRAILER.unpack_from(row.data, len(row) - _TRAILER.size)
    return (count, mean) == (block.count, block.mean_xxh) and check == _checksum(row)


def _fits(blocks: Sequence[BlockRow]) -> Callable[[int, U8], bool]:
    """Whether a row is that of the block with its number."""
    return lambda number, row: _is_of(row, blocks[number])


def _was_whole(form: RowFormat, first: int, blocks: Sequence[BlockRow]) -> Callable[[int, U8], bool]:
    """Whether a row with a wrong checksum was once that of its block, and some bits of it have changed since.

    The files are not synced. After a power cut a page is as it was written or as it was before: bytes that no
    row had yet are zeros, and so are those of tokens that a partial block lacked. first: as in `put`.
    """
    heads = _token_nbytes(form)

    def was_whole(number: int, row: U8) -> bool:
        count, mean, _ = _TRAILER.unpack_from(row.data, len(row) - _TRAILER.size)
        named = _TRAILER.pack(count, mean, b"")
        known = _TRAILER.pack(blocks[number].count, blocks[number].mean_xxh, b"")
        if (int.from_bytes(named) ^ int.from_bytes(known)).bit_count() > _BITS:
            return False  # it names another block, or none
        at = form.rows_at + (number - first) * len(row)
        edges = range(_PAGE - at % _PAGE, len(row), _PAGE)
        if not all(part.any() for part in np.split(row, edges)):
            return False
        keys = (row[start:][: n * blocks[number].count].reshape(-1, n) for start, n in heads)
        return all(key.any(axis=1).all() for key in keys)

    return was_whole


def _token_nbytes(form: RowFormat) -> list[tuple[int, int]]:
    """By head: bytes of a row before its tokens, and bytes of one token."""
    stamp: dict[str, Any] = json.loads(form.stamp)
    n_values = sum(int(d) for _, _, d in stamp["heads"])
    n_bytes = (form.row_nbytes - _TRAILER.size) // int(stamp["block_size"])
    out, at = [], 0
    for _, _, d in stamp["heads"]:
        n = n_bytes * int(d) // n_values
        out.append((at, n))
        at += n * int(stamp["block_size"])
    return out
