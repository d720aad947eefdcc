"""What memory needs from the hooks (native/hooks.py), as narrow interfaces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from kvmem_llama.engine.cells import Cells
from kvmem_llama.native.layout import F32, I32, U8, BlockWrite


class RowSource(Protocol):
    """Rows captured by the last decode."""

    def stage_out(self, record: U8, slot0: int, rows: I32, cells: Cells) -> None:
        """Raw K of capture rows and V of cells -> record slots slot0, slot0+1, ..."""
        ...

    def read_q(self, rows: I32, layers: Collection[int] | None = None) -> list[F32]:
        """Raw Q of capture rows, per full-attention layer [n, n_head, d_k]. layers: numbers of those that are
        wanted; None: all."""
        ...


class CellHooks(Protocol):
    """Cells of a context, between two decodes. All cells of a write or a show must be empty."""

    def write_blocks(self, seq: int, blocks: Sequence[BlockWrite]) -> None: ...

    def move(self, seq: int, cells: Cells, positions: I32) -> None: ...

    def show(self, seq: int, cells: Cells, positions: I32, tokens: I32 | None = None) -> None: ...

    def free(self, cells: Cells) -> None: ...

    def cells(self) -> tuple[I32, I32]:
        """(view position, sequence) of every cell, -1 where empty."""
        ...
