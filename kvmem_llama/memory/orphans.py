"""Blocks that a cancelled prompt had read. They are addressed by the tokens they hold, and adopted by the
next step that begins with the same tokens, so that nothing is read twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmem_llama.native.layout import I32
from kvmem_llama.store.records import BlockStore

from .blocks import Block


class Orphans:
    """One run of complete blocks that continues the committed history. Holds a reference on each record."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._run: list[tuple[Block, I32]] = []

    def __len__(self) -> int:
        return len(self._run)

    def match(self, tokens: I32, first: int, end: int) -> list[Block]:
        """Takes out the longest run of blocks that equals the history and returns it.

        tokens: token ids of positions first .. end-1; `first` is where the first block must start.
        """
        found = []
        at = first
        for block, ids in self._run:
            if block.start != at or block.end > end:
                break
            if not np.array_equal(ids, tokens[at - first : block.end - first]):
                break
            found.append(block)
            at = block.end
        del self._run[: len(found)]
        return found

    def put(self, run: Sequence[tuple[Block, I32]]) -> None:
        """Keeps the run of a cancelled step; what is left of an earlier one stays if it continues it."""
        if run and self._run and self._run[0][0].start != run[-1][0].end:
            self.clear()
        self._run = [*run, *self._run]

    def drop_stuck(self) -> None:
        """Frees records that could not be written, and those after them: what nobody can write must not take
        the room that others need."""
        n = next((i for i, (block, _) in enumerate(self._run) if self._store.is_stuck(block.ref)), len(self))
        for block, _ in self._run[n:]:
            self._store.free(block.ref)
        del self._run[n:]

    def clear(self) -> None:
        """Frees every record."""
        for block, _ in self._run:
            self._store.free(block.ref)
        self._run = []
