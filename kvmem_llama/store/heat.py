"""How warm records are, and the policies that rank them: who is evicted, who is let in.

Time is counted in recalls, never in seconds: a clock that jumps changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

NEW: Final = 2.0
"""Recent retrievals that a new record is credited with: the newest history is wanted next, but has had no
chance yet; a block that recalls want again and again stays warmer."""

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]


class Uses:
    """What is known of the use of records, by slot number. Arrays grow by doubling. Not locked."""

    def __init__(self, half_life: float = 8.0) -> None:
        """half_life: recalls after which a retrieval counts half."""
        self.half_life = half_life
        self.now = 0  # recalls so far
        self.sequence = 0  # uses of any kind so far
        self._recent: F64 = np.zeros(0)  # decayed number of retrievals, as of ...
        self._as_of: I64 = np.zeros(0, np.int64)  # ... this recall
        self._total: I64 = np.zeros(0, np.int64)  # retrievals ever
        self._last: I64 = np.zeros(0, np.int64)  # sequence number of the last use of any kind

    def born(self, slot: int, recent: float = NEW, total: int = 0) -> None:
        """A record comes into being, or to this process."""
        if slot >= len(self._last):
            n_more = max(slot + 1, 2 * len(self._last), 256) - len(self._last)
            self._recent = np.concatenate([self._recent, np.zeros(n_more)])
            self._as_of = np.concatenate([self._as_of, np.zeros(n_more, np.int64)])
            self._total = np.concatenate([self._total, np.zeros(n_more, np.int64)])
            self._last = np.concatenate([self._last, np.zeros(n_more, np.int64)])
        self._recent[slot] = recent
        self._as_of[slot] = self.now
        self._total[slot] = total
        self.used(slot)

    def used(self, slot: int) -> None:
        """A record was handed out or written. Says nothing about its worth."""
        self.sequence += 1
        self._last[slot] = self.sequence

    def retrieved(self, slots: Sequence[int]) -> None:
        """A recall selected these records, each named once."""
        self.now += 1
        at = np.asarray(slots, dtype=np.int64)
        self._recent[at] = self.recent(at) + 1
        self._as_of[at] = self.now
        self._total[at] += 1
        self._last[at] = self.sequence + 1 + np.arange(len(at))
        self.sequence += len(at)

    def recent(self, slots: I64) -> F64:
        """Decayed number of retrievals, [n]."""
        age = self.now - self._as_of[slots]
        decayed: F64 = self._recent[slots] * np.exp2(-age / self.half_life)
        return decayed

    def total(self, slots: I64) -> I64:
        """Number of retrievals ever, [n]."""
        return self._total[slots]

    def last_of(self, slot: int) -> int:
        """Sequence number of the last use of one record."""
        return int(self._last[slot])

    def last(self, slots: I64) -> I64:
        """Sequence numbers of the last uses, [n]."""
        return self._last[slots]


class Policy(Protocol):
    """Ranks records. Between equal ranks the one used longest ago is the colder."""

    @property
    def name(self) -> str: ...

    def ranks(self, uses: Uses, slots: I64) -> F64:
        """A number for each record, [n]; the lowest is the coldest."""
        ...


@dataclass(frozen=True)
class Heat:
    """Recent and cumulative retrieval together: a record that was wanted often survives a spell without."""

    name: str = "heat"
    weight: float = 0.5  # of one doubling of all retrievals ever, in recent retrievals

    def ranks(self, uses: Uses, slots: I64) -> F64:
        ranks: F64 = uses.recent(slots) + self.weight * np.log2(1 + uses.total(slots))
        return ranks


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """The usual policy, for comparison."""

    name: str = "lru"

    def ranks(self, uses: Uses, slots: I64) -> F64:
        return uses.last(slots).astype(np.float64)


def coldest(policy: Policy, uses: Uses, slots: I64, n: int) -> list[int]:
    """The `n` coldest of the records, coldest first."""
    order = np.lexsort((uses.last(slots), policy.ranks(uses, slots)))
    return [int(slot) for slot in slots[order[:n]]]
