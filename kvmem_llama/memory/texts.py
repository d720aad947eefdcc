"""The words of a history's complete blocks: what a search by words looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.lexical import FtsIndex
from kvmem_llama.native.layout import I32

Tokens: TypeAlias = Callable[[int, int], I32]
"""Token ids of positions start .. end-1 of the history."""

_EDGE: Final = 8  # tokens looked at before a block for the beginning of a word that it cuts


class BlockTexts:
    """Made from the token ids alone, and only when it is first searched: a history that is never searched by
    words costs nothing, and what was cut and read again in between does not matter. Owner thread only."""

    def __init__(self, text_of: Callable[[I32], str], block: int) -> None:
        """text_of: of token ids, template tokens left out. block: its size in tokens."""
        self._text_of: Final = text_of
        self._block: Final = block
        self._index: FtsIndex | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._index is None else self._index.nbytes

    def scores(self, text: str, tokens: Tokens, n_blocks: int) -> NDArray[np.float64]:
        """BM25 of each complete block for the words of `text`, 0 where none is in it: [n_blocks].

        tokens: of the history. n_blocks: complete blocks of it.
        Raises LibraryMissing if Python's SQLite was built without FTS5.
        """
        if self._index is None:
            self._index = FtsIndex()
        first = len(self._index)
        if first < n_blocks:
            self._index.add(first, [self._text(tokens, number) for number in range(first, n_blocks)])
        out = np.zeros(n_blocks)
        numbers, found = self._index.search(text)
        out[numbers] = found
        return out

    def drop_from(self, number: int) -> None:
        """Forgets this block and all after it; they may hold other tokens when they come again."""
        if self._index is not None and number < len(self._index):
            self._index.drop_from(number)

    def fork(self) -> Self:
        """Texts of its own of the same blocks."""
        other = type(self)(self._text_of, self._block)
        if self._index is not None:
            other._index = self._index.fork()
        return other

    def close(self) -> None:
        """Idempotent."""
        if self._index is not None:
            self._index.close()
            self._index = None

    def _text(self, tokens: Tokens, number: int) -> str:
        """The text of a block. A word that begins in the block before is whole here."""
        start = number * self._block
        text = self._text_of(tokens(start, start + self._block))
        before = self._text_of(tokens(max(start - _EDGE, 0), start)) if start else ""
        if text[:1].strip() and before[-1:].strip():
            text = before.split()[-1] + text
        return text
