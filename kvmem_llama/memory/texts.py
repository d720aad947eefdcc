"""The words of a history's complete blocks: what a search by words looks at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.errors import StoreError
from kvmem_llama.lexical import Terms, WordIndex, terms
from kvmem_llama.native.layout import I32
from kvmem_llama.store.words import EDGE, BlockWords, source_of

Tokens: TypeAlias = Callable[[int, int], I32]
"""Token ids of positions start .. end-1 of the history."""


class WordsSource(Protocol):
    """Where words of blocks are kept; see store.stored_words.StoredWords."""

    def read(self) -> Mapping[int, BlockWords]: ...

    def keep(self, words: Mapping[int, BlockWords]) -> None: ...


class BlockTexts:
    """What they are follows from the token ids alone, whatever was cut and read again in between. The index
    is in RAM from the first search on: a history that is never searched by words costs none. Owner thread
    only.
    """

    def __init__(self, text_of: Callable[[I32], str], block: int, source: WordsSource | None = None) -> None:
        """text_of: of token ids, template tokens left out. block: its size in tokens. source: of a durable
        history."""
        self._text_of: Final = text_of
        self._block: Final = block
        self._source: Final = source
        self._index: WordIndex | None = None
        self._is_whole = False  # the index begins with block 0; else with the first that is not kept yet

    @property
    def nbytes(self) -> int:
        """Bytes of the index in RAM."""
        return 0 if self._index is None else self._index.nbytes

    def scores(self, text: str, tokens: Tokens, n_blocks: int) -> NDArray[np.float64]:
        """BM25 of each complete block for the words of `text`, 0 where none is in it: [n_blocks].

        tokens: of the history. n_blocks: complete blocks of it.
        """
        return self.search(text, tokens, n_blocks)[0]

    def search(self, text: str, tokens: Tokens, n_blocks: int) -> tuple[NDArray[np.float64], float]:
        """As `scores`, and the score of a block that would hold every word of the text any number of times;
        words that no block has add the most to it."""
        index = self._load(tokens, n_blocks)
        out = np.zeros(n_blocks)
        numbers, found, most = index.search(text)
        out[numbers] = found
        return out, most

    def prepare(self, tokens: Tokens, first: int, end: int) -> WordIndex:
        """The complete blocks first .. end-1 will be committed: a long read does not leave all their words to
        its end. -> an index with these blocks."""
        if self._index is None:
            self._index = WordIndex(first)
        self._extend(self._index, tokens, end)
        return self._index

    def make(self, tokens: Tokens, first: int, end: int) -> list[BlockWords]:
        """The words of the complete blocks first .. end-1, those after the last commit; `kept` is called when
        they are durable."""
        if first >= end:
            return []
        index = self.prepare(tokens, first, end)
        start = max(first * self._block - EDGE, 0)
        ids = tokens(start, end * self._block)
        return [
            BlockWords(source_of(ids, number, self._block, start), index.terms(number))
            for number in range(first, end)
        ]

    def kept(self) -> None:
        """What was made is durable."""
        if not self._is_whole:
            self._index = None

    def drop_from(self, number: int) -> None:
        """Forgets this block and all after it; they may hold other tokens when they come again."""
        if self._index is None:
            return
        if number < self._index.first:
            self._index = None
        else:
            self._index.drop_from(number)

    def fork(self) -> Self:
        """Texts of its own of the same blocks."""
        other = type(self)(self._text_of, self._block, self._source)
        if self._index is not None and self._is_whole:
            other._index, other._is_whole = self._index.fork(), True
        return other

    def close(self) -> None:
        """Forgets everything."""
        self._index, self._is_whole = None, False

    # -- private

    def _load(self, tokens: Tokens, n_blocks: int) -> WordIndex:
        """The whole index, with blocks 0 .. n_blocks-1."""
        if self._index is None or not self._is_whole:
            self._index, self._is_whole = WordIndex(), True
            if self._source is not None and n_blocks:
                self._take_over(self._index, self._source, tokens, n_blocks)
        self._extend(self._index, tokens, n_blocks)
        return self._index

    def _take_over(self, index: WordIndex, source: WordsSource, tokens: Tokens, n_blocks: int) -> None:
        """Fills the index with the words that are kept. Those that are not, or of other tokens, are made, and
        kept from now on. Nothing depends on it: what cannot be read or written is made from the token ids."""
        try:
            stored = source.read()
        except StoreError:
            return
        ids = tokens(0, n_blocks * self._block)
        made: dict[int, BlockWords] = {}
        for number in range(n_blocks):
            words, is_of = stored.get(number), source_of(ids, number, self._block)
            if words is None or words.source != is_of:
                made[number] = BlockWords(is_of, self._terms(tokens, number))
        index.add([(made.get(number) or stored[number]).terms for number in range(n_blocks)])
        if made:
            with contextlib.suppress(StoreError):
                source.keep(made)

    def _extend(self, index: WordIndex, tokens: Tokens, end: int) -> None:
        index.add([self._terms(tokens, number) for number in range(index.end, end)])

    def _terms(self, tokens: Tokens, number: int) -> Terms:
        """The words of a block. A word that begins in the block before is whole here."""
        start = number * self._block
        text = self._text_of(tokens(start, start + self._block))
        before = self._text_of(tokens(max(start - EDGE, 0), start)) if start else ""
        if text[:1].strip() and before[-1:].strip():
            text = before.split()[-1] + text
        return terms(text)
