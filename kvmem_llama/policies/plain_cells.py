"""The cells of one sequence as llama.cpp itself would keep them: view positions 0 .. n-1, no records.

With hooks the cells are placed and moved by them; without, by llama.cpp, and the pool only counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import Decode, Phase, TaskGenerator
from kvmem_llama.errors import EngineError
from kvmem_llama.native.layout import F32, I32


class PlainCells:
    """Owner thread only. `held` are the token positions in cells, ascending; item p is at view position p."""

    def __init__(self, core: EngineCore) -> None:
        self.seq = -1
        self.held: I32 = np.zeros(0, dtype=np.int32)
        self._core = core
        self._cells: I32 = np.zeros(0, dtype=np.int32)

    def feed(
        self,
        tokens: I32,
        positions: I32,
        phase: Phase,
        *,
        logits: bool = False,
        done: Callable[[int], None] | None = None,
    ) -> TaskGenerator[F32 | None]:
        """Evaluates `tokens`, which are those of the token `positions`, at the end of the view
        -> logits of the last one if asked for.

        done: called with the number of tokens evaluated so far, after every batch.
        """
        pool = self._core.pool
        cells = pool.alloc(len(tokens))
        at = np.arange(len(self.held), len(self.held) + len(tokens), dtype=np.int32)
        n = 0
        last: F32 | None = None
        try:
            while n < len(tokens):
                decoded = yield Decode(self.seq, tokens[n:], at[n:], cells[n:], phase, False, logits)
                here = slice(n, n + decoded.n)
                self.held = np.concatenate([self.held, positions[here]])
                self._cells = np.concatenate([self._cells, cells[here]])
                n += decoded.n
                last = decoded.logits
                if done is not None:
                    done(n)
        finally:
            pool.free(cells[n:])
        return last

    def drop_from(self, first: int) -> None:
        """Keeps view positions 0 .. first-1; keeps none where llama.cpp cannot take a part of a sequence."""
        if first >= len(self.held):
            return
        if self._core.hooks is not None:
            self._core.hooks.free(self._cells[first:])
        elif not self._core.decoder.remove(self.seq, first):
            self.clear()
            return
        self._core.pool.free(self._cells[first:])
        self.held, self._cells = self.held[:first], self._cells[:first]

    def slide(self, first: int, end: int) -> None:
        """Drops the view positions first .. end-1; what follows moves down, its K rotated to where it goes.

        Raises EngineError for a model whose cells cannot be moved.
        """
        gone, after = self._cells[first:end], self._cells[end:]
        hooks, decoder = self._core.hooks, self._core.decoder
        if hooks is not None:
            hooks.free(gone)
            hooks.move(self.seq, after, np.arange(first, first + len(after), dtype=np.int32))
        else:
            removed = decoder.remove(self.seq, first, end)
            if not removed or not decoder.shift(self.seq, end, -1, first - end):
                raise EngineError(
                    f"llama.cpp cannot slide the window of a model of architecture {self._core.model.arch!r}",
                    hint="Use --policy full_context.",
                )
        self._core.pool.free(gone)
        self.held = np.concatenate([self.held[:first], self.held[end:]])
        self._cells = np.concatenate([self._cells[:first], after])

    def clear(self) -> None:
        """Gives up every cell, also what a failed decode left behind."""
        if self.seq >= 0:
            if self._core.hooks is not None:
                _, seqs = self._core.hooks.cells()
                self._core.hooks.free(np.flatnonzero(seqs == self.seq).astype(np.int32))
            else:
                self._core.decoder.remove(self.seq)
        self._core.pool.free(self._cells)
        self.held, self._cells = self.held[:0], self._cells[:0]
