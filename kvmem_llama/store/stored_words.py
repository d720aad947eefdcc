"""The words of a workspace's blocks in its catalog: what a search by words need not make again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .append import workspace_row
from .content import read_tokens, spans
from .holding import Holding
from .tables import WORDS, Db
from .words import BlockWords, source_of, words_of


class StoredWords:
    """The words that the catalog has of the blocks of a workspace. Any thread."""

    def __init__(self, holding: Holding) -> None:
        self._workspace: Final = holding.place.workspace
        self._catalog: Final = holding.family.catalog
        self._block: Final = holding.family.binding.block_size

    def read(self) -> dict[int, BlockWords]:
        """By number of the block; those that are not as they were written are left out.

        Raises CatalogDamaged or StoreFailed.
        """
        with self._catalog.snapshot() as db:
            lineage = workspace_row(db, self._workspace).lineage
            return {row.number: BlockWords.of(row) for row in words_of(db, lineage)}

    def keep(self, words: Mapping[int, BlockWords]) -> None:
        """Writes words of blocks, each with the lineage that it is a part of. Left out are blocks that are
        not committed, or hold other tokens than the words are of.

        Raises StoreFull, StoreFailed or CatalogDamaged; then nothing was written.
        """

        def run(db: Db) -> None:
            row = workspace_row(db, self._workspace)
            parts = spans(db, row.lineage)
            ids = read_tokens(db, row.lineage, 0, row.n_tokens)
            rows = [
                found.row(next(p.lineage for p in parts if p.blocks[0] <= number < p.blocks[1]), number)
                for number, found in words.items()
                if (number + 1) * self._block <= len(ids)
                and found.source == source_of(ids, number, self._block)
            ]
            WORDS.insert(db, rows, replace=True)

        self._catalog.write(run, "words")
