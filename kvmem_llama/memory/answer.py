"""From generated tokens to text: whole characters, nothing of a stop string, and where that began."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence


class AnswerText:
    """Text is held back while it may still be part of a character or of a stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(s for s in stop if s)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._released: list[str] = []
        self._n_released = 0  # characters
        self._held = ""
        self._starts: list[int] = []  # of each token, in characters of the answer
        self.stopping_word = ""  # the stop string that ended the answer

    @property
    def stopped(self) -> bool:
        """A stop string is complete."""
        return bool(self.stopping_word)

    @property
    def text(self) -> str:
        """All text released."""
        return "".join(self._released)

    @property
    def n_kept(self) -> int:
        """Tokens that begin before the stop string; all of them without one."""
        return self.n_released if self.stopped else len(self._starts)

    @property
    def n_released(self) -> int:
        """Tokens that the text released so far has a character of, and those before them."""
        return bisect_left(self._starts, self._n_released)

    def push(self, piece: bytes) -> str:
        """The bytes of one more token -> text released by it; `stopped` says if it completed a stop."""
        self._starts.append(self._n_released + len(self._held))
        self._held += self._decoder.decode(piece)
        if not self._stop:
            text, self._held = self._held, ""
            return self._release(text)
        found = [(at, i) for i, at in enumerate(self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            at, i = min(found)
            self.stopping_word = self._stop[i]
            text, self._held = self._held[:at], ""
            return self._release(text)
        n_hold = max((_overlap(self._held, s) for s in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - n_hold], self._held[len(self._held) - n_hold :]
        return self._release(text)

    def finish(self) -> str:
        """The answer ended -> what was held back; a cut character becomes U+FFFD."""
        text, self._held = self._held, ""
        return self._release("" if self.stopped else text + self._decoder.decode(b"", final=True))

    def _release(self, text: str) -> str:
        self._released.append(text)
        self._n_released += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
