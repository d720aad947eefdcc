"""Which blocks a query finds: by Mean-K, by words, or by both with a share of the selection for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.native.layout import I32
from kvmem_llama.settings import Settings

from .index import MeanKIndex
from .scoring import BlockScorer, QueryRows
from .selector import order
from .texts import BlockTexts

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

SPREAD: Final = 0.5
"""Share of a block's score by words that its neighbours get: 32 tokens are less than most statements."""

SHARES: Final[Mapping[str, Mapping[str, float]]] = {
    "mean_k": {"mean_k": 1.0},
    "lexical": {"lexical": 1.0},
    "fused": {"lexical": 0.75, "mean_k": 0.25},
}
"""By name of a score: the share of the selection that is reserved for each channel (docs/memory.md)."""


class Searchable(Protocol):
    """What a history keeps to be searched."""

    @property
    def index(self) -> MeanKIndex: ...

    @property
    def texts(self) -> BlockTexts: ...

    @property
    def n_complete(self) -> int:
        """Complete blocks."""
        ...

    def tokens(self, start: int = 0, end: int | None = None) -> I32: ...


@dataclass(frozen=True, slots=True)
class Query:
    """What a recall looks for."""

    rows: QueryRows  # of its text tokens
    text: str  # of the same tokens


@dataclass(frozen=True, slots=True)
class Ranking:
    """What was found among the candidates."""

    candidates: I64  # block numbers, ascending
    best: I64  # block numbers from the best on
    scores: F64  # of these; of several channels, the part that a block has of all scores
    orders: Mapping[str, I64] = field(default_factory=dict)
    """By channel: indices of the candidates that it gave a score, from the best on."""

    @property
    def selected(self) -> I64:
        """The best ones in history order."""
        return np.sort(self.best)

    def ranks(self) -> dict[int, dict[str, int]]:
        """Of each of the best: its rank, 1 for the first, in every channel that gave it a score."""
        out: dict[int, dict[str, int]] = {int(number): {} for number in self.best}
        where = np.searchsorted(self.candidates, self.best)
        for name, best_first in self.orders.items():
            rank = np.zeros(len(self.candidates), np.int64)
            rank[best_first] = np.arange(1, len(best_first) + 1)
            for number, i in zip(self.best.tolist(), where, strict=True):
                if rank[i]:
                    out[number][name] = int(rank[i])
        return out


class Retriever:
    """Ranks blocks. Equal histories and queries give equal rankings. Owner thread only."""

    def __init__(self, scorer: BlockScorer, shares: Mapping[str, float]) -> None:
        """shares: of the selection, by channel; they sum up to 1."""
        self._scorer: Final = scorer
        self._shares: Final = shares
        self._channels: Final[dict[str, Callable[[Query, Searchable, I64], F64]]] = {
            "mean_k": self._mean_k,
            "lexical": _lexical,
        }

    @classmethod
    def of(cls, settings: Settings, scorer: BlockScorer) -> Retriever:
        return cls(scorer, SHARES[settings.score])

    @property
    def name(self) -> str:
        """What steps remember: the channels and the loops behind them."""
        return "+".join(self._scorer.name if name == "mean_k" else name for name in self._shares)

    def rank(self, query: Query, history: Searchable, candidates: I64, n: int) -> Ranking:
        """The best `n` of the candidates, or all of them if there are fewer.

        candidates: numbers of complete blocks, strictly ascending.
        """
        if not len(candidates) or n <= 0:
            return Ranking(candidates, candidates[:0], np.zeros(0))
        channels = {name: self._channels[name](query, history, candidates) for name in self._shares}
        orders = {
            name: order(scores, candidates)[: np.count_nonzero(scores > 0)]
            for name, scores in channels.items()
        }
        best = interleave(list(orders.values()), list(self._shares.values()), n)
        if len(best) < min(n, len(candidates)):  # nothing speaks for the others: the newest
            rest = np.setdiff1d(np.arange(len(candidates)), best)[::-1]
            best = np.concatenate([best, rest[: n - len(best)]])
        return Ranking(candidates, candidates[best], self._total(channels)[best], orders)

    def _total(self, channels: Mapping[str, F64]) -> F64:
        if len(channels) == 1:
            return next(iter(channels.values()))
        parts = [self._shares[name] * scores / (scores.sum() or 1.0) for name, scores in channels.items()]
        total: F64 = np.sum(parts, axis=0)
        return total

    def _mean_k(self, query: Query, history: Searchable, candidates: I64) -> F64:
        return self._scorer.score(query.rows, history.index, candidates)


def _lexical(query: Query, history: Searchable, candidates: I64) -> F64:
    return spread(history.texts.scores(query.text, history.tokens, history.n_complete))[candidates]


def spread(scores: F64) -> F64:
    """Every block gets a share of its neighbours' scores."""
    out = scores.copy()
    out[1:] += SPREAD * scores[:-1]
    out[:-1] += SPREAD * scores[1:]
    return out


def interleave(orders: Sequence[I64], shares: Sequence[float], n: int) -> I64:
    """The first `n` of several orders of the same things, each order with its share of every beginning of
    the result. What another order has brought already costs an order nothing."""
    out: list[int] = []
    taken = set[int]()
    at, n_of = [0] * len(orders), [0] * len(orders)
    while len(out) < n:
        for i, indices in enumerate(orders):
            while at[i] < len(indices) and int(indices[at[i]]) in taken:
                at[i] += 1
        alive = [i for i, indices in enumerate(orders) if at[i] < len(indices)]
        if not alive:
            break
        i = max(alive, key=lambda i: shares[i] * (len(out) + 1) - n_of[i])
        found = int(orders[i][at[i]])
        out.append(found)
        taken.add(found)
        n_of[i] += 1
    return np.array(out, dtype=np.int64)
