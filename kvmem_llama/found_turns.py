"""Questions and answers in a text that was read as a whole, such as a list of messages.

They are known by what the chat template puts around a message that is answered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .engine.token_bytes import TokenBytes
from .engine.vocab import Vocab
from .native.layout import I32


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """Indices of tokens."""

    start: int
    question: int
    answer_start: int
    end: int
    answer: str
    is_open: bool  # nothing ends the answer


@dataclass(frozen=True, slots=True)
class FoundTurns:
    rest: int  # tokens at the beginning that are the rest of the answer before
    rest_text: str
    turns: tuple[FoundTurn, ...]  # oldest first; of those that are open, the last one only


def find_turns(
    vocab: Vocab, tokens: I32, around: tuple[str, str], begun: int, *, after_open: bool = False
) -> FoundTurns:
    """The turns of `tokens`, [n].

    around: what stands right before and right after a message that is answered.
    begun: index of the first token that was not there before; the message that it belongs to counts, too.
    after_open: an answer that nothing has ended comes right before the tokens.
    """
    text = TurnText(vocab, tokens)
    before, after = (_Mark(vocab, text, mark.encode()) for mark in around)
    rest = text.rest_of_answer() if after_open and not begun else 0
    at = _first_place(text, before, after, int(text.starts[begun]) if begun < len(tokens) else len(text.data))
    turns: list[FoundTurn] = []
    while (p := after.find(at)) >= 0:
        floor = max(at, text.end_of_eog_before(p))  # the last of several messages is the question
        header = before.find(floor, p)
        question = header + before.size if header >= 0 else floor
        if turns:
            start = turns[-1].end
        else:
            start = text.message_start(text.index(max(header, floor)), max(begun, rest))
        answer = p + after.size
        eog = text.eog_from(answer)
        following = before.find(answer) if eog is None else -1
        if eog is None and following < 0:
            following = before.begun_at_end(answer)
        if eog is not None:
            end, last = eog + 1, int(text.starts[eog])
        elif following >= 0:
            end, last = text.index(following), following
        else:
            end, last = len(tokens), len(text.data)
        said = text.data[answer:last].decode("utf-8", "replace")
        is_open = eog is None and following < 0
        turns.append(FoundTurn(start, text.index(question), text.index(answer), end, said, is_open))
        if is_open:
            break
        at = int(text.ends[end - 1])
    rest_text = text.data[: int(text.starts[rest - 1])] if rest else b""
    return FoundTurns(rest, rest_text.decode("utf-8", "replace"), tuple(turns))


class TurnText:
    """The text of some tokens, and where in it something ends."""

    def __init__(self, vocab: Vocab, tokens: I32) -> None:
        held = TokenBytes(vocab, tokens)
        self.data = held.data()
        self.ends: NDArray[np.int64] = np.cumsum(held.sizes)
        self.starts = self.ends - held.sizes
        self.is_control = held.which(vocab.is_control)
        self.eogs = np.flatnonzero(held.which(vocab.is_eog))

    def index(self, byte: int) -> int:
        """Of the token that holds it."""
        return int(np.searchsorted(self.ends, byte, side="right"))

    def eog_from(self, byte: int) -> int | None:
        """Index of the first token from there on that ends a generation."""
        found = self.eogs[self.starts[self.eogs] >= byte]
        return int(found[0]) if len(found) else None

    def end_of_eog_before(self, byte: int) -> int:
        """Bytes up to the newest end of a message that ends at `byte` or before it; 0: none."""
        ends = self.ends[self.eogs]
        ends = ends[ends <= byte]
        return int(ends[-1]) if len(ends) else 0

    def rest_of_answer(self) -> int:
        """Tokens up to one that ends a generation, if only text comes before it."""
        controls = np.flatnonzero(self.is_control)
        if not len(self.eogs) or int(self.eogs[0]) != int(controls[0] if len(controls) else -1):
            return 0
        return int(self.eogs[0]) + 1

    def message_start(self, header: int, begun: int) -> int:
        """Index of the first token of a message: the space between it and the end of the last one is its."""
        if begun <= header:
            return begun
        start = header
        while start > 0 and self.data[int(self.starts[start - 1]) : int(self.ends[start - 1])].isspace():
            start -= 1
        return start if start == 0 or start - 1 in self.eogs else header


class _Mark:
    """A text that surrounds messages. What only looks like a control token does not count."""

    def __init__(self, vocab: Vocab, text: TurnText, mark: bytes) -> None:
        tokens = vocab.tokenize(mark)
        self.is_control = len(tokens) > 0 and vocab.is_control(int(tokens[0]))
        self.size = len(mark)
        self._text, self._mark = text, mark

    def find(self, start: int, end: int | None = None) -> int:
        """Its first place in these bytes; -1: it is not there."""
        data, last = self._text.data, len(self._text.data) if end is None else end
        at = data.find(self._mark, start, last) if self._mark else -1
        while at >= 0 and self.is_control and not self._begins_token(at):
            at = data.find(self._mark, at + 1, last)
        return at

    def _begins_token(self, byte: int) -> bool:
        i = self._text.index(byte)
        return bool(self._text.is_control[i]) and int(self._text.starts[i]) == byte

    def last_before(self, byte: int) -> int:
        """Its last place that begins before this byte; -1: there is none."""
        return self._text.data.rfind(self._mark, 0, max(byte + self.size - 1, 0)) if self._mark else -1

    def begun_at_end(self, start: int) -> int:
        """Where the text, from byte `start` on, ends with a beginning of it; -1: it does not."""
        data = self._text.data
        sizes = range(min(self.size, len(data) - start) - 1, 1, -1)  # one letter ends many texts
        return next((len(data) - n for n in sizes if data.endswith(self._mark[:n])), -1)


def _first_place(text: TurnText, before: _Mark, after: _Mark, begun: int) -> int:
    """Byte from which turns are looked for: the beginning, or, where a text that was read earlier may look
    like the template, that of the message that byte `begun` lies in."""
    if before.is_control or after.is_control:
        return 0
    header, end = before.find(begun), after.find(begun)
    if header >= 0 and header < end:
        return begun
    return max(before.last_before(begun), 0)
