"""Search by words: what the words of a text are, and BM25 over the texts of numbered blocks."""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Sequence
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from .errors import LibraryMissing

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


class TextIndex(Protocol):
    """Texts of the blocks of one history by number, and a search over them. Numbers ascend from the first
    one added, without gaps."""

    def __len__(self) -> int: ...

    def add(self, first: int, texts: Sequence[str]) -> None:
        """Appends the blocks first, first + 1, ..."""
        ...

    def drop_from(self, number: int) -> None:
        """Forgets this block and all after it."""
        ...

    def search(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Numbers of the blocks that share a word with `text`, ascending, and their scores, all above 0."""
        ...

    def fork(self) -> Self:
        """An index of its own with the same blocks."""
        ...

    def close(self) -> None: ...


class FtsIndex:
    """See TextIndex. A full-text table of SQLite in RAM; its bm25() has k1 = 1.2 and b = 0.75.

    Belongs to the thread that made it.
    """

    def __init__(self) -> None:
        """Raises LibraryMissing if Python's SQLite was built without FTS5."""
        self._db: Final = sqlite3.connect(":memory:", isolation_level=None)
        try:
            self._db.execute(
                "CREATE VIRTUAL TABLE blocks USING fts5(words, "
                "tokenize = \"unicode61 remove_diacritics 2 tokenchars '_'\")"
            )
        except sqlite3.OperationalError as error:
            self._db.close()
            raise LibraryMissing(
                f"the SQLite {sqlite3.sqlite_version} of this Python has no text search ({error})",
                hint="Use a Python whose SQLite has FTS5, or a policy without text retrieval.",
            ) from error

    def __len__(self) -> int:
        count: int = self._db.execute("SELECT count(*) FROM blocks").fetchone()[0]
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the table in RAM."""
        pages, size = (self._db.execute(f"PRAGMA page_{what}").fetchone()[0] for what in ("count", "size"))
        return int(pages * size)

    def add(self, first: int, texts: Sequence[str]) -> None:
        rows = [(first + i, " ".join(words(text))) for i, text in enumerate(texts)]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO blocks(rowid, words) VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    def drop_from(self, number: int) -> None:
        self._db.execute("DELETE FROM blocks WHERE rowid >= ?", (number,))

    def search(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        query = " OR ".join(f'"{word}"' for word in dict.fromkeys(words(text)))
        rows = []
        if query:
            rows = self._db.execute(
                "SELECT rowid, -bm25(blocks) FROM blocks WHERE blocks MATCH ? ORDER BY rowid", (query,)
            ).fetchall()
        numbers, scores = zip(*rows, strict=True) if rows else ((), ())
        return np.array(numbers, dtype=np.int64), np.array(scores, dtype=np.float64)

    def fork(self) -> Self:
        other = type(self)()
        self._db.backup(other._db)
        return other

    def close(self) -> None:
        """Idempotent."""
        self._db.close()
