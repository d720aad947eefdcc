"""Rows of an index on their way from a file to where a scorer reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class RowChunks:
    """Chunks of a power of two of blocks, [column][block][elements], as memory.block_rows keeps them."""

    def __init__(
        self, columns: Iterable[tuple[int, int, int]], dtype: type, n_blocks: int, chunk_blocks: int
    ) -> None:
        """columns: (first element in a row, how many that lie side by side in a chunk, elements of each)."""
        self.chunk_blocks: Final = chunk_blocks
        self._columns: Final = []  # (first element in a row, offset in a chunk, number, elements of each)
        offset = 0
        for first, n, width in columns:
            self._columns.append((first, offset * chunk_blocks, n, width))
            offset += n * width
        self.chunks: Final[list[NDArray[Any]]] = [
            np.empty(offset * chunk_blocks, dtype) for _ in range(-(-n_blocks // chunk_blocks))
        ]

    def put(self, first: int, rows: NDArray[Any]) -> None:
        """Rows of the blocks from number `first` on: [n, elements of a row], or more than the columns."""
        done = 0
        while done < len(rows):
            number, at = divmod(first + done, self.chunk_blocks)
            n = min(self.chunk_blocks - at, len(rows) - done)
            for column, offset, n_side, width in self._columns:
                into = self.chunks[number][offset : offset + n_side * self.chunk_blocks * width]
                here = rows[done : done + n, column : column + n_side * width].reshape(n, n_side, width)
                into.reshape(n_side, self.chunk_blocks, width)[:, at : at + n] = here.transpose(1, 0, 2)
            done += n
