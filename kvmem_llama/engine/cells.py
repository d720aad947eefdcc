"""Bookkeeping of the free cells of one llama.cpp context.

llama.cpp prices a decode by the highest used cell (`get_n_kv` in llama-kv-cache.cpp), so the pool always
hands out the lowest free cells. It only counts: what lies in a cell, and for which sequence, is known to
the hooks and to the view that allocated it. Owner thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError

Cell = NewType("Cell", int)
"""Index of one row of the KV cache; never a token position, never a view position."""

Cells: TypeAlias = NDArray[np.int32]


class PoolExhausted(EngineError):
    """More cells were asked for than are free. A view sizes itself so that this cannot happen."""

    def __init__(self, what: str) -> None:
        super().__init__(what, hint="This is a defect of kvmem_llama; please report it.")


class CellPool:
    """The free cells of a context with `n_cells` cells.

    Every allocation is ascending. Nothing changes when a call raises.
    """

    def __init__(self, n_cells: int) -> None:
        if n_cells < 1:
            raise ValueError(f"n_cells must be at least 1, not {n_cells}")
        self.n_cells: Final = n_cells
        # One byte a cell, as bytes for searches and as an array for everything else.
        self._map = bytearray(b"\x01") * n_cells
        self._free = np.frombuffer(self._map, dtype=np.bool_)
        self._n_free = n_cells

    @property
    def n_free(self) -> int:
        return self._n_free

    @property
    def n_used(self) -> int:
        return self.n_cells - self._n_free

    @property
    def highest_used(self) -> int:
        """The highest used cell; -1 when all are free."""
        return self._map.rfind(0)

    def is_used(self, cells: Cells) -> bool:
        """True if every one of `cells` is in range and allocated."""
        if len(cells) == 1:
            return 0 <= cells[0] < self.n_cells and not self._map[cells[0]]
        in_range = bool(np.all((cells >= 0) & (cells < self.n_cells)))
        return in_range and not bool(self._free[cells].any())

    def alloc(self, n: int) -> Cells:
        """Takes the `n` lowest free cells -> [n] int32, ascending. Raises PoolExhausted."""
        return self.alloc_above(n, Cell(-1))

    def alloc_above(self, n: int, cell: Cell) -> Cells:
        """Takes the `n` lowest free cells above `cell` -> [n] int32, ascending. Raises PoolExhausted."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} cells")
        if n > self._n_free:
            raise PoolExhausted(f"{n} cells asked for, {self._n_free} of {self.n_cells} are free")
        start = max(int(cell) + 1, 0)
        if n == 1 and (found := self._map.find(1, start)) >= 0:  # as every token of an answer is
            self._map[found] = 0
            self._n_free -= 1
            return np.array((found,), dtype=np.int32)
        cells = (start + np.flatnonzero(self._free[start:])[:n]).astype(np.int32)
        if len(cells) < n:
            raise PoolExhausted(f"{n} cells above cell {cell} asked for, {len(cells)} are free")
        self._mark(cells, free=False)
        return cells

    def free(self, cells: Cells | Sequence[int]) -> None:
        """Gives `cells` back, in any order.

        Raises ValueError for a cell that is out of range, already free or named twice.
        """
        freed = np.asarray(cells, dtype=np.int64)
        if not len(freed):
            return
        if freed.min() < 0 or freed.max() >= self.n_cells:
            raise ValueError(f"cells outside 0..{self.n_cells - 1}: {_outside(freed, self.n_cells)}")
        twice = self._free[freed]
        if twice.any():
            raise ValueError(f"cells freed that are free already: {freed[twice][:8].tolist()}")
        if len(np.unique(freed)) != len(freed):
            raise ValueError("the same cell is freed twice in one call")
        self._mark(freed, free=True)

    def _mark(self, cells: NDArray[np.int32] | NDArray[np.int64], *, free: bool) -> None:
        self._free[cells] = free
        self._n_free += len(cells) if free else -len(cells)


def _outside(cells: NDArray[np.int64], limit: int) -> list[int]:
    outside: list[int] = cells[(cells < 0) | (cells >= limit)][:8].tolist()
    return outside
