"""The words of blocks as rows. They follow from the token ids: a row says which ones it was made from, and
counts only for these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from kvmem_llama.lexical import RULES, Terms
from kvmem_llama.native.layout import I32

from .content import spans
from .rows import WordsRow
from .tables import WORDS, Db

EDGE: Final = 8
"""Tokens before a block that are looked at for the beginning of a word that its edge cuts."""


@dataclass(frozen=True, slots=True)
class BlockWords:
    """Of one complete block."""

    source: bytes  # see source_of
    terms: Terms

    def row(self, lineage: int, number: int) -> WordsRow:
        return WordsRow(lineage, number, self.source, self.terms.astype("<u8").tobytes())

    @classmethod
    def of(cls, row: WordsRow) -> BlockWords:
        return cls(row.source, np.frombuffer(row.terms, "<u8").astype(np.uint64))


def source_of(ids: I32, number: int, block: int, first: int = 0) -> bytes:
    """What the words of a block were made from: [8] xxh3-64 of its token ids and the few before it.

    ids: of the history, from token position `first` on. block: tokens of a block.
    """
    start = number * block - first
    part = ids[max(start - EDGE, 0) : start + block]
    return xxhash.xxh3_64_digest(part.astype("<i4").tobytes(), seed=RULES)


def words_of(db: Db, lineage: int) -> Iterator[WordsRow]:
    """Rows of the history that ends in `lineage`, ascending, as far as they are as they were written."""
    where = "lineage=? AND number>=? AND number<?"
    for part in spans(db, lineage):
        yield from WORDS.sound_rows(db, where, (part.lineage, *part.blocks), "ORDER BY number")
