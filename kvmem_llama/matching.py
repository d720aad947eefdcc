"""What a history and the tokens that a caller wants have in common: a prefix, then equal spans further on.

Pure: token ids in, positions out. Windows of `MIN_SPAN` tokens are compared by a hash and then token by
token, so the work grows with the number of tokens, not with its square.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MIN_SPAN: Final = 64
"""Tokens; a power of two. Equal spans that are shorter are read again."""

_MAX_DEPTH: Final = 24  # of searches between what was found
_CHUNK: Final = 4096  # tokens compared at once
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)

_Range = tuple[int, int]
I32 = NDArray[np.int32]
_U64 = NDArray[np.uint64]
_I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens that stand at `old` in the stored history and at `new` in the wanted one."""

    old: int
    new: int
    count: int

    @property
    def old_end(self) -> int:
        return self.old + self.count

    @property
    def new_end(self) -> int:
        return self.new + self.count


@dataclass(frozen=True, slots=True)
class Plan:
    """How a wanted history is made of a stored one. Spans ascend and do not overlap, in either."""

    n_wanted: int  # tokens
    prefix: int  # the first ones, equal in both
    spans: tuple[Span, ...]

    @property
    def n_carried(self) -> int:
        return sum(span.count for span in self.spans)

    def with_prefix(self, most: int) -> Plan:
        """The same with a prefix of at most `most` tokens; the rest of it is a span, if it is long enough."""
        n = self.prefix - most
        if n <= 0:
            return self
        rest = (Span(most, most, n),) if n >= MIN_SPAN else ()
        return Plan(self.n_wanted, most, (*rest, *self.spans))

    def missing(self) -> list[_Range]:
        """Token positions [start, end) of the wanted history that are neither prefix nor span."""
        found, at = [], self.prefix
        for span in self.spans:
            if span.new > at:
                found.append((at, span.new))
            at = span.new_end
        return [*found, (at, self.n_wanted)] if at < self.n_wanted else found


def match(stored: I32, wanted: I32, *, spans: bool = True) -> Plan:
    """stored, wanted: [n], [m] token ids. spans: False: only the common prefix is looked for."""
    prefix = _n_equal(stored, wanted, 0, 0)
    rest = min(len(stored), len(wanted)) - prefix
    found: list[Span] = []
    if spans and rest >= MIN_SPAN:
        found = _Search(stored, wanted).run((prefix, len(stored)), (prefix, len(wanted)))
    return Plan(len(wanted), prefix, tuple(found))


class _Search:
    def __init__(self, a: I32, b: I32) -> None:
        self._a, self._b = a, b
        self._hash_a, self._hash_b = _windows(a), _windows(b)

    def run(self, in_a: _Range, in_b: _Range) -> list[Span]:
        """Spans within two ranges, ascending; none of them can be made longer."""
        found: list[Span] = []
        todo = [(in_a, in_b, 0)]
        while todo:
            in_a, in_b, depth = todo.pop()
            if min(in_a[1] - in_a[0], in_b[1] - in_b[0]) < MIN_SPAN:
                continue
            here = self._unique(in_a, in_b) if depth < _MAX_DEPTH else []
            is_unique = bool(here)
            spans = self._grown(here or self._first(in_a, in_b), in_a, in_b)
            found += spans
            if is_unique:
                todo += [(*gap, depth + 1) for gap in _gaps(spans, in_a, in_b)]
        return sorted(found, key=lambda span: span.new)

    def _unique(self, in_a: _Range, in_b: _Range) -> list[Span]:
        """Runs of windows that stand once in either range, as many of them as can be in one order."""
        hashes_a, at_a = _once(self._hash_a, in_a)
        hashes_b, at_b = _once(self._hash_b, in_b)
        _, i, j = np.intersect1d(hashes_a, hashes_b, assume_unique=True, return_indices=True)
        order = np.argsort(at_b[j])
        old, new = at_a[i][order], at_b[j][order]
        if not len(old):
            return []
        starts = np.flatnonzero(np.r_[True, (np.diff(old) != 1) | (np.diff(new) != 1)])
        counts = np.diff(np.r_[starts, len(old)])
        runs = [
            Span(int(old[at]), int(new[at]), int(n) + MIN_SPAN - 1)
            for at, n in zip(starts, counts, strict=True)
        ]
        return _heaviest(runs)

    def _first(self, in_a: _Range, in_b: _Range) -> list[Span]:
        """Where windows stand more than once: one after the other, each at its first place in `a`."""
        first, last = in_a[0], in_a[1] - MIN_SPAN + 1
        order = np.argsort(self._hash_a[first:last], kind="stable") + first
        known = self._hash_a[order]
        mine = self._hash_b[in_b[0] : in_b[1] - MIN_SPAN + 1]
        places = np.searchsorted(known, mine)
        inside = places < len(known)
        inside[inside] = known[places[inside]] == mine[inside]
        runs: list[Span] = []
        at, end_b = first, in_b[0]
        for j in (np.flatnonzero(inside) + in_b[0]).tolist():
            if j < end_b:
                continue
            low = int(places[j - in_b[0]])
            high = int(np.searchsorted(known, self._hash_b[j], side="right"))
            place = low + bisect_left(order[low:high], at)  # positions of equal windows ascend
            if place == high:
                continue
            i = int(order[place])
            n = min(_n_equal(self._a, self._b, i, j), in_a[1] - i, in_b[1] - j)
            if n >= MIN_SPAN:
                runs.append(Span(i, j, n))
                at, end_b = i + n, j + n
        return runs

    def _grown(self, runs: list[Span], in_a: _Range, in_b: _Range) -> list[Span]:
        """The runs checked token by token, and as long as the ranges and their neighbours let them be."""
        grown: list[Span] = []
        end_a, end_b = in_a[0], in_b[0]
        for run in runs:
            skip = max(end_a - run.old, end_b - run.new, 0)
            if skip >= run.count:
                continue
            old, new = run.old + skip, run.new + skip
            back = _n_equal_before(self._a, self._b, old, new, min(old - end_a, new - end_b))
            old, new = old - back, new - back
            n = min(_n_equal(self._a, self._b, old, new), in_a[1] - old, in_b[1] - new)
            if n >= MIN_SPAN:
                grown.append(Span(old, new, n))
                end_a, end_b = old + n, new + n
        return grown


def _gaps(spans: list[Span], in_a: _Range, in_b: _Range) -> Iterator[tuple[_Range, _Range]]:
    """The ranges between spans."""
    a, b = in_a[0], in_b[0]
    for span in spans:
        yield (a, span.old), (b, span.new)
        a, b = span.old_end, span.new_end
    yield (a, in_a[1]), (b, in_b[1])


def _windows(tokens: I32) -> _U64:
    """Hashes of all windows of MIN_SPAN tokens, [n - MIN_SPAN + 1]: those of two halves make one."""
    hashes = _mixed(tokens.astype(np.uint32).astype(np.uint64))
    width = 1
    while width < MIN_SPAN:
        hashes = _mixed(hashes[:-width] * _ODD + hashes[width:]) if len(hashes) > width else hashes[:0]
        width *= 2
    return hashes


def _mixed(x: _U64) -> _U64:
    """A bijection in which every bit depends on all others (the end of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _once(hashes: _U64, within: _Range) -> tuple[_U64, _I64]:
    """Hashes that occur once among the windows of a range of tokens, ascending, and where."""
    first, last = within[0], within[1] - MIN_SPAN + 1
    values, at, counts = np.unique(hashes[first:last], return_index=True, return_counts=True)
    return values[counts == 1], at[counts == 1] + first


def _heaviest(runs: list[Span]) -> list[Span]:
    """The runs, ascending in `new`, that ascend in `old`, too, and hold the most tokens."""
    ranks = {old: i for i, old in enumerate(sorted(run.old for run in runs))}
    best: list[tuple[int, int]] = [(0, -1)] * (len(runs) + 1)  # a tree of maxima: (tokens, last run)
    before = []
    for number, run in enumerate(runs):
        rank, at, most = ranks[run.old], ranks[run.old], (0, -1)
        while at > 0:
            most = max(most, best[at])
            at -= at & -at
        before.append(most[1])
        weight = (most[0] + run.count, number)
        at = rank + 1
        while at <= len(runs):
            best[at] = max(best[at], weight)
            at += at & -at
    at, number = len(runs), -1
    most = (0, -1)
    while at > 0:
        most = max(most, best[at])
        at -= at & -at
    chain, number = [], most[1]
    while number >= 0:
        chain.append(runs[number])
        number = before[number]
    return chain[::-1]


def _n_equal(a: I32, b: I32, i: int, j: int) -> int:
    """How many tokens are equal from `a[i]` and `b[j]` on."""
    n, most = 0, min(len(a) - i, len(b) - j)
    while n < most:
        m = min(_CHUNK, most - n)
        differs = np.flatnonzero(a[i + n : i + n + m] != b[j + n : j + n + m])
        if len(differs):
            return n + int(differs[0])
        n += m
    return n


def _n_equal_before(a: I32, b: I32, i: int, j: int, most: int) -> int:
    """How many of the `most` tokens before `a[i]` and `b[j]` are equal, from these on backwards."""
    n = 0
    while n < most:
        m = min(_CHUNK, most - n)
        differs = np.flatnonzero(a[i - n - m : i - n] != b[j - n - m : j - n])
        if len(differs):
            return n + m - 1 - int(differs[-1])
        n += m
    return n
