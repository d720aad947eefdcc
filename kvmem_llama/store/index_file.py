"""The Mean-K index on disk.

A row is the Mean-K of a block: [all KV heads of all full-attention layers][d] float16. It is worth reading if
its checksum is the one that the block's row in the catalog has; any other row is made again from the block's
record. So it does not matter what a crash, a flipped bit or an older program left in the file: the catalog is
the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvmem_llama.native.layout import U8

from .content import Span
from .files import Files
from .row_chunks import RowChunks
from .row_files import RowFiles, RowFormat
from .rows import BlockRow

F16 = NDArray[np.float16]

MAGIC: Final = b"KVMEMMK1"

NO_ROW: Final = bytes(16)
"""Checksum of a row that is known to be lost: it is made again when the workspace is opened."""


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


class IndexChunks(RowChunks):
    """Means as the scorer reads them: [layer][KV head][block of a chunk][d]."""

    def __init__(
        self, shape: IndexShape, scored: Sequence[int] | None, n_blocks: int, chunk_blocks: int
    ) -> None:
        """scored: numbers of the layers to keep; None: all."""
        columns, column = [], 0
        for layer in shape.layers:
            if scored is None or layer.il in scored:
                columns.append((column, layer.n_head_kv, layer.d))
            column += layer.n_head_kv * layer.d
        super().__init__(columns, np.float16, n_blocks, chunk_blocks)


class IndexFiles:
    """The Mean-K files of one family. What is raised: StoreFull or StoreFailed."""

    def __init__(
        self, folder: Path, family: str, shape: IndexShape, files: Files, *, durable: bool = True
    ) -> None:
        self._shape: Final = shape
        stamp = {
            "family": family,
            "layout": shape.layout,
            "block_size": shape.block_size,
            "layers": [[layer.il, layer.n_head_kv, layer.d] for layer in shape.layers],
        }
        self._form: Final = RowFormat.of(MAGIC, stamp, shape.row_nbytes)
        self._rows: Final = RowFiles(folder, "mk", files, synced=durable, point="index_append")

    def path(self, lineage: int) -> Path:
        return self._rows.path(lineage)

    def put(self, lineage: int, first: int, number: int, rows: F16) -> None:
        """Writes the rows of the blocks from `number` on; durable on return.

        first: number of the lineage's first own block. rows: [n, elements of a row].
        """
        data = np.ascontiguousarray(rows, "<f2").view(np.uint8).reshape(-1, self._shape.row_nbytes)
        self._rows.put(self._form, lineage, first, number, data)

    def load(self, parts: Iterable[Span], blocks: Sequence[BlockRow], into: RowSink | None) -> list[int]:
        """Reads the rows of a history -> numbers of the blocks whose rows have to be made again.

        parts: of the history. blocks: all of them, with the checksums of their rows. into: None: only check.
        """

        def is_right(number: int, row: U8) -> bool:
            return xxhash.xxh3_128_digest(row.data) == blocks[number].mean_xxh

        def put(first: int, rows: U8) -> None:
            if into is not None:
                into.put(first, rows.view("<f2"))

        return self._rows.load(self._form, parts, len(blocks), is_right, put)

    def row(self, lineage: int, first: int, number: int) -> F16 | None:
        """The row of one block as it lies in the file, unchecked; None if there is none."""
        row = self._rows.row(self._form, lineage, first, number)
        return None if row is None else row.view("<f2")

    def cut(self, lineage: int, first: int, end: int) -> None:
        """Gives back the space of rows from block `end` on; a row that stays is harmless."""
        self._rows.cut(self._form, lineage, first, end)

    def drop(self, lineage: int) -> None:
        self._rows.drop(lineage)

    def nbytes(self, n_blocks: int) -> int:
        """Length of a file with so many rows."""
        return self._form.rows_at + n_blocks * self._shape.row_nbytes
