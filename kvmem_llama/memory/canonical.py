"""The canonical view: sink + pins + newest tail, a function of history alone.

Every read, and the first pass of every query, runs over it, so that what blocks are computed from, and what
is selected later, does not depend on earlier questions. Pure: token positions in, token positions out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .positions import TokenPos


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens start .. start+count-1 of the history, all in one block. Where an execution view is planned,
    it is a tuple of parts in history order."""

    start: TokenPos
    count: int

    @property
    def end(self) -> TokenPos:
        return TokenPos(self.start + self.count)


def floor_to(block: int, n: int) -> int:
    """The largest multiple of `block` that is <= n."""
    return n // block * block


def ceil_to(block: int, n: int) -> int:
    """The smallest multiple of `block` that is >= n."""
    return -(-n // block) * block


def parts_of(block: int, start: int, end: int) -> list[Part]:
    """The tokens start .. end-1 cut at multiples of `block`; the first and the last part may be short."""
    parts = []
    while start < end:
        stop = min(floor_to(block, start) + block, end)
        parts.append(Part(TokenPos(start), stop - start))
        start = stop
    return parts


@dataclass(frozen=True, slots=True)
class Canonical:
    """Sizes in tokens, all multiples of `block`; pins are starts of blocks outside the sink, ascending."""

    n_view: int
    n_read: int  # size of the view while reading, <= n_view
    block: int
    n_sink: int
    pins: tuple[TokenPos, ...] = ()

    @property
    def n_fixed(self) -> int:
        """Sink and pins."""
        return self.n_sink + len(self.pins) * self.block

    @property
    def n_least(self) -> int:
        """The smallest view that reading can go on in: sink, pins and one block."""
        return self.n_fixed + self.block

    @property
    def quantum(self) -> int:
        """Q, the tokens between two points where room is made: a quarter of the view.

        Pins that leave less than that free make it smaller; a function of the pins and the view even so.
        """
        free = floor_to(self.block, self.n_read - self.n_fixed)
        return max(min(floor_to(self.block, self.n_read // 4), free), self.block)

    def next_room(self, t: int) -> int:
        """The first token position after `t` at which room is made: n_read, then multiples of Q."""
        return self.n_read if t < self.n_read else floor_to(self.quantum, t) + self.quantum

    def epoch_end(self, t: int) -> int:
        """The view at `t` has room for the tokens up to this position; `next_room(t)` is never beyond it."""
        return self.n_read if t < self.n_read else max(floor_to(self.quantum, t), self.n_read) + self.quantum

    def tail_start(self, t: int) -> TokenPos:
        """First token of the kept tail of the view that holds the tokens before position `t`."""
        if t < self.n_read:
            return TokenPos(min(self.n_sink, t))
        return self._tail_that_ends(self.epoch_end(t), self.n_read)

    def keeps_all(self, t: int) -> bool:
        """Nothing before position `t` has been dropped from the view."""
        return self.tail_start(t) <= self.n_sink

    def first_pass_start(self, t: int, n_query: int) -> TokenPos:
        """First token of the kept tail of the view that `n_query` query tokens at `t` are evaluated over."""
        start = self.tail_start(t)
        if self.keeps_all(t) and t + n_query <= self.n_view:
            return start
        return max(start, self._tail_that_ends(t + n_query, self.n_view))

    def view(self, t: int, tail_start: int | None = None) -> tuple[Part, ...]:
        """The view of the tokens before `t`, with the given tail or with its own."""
        start = self.tail_start(t) if tail_start is None else tail_start
        kept = parts_of(self.block, 0, min(self.n_sink, t))
        kept += [Part(pin, self.block) for pin in self.pins if pin < start]
        return tuple(kept + parts_of(self.block, start, t))

    def _tail_that_ends(self, end: int, n_view: int) -> TokenPos:
        """Start of the longest tail, in whole blocks, that ends at `end` and fits beside sink and pins."""
        return TokenPos(max(self.n_sink, ceil_to(self.block, end + self.n_fixed - n_view)))


def pin_blocks(block: int, n_sink: int, ranges: Iterable[tuple[int, int]]) -> tuple[TokenPos, ...]:
    """Starts of the blocks outside the sink that `ranges` of tokens [start, end) touch, ascending."""
    starts: set[int] = set()
    for start, end in ranges:
        starts.update(range(max(floor_to(block, start), n_sink), end, block))
    return tuple(TokenPos(s) for s in sorted(starts))
