"""Rows that are still being written: one working record for each block after the last complete one."""

from __future__ import annotations

import numpy as np

from kvmem_llama.engine.cells import Cells
from kvmem_llama.native.layout import I32
from kvmem_llama.store.records import Record

from .canonical import parts_of
from .ports import RowSource


class OpenTail:
    """Working records by the first token of their block. They belong to one step and may be overwritten:
    rows of a query's first pass are provisional until its replay has written over them."""

    def __init__(self, block: int, nbytes: int) -> None:
        self.block = block
        self._nbytes = nbytes
        self._records: dict[int, Record] = {}

    def __contains__(self, start: int) -> bool:
        return start in self._records

    def __len__(self) -> int:
        return len(self._records)

    def rows(self, start: int) -> Record:
        """The working record of the block that starts at token `start`. Raises KeyError."""
        return self._records[start]

    def open(self, start: int, copy_of: Record | None = None) -> None:
        """Makes a working record, with the rows of a stored one (copy on write) or empty."""
        self._records[start] = np.zeros(self._nbytes, np.uint8) if copy_of is None else copy_of.copy()

    def stage(self, hooks: RowSource, start: int, rows: I32, cells: Cells) -> None:
        """Copies capture rows and the V of cells of the tokens from `start` on; all blocks must be open."""
        for part in parts_of(self.block, start, start + len(rows)):
            i = part.start - start
            slot0 = part.start % self.block
            record = self._records[part.start - slot0]
            hooks.stage_out(record, slot0, rows[i : i + part.count], cells[i : i + part.count])

    def take(self, start: int) -> Record:
        """Hands a working record over."""
        return self._records.pop(start)

    def drop_from(self, start: int) -> None:
        """Forgets the working records of blocks that start at token `start` or later."""
        for key in [k for k in self._records if k >= start]:
            del self._records[key]
