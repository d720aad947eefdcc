"""Which stored history a request belongs to, and what is to become of that history.

A client of an API without state sends everything again in every request. Mostly it goes on with a history, or
changes the end of it; sometimes it begins a new one with the same head (the instructions of an agent); and in
between it asks side questions (a title for the conversation). Only the first may change a stored history.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np

from ..engine.vocab import Vocab
from ..matching import match
from ..native.layout import I32

MIN_SHARED: Final = 256
"""Tokens. With less in common a history is not forked: reading is as quick."""

_SLACK: Final = 16  # tokens before an answer that may differ: how the template begins it
_LONG: Final = 1024  # tokens; a shorter history is rather forked than edited
_NEAR: Final = 64  # tokens
_CHUNK: Final = 4096  # tokens compared at once
_LOST: Final = 16  # of a long one, one in so many tokens may be lost by an edit

Plan = Literal["go_on", "fork", "new"]


class Known(Protocol):
    """A history that is stored."""

    @property
    def tokens(self) -> I32: ...

    @property
    def prompt_end(self) -> int:
        """Tokens before its last answer."""
        ...

    @property
    def is_unfinished(self) -> bool:
        """These tokens were read, but no step over them has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """`n_common`: tokens of the history that the wanted prompt begins with."""

    plan: Plan
    number: int = -1  # of the history
    n_common: int = 0


def choose(known: Iterable[Known], wanted: I32, vocab: Vocab, *, spans: bool = True) -> list[Choice]:
    """The histories that the wanted prompt, [n] token ids, can be made of, the best first; the last choice is
    always a new history. spans: equal spans after an edit are taken over."""
    found: list[tuple[int, int, Choice]] = []
    for number, history in enumerate(known):
        n = n_common(history.tokens, wanted, vocab)
        if goes_on(history, wanted, n, spans=spans):
            found.append((n, 1, Choice("go_on", number, n)))
        elif not history.is_unfinished and n >= MIN_SHARED:
            found.append((n, 0, Choice("fork", number, n)))
    found.sort(key=lambda item: item[:2], reverse=True)
    return [*(choice for _, _, choice in found), Choice("new")]


def goes_on(history: Known, wanted: I32, n: int, *, spans: bool = True, slack: int = _SLACK) -> bool:
    """Whether the prompt is the next one of this history, whose first `n` tokens it begins with: all but the
    last answer is there, and `slack` tokens before it, or what is lost by an edit of a long one is little."""
    size = len(history.tokens)
    if not n:
        return False
    if n == size or n >= min(history.prompt_end, max(history.prompt_end - slack, slack)):
        return True
    if size < _LONG or n < MIN_SHARED or not spans:
        return False
    plan = match(history.tokens, wanted)
    return size - plan.prefix - plan.n_carried <= size // _LOST


def n_common(stored: I32, wanted: I32, vocab: Vocab) -> int:
    """How many stored tokens the text of the wanted ones begins with.

    A sampled answer need not be made of the tokens that the tokenizer makes of its text, so after the first
    difference the texts are compared.
    """
    n = n_equal(stored, wanted)
    if n in (0, len(stored), len(wanted)):
        return n
    for width in (_NEAR, max(len(stored), len(wanted))):  # mostly they differ at once
        ours = vocab.detokenize(stored[n : n + width])
        theirs = vocab.detokenize(wanted[n : n + 2 * width])
        n_bytes = _n_equal_bytes(ours, theirs)
        if n_bytes < min(len(ours), len(theirs)):
            break
    ends = np.cumsum([len(vocab.piece(token)) for token in stored[n : n + n_bytes].tolist()])
    return n + int(np.searchsorted(ends, n_bytes, side="right"))


def n_equal(a: I32, b: I32) -> int:
    """How many tokens are equal at the beginning."""
    most = min(len(a), len(b))
    for start in range(0, most, _CHUNK):
        end = min(start + _CHUNK, most)
        differs = np.flatnonzero(a[start:end] != b[start:end])
        if len(differs):
            return start + int(differs[0])
    return most


def _n_equal_bytes(a: bytes, b: bytes) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.frombuffer(a, np.uint8, n) != np.frombuffer(b, np.uint8, n))
    return int(differs[0]) if len(differs) else n
