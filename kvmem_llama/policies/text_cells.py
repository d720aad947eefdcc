"""Cells that hold a text: what they hold is always what a plain prefill of these tokens gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.native.layout import F32, I32

from .plain_cells import PlainCells


class TextCells:
    """The cells of one sequence, for policies that change the text before the model and not just its end.

    From the first token that differs on everything is evaluated again: nothing is moved, so no row has
    attended to a text that is no longer there. In `PlainCells.held` stand the token ids.
    """

    def __init__(self, cells: PlainCells) -> None:
        self.n_kept = 0  # tokens that the last `show` found in cells
        self._cells = cells

    def show(
        self, text: I32, *, logits: bool = False, done: Callable[[int, int], None] | None = None
    ) -> TaskGenerator[F32 | None]:
        """Makes the cells hold exactly `text`, [n] token ids -> logits of its last token if asked for.

        done: called with the number of tokens evaluated and of those to evaluate, after every batch.
        """
        held = self._cells.held
        n_most = min(len(held), len(text) - logits)
        differs = np.flatnonzero(held[:n_most] != text[:n_most])
        self._cells.drop_from(int(differs[0]) if len(differs) else n_most)
        self.n_kept = len(self._cells.held)  # none, where llama.cpp cannot take a part of a sequence
        missing = text[self.n_kept :]
        if not len(missing):
            return None
        n = len(missing)
        report = None if done is None else lambda at: done(at, n)
        return (yield from self.append(missing, Phase.REPLAY, logits=logits, done=report))

    def append(
        self,
        tokens: I32,
        phase: Phase,
        *,
        logits: bool = False,
        done: Callable[[int], None] | None = None,
    ) -> TaskGenerator[F32 | None]:
        """Evaluates `tokens` after those that are there; see PlainCells.feed."""
        return (yield from self._cells.feed(tokens, tokens, phase, logits=logits, done=done))
