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
_HEAD: Final = 4  # tokens of an answer's head that may differ
_N_EDITED: Final = 4  # long histories that are compared whole, though they begin in another way
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
    """`n_kept`: tokens that need not be read."""

    plan: Plan
    number: int = -1  # of the history
    n_kept: int = 0


def choose(known: Iterable[Known], wanted: I32, vocab: Vocab, *, spans: bool = True) -> list[Choice]:
    """The histories that the wanted prompt, [n] token ids, can be made of, the best first; the last choice is
    always a new history.

    known: those used last first. spans: equal spans after an edit are taken over.
    """
    found: list[Choice] = []
    edited: list[tuple[int, Known]] = []  # at their very beginning, if they are this one at all
    for number, history in enumerate(known):
        n = n_common(history.tokens, wanted, vocab)
        if goes_on(history, n):
            found.append(Choice("go_on", number, n))
        elif n >= MIN_SHARED:
            kept = n_kept(history, wanted, spans=spans)
            if kept:
                found.append(Choice("go_on", number, kept))
            elif not history.is_unfinished:
                found.append(Choice("fork", number, n))
        elif n and len(edited) < _N_EDITED and len(history.tokens) >= _LONG:
            edited.append((number, history))
    if all(choice.n_kept < len(wanted) // 2 for choice in found):
        kept_of = ((number, n_kept(history, wanted, spans=spans, early=True)) for number, history in edited)
        found += [Choice("go_on", number, n) for number, n in kept_of if n]
    found.sort(key=lambda choice: (choice.n_kept, choice.plan == "go_on"), reverse=True)
    return [*found, Choice("new")]


def goes_on(history: Known, n: int, *, slack: int = _SLACK) -> bool:
    """Whether a prompt that begins with the first `n` tokens of this history is the next one of it: all but
    the last answer is there, and `slack` tokens before it."""
    needed = min(history.prompt_end, max(history.prompt_end - slack, slack))
    return n > 0 and (n == len(history.tokens) or n >= needed)


def n_kept(history: Known, wanted: I32, *, spans: bool = True, early: bool = False) -> int:
    """How many tokens of the prompt need not be read if it is an edit of this history; 0: it is none. What is
    lost by an edit, of a long history, is little.

    early: where they begin in different ways it is one only if the prompt goes on with the last answer: else
    it is another question about the same text.
    """
    size = len(history.tokens)
    if size < _LONG or not spans:
        return 0
    plan = match(history.tokens, wanted)
    if early and (not plan.spans or plan.spans[-1].old_end < history.prompt_end - _HEAD):
        return 0
    kept = plan.prefix + plan.n_carried
    return kept if size - kept <= size // _LOST else 0


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
