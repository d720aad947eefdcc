"""Search by words: what the words of a text are, and BM25 over the texts of numbered blocks."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, Self, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

Terms: TypeAlias = NDArray[np.uint64]
"""A text as an index sees it: one number per word, in their order and as often as they stand there."""

RULES: Final = 1
"""Of what is a word, and of its number. Counts up whenever `terms` gives anything else for any text: terms
that were kept are then made again."""

K1: Final = 1.2
B: Final = 0.75
_LEAST_IDF: Final = 1e-6  # of a word that half of the blocks have: it still tells a block from one without it

# Ideographs and kana stand in texts without spaces: each is a word. Everything else is a run of letters and
# digits, or several joined by what joins the parts of identifiers, paths, versions and compounds.
_IDEOGRAPH: Final = r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
_RUN: Final = rf"(?:(?!{_IDEOGRAPH})[^\W_])+"
_WORD: Final = re.compile(rf"{_IDEOGRAPH}|{_RUN}(?:[_./\\:-]+{_RUN})*")
_PART: Final = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """The words of `text`, case folded, in their order and as often as they stand there.

    What is made of parts gives the parts and, before them, all of them joined by underscores, so that
    `parse_config`, `parseConfig` and `parse/config` find each other, and the whole adds to its parts' weight.
    """
    found = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text)):
        parts = [part.casefold() for run in _PART.findall(word) for part in _split(run)]
        if len(parts) > 1:
            found.append("_".join(parts))
        found += parts
    return found


def _split(run: str) -> list[str]:
    """A run of letters and digits at changes of case and between letters and digits: HTTPServer2 gives
    HTTP, Server and 2."""
    if run.isalpha() and (run.isupper() or run[1:].islower() or len(run) == 1):
        return [run]
    parts, first = [], 0
    for i in range(1, len(run)):
        before, here, after = run[i - 1], run[i], run[i + 1 : i + 2]
        starts_word = here.isupper() and (before.islower() or (before.isupper() and after.islower()))
        if starts_word or before.isdigit() != here.isdigit():
            parts.append(run[first:i])
            first = i
    return [*parts, run[first:]]


def terms(text: str) -> Terms:
    """The words of `text` as numbers, [n_words]: equal words have equal numbers, with accents or without.
    That two others share one of 64 bits is not to be expected in any history."""
    hashes = [xxhash.xxh3_64_intdigest(_bare(word).encode()) for word in words(text)]
    return np.array(hashes, dtype=np.uint64)


def _bare(word: str) -> str:
    """Without accents. Other marks stay: they make other letters."""
    if word.isascii():
        return word
    kept = [c for c in unicodedata.normalize("NFD", word) if not "\u0300" <= c <= "\u036f"]
    return unicodedata.normalize("NFC", "".join(kept))


class Hits(NamedTuple):
    """What a search by words found."""

    numbers: NDArray[np.int64]  # of the blocks, ascending
    scores: NDArray[np.float64]  # theirs, all above 0
    most: float  # the score of a block that would hold every word of the query any number of times


class WordIndex:
    """The words of blocks with the numbers first, first + 1, ..., and a search over them by BM25.

    All that is kept is the terms of the blocks one after the other, 8 bytes per word. A search looks through
    all of them once.
    """

    def __init__(self, first: int = 0) -> None:
        """first: number of the first block that will be added."""
        self.first: Final = first
        self._terms = array("Q")
        self._ends = array("q")  # of each block in these

    def __len__(self) -> int:
        """Blocks."""
        return len(self._ends)

    @property
    def end(self) -> int:
        """Number of the next block."""
        return self.first + len(self._ends)

    @property
    def nbytes(self) -> int:
        """Bytes in RAM."""
        return len(self._terms) * self._terms.itemsize + len(self._ends) * self._ends.itemsize

    def add(self, blocks: Sequence[Terms]) -> None:
        """Appends the blocks end, end + 1, ..."""
        if not blocks:
            return
        ends = len(self._terms) + np.cumsum([len(block) for block in blocks], dtype=np.int64)
        self._terms.frombytes(np.concatenate(blocks).tobytes())
        self._ends.frombytes(ends.tobytes())

    def terms(self, number: int) -> Terms:
        """Those of one block, a copy."""
        i = number - self.first
        return np.array(self._terms[self._start(i) : self._ends[i]], dtype=np.uint64)

    def drop_from(self, number: int) -> None:
        """Forgets this block and all after it."""
        i = max(number - self.first, 0)
        del self._terms[self._start(i) if i < len(self._ends) else len(self._terms) :]
        del self._ends[i:]

    def search(self, text: str) -> Hits:
        """The blocks that share a word with `text`.

        Scores are those of SQLite's bm25(): k1 = 1.2, b = 0.75, and words of the query count once.
        """
        n, scores = len(self._ends), np.zeros(len(self._ends))
        wanted = np.unique(terms(text))
        if not self._terms or not len(wanted):
            return Hits(np.zeros(0, np.int64), scores[:0], 0.0)
        all_terms, ends = np.frombuffer(self._terms, np.uint64), np.frombuffer(self._ends, np.int64)
        norm = K1 * (1 - B + B * np.diff(ends, prepend=0) / (len(all_terms) / n))
        places = _places(all_terms, wanted)
        which, block_of = all_terms[places], np.searchsorted(ends, places, side="right")
        most = 0.0
        for term in wanted:
            blocks = block_of[which == term]  # ascending, as often as the word stands there
            firsts = np.flatnonzero(np.diff(blocks, prepend=-1))
            numbers, counts = blocks[firsts], np.diff(firsts, append=len(blocks))
            idf = max(float(np.log((n - len(numbers) + 0.5) / (len(numbers) + 0.5))), _LEAST_IDF)
            scores[numbers] += idf * counts * (K1 + 1) / (counts + norm[numbers])
            most += idf * (K1 + 1)
        found = np.flatnonzero(scores)
        return Hits(found + self.first, scores[found], most)

    def fork(self) -> Self:
        """An index of its own with the same blocks."""
        other = type(self)(self.first)
        other._terms, other._ends = self._terms[:], self._ends[:]
        return other

    def _start(self, i: int) -> int:
        return self._ends[i - 1] if i else 0


def _places(all_terms: Terms, wanted: Terms) -> NDArray[np.int64]:
    """Where one of `wanted` stands, and a few places more: those with its last 16 bits."""
    is_wanted = np.zeros(1 << 16, np.bool_)
    is_wanted[wanted.astype(np.uint16)] = True
    return np.flatnonzero(is_wanted[all_terms.astype(np.uint16)])
