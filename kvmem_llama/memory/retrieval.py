"""Which blocks a query finds: by one channel, or by several with a share of the selection for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.native.layout import I32, LayerInfo
from kvmem_llama.settings import Settings

from .channels import SPREAD, Channels, shares_for
from .heads import HeadGroup, head_groups
from .indexes import Indexes
from .scoring import BlockScorer, QueryRows
from .scoring.tokens import HeadScorer
from .scoring.two_stage import narrowed
from .selector import order
from .texts import BlockTexts

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Searchable(Protocol):
    """What a history keeps to be searched."""

    @property
    def indexes(self) -> Indexes: ...

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

    rows: QueryRows  # of its text tokens, in the layers that some channel reads
    text: str  # of the same tokens


@dataclass(frozen=True, slots=True)
class Ranking:
    """What was found among the candidates."""

    candidates: I64  # block numbers, ascending
    best: I64  # block numbers from the best on
    scores: F64  # of these; of several channels, the part that a block has of all scores
    orders: Mapping[str, I64] = field(default_factory=dict)
    """By channel: indices of the candidates that it gave a score, from the best on."""
    own: Mapping[str, F64] = field(default_factory=dict)
    """By channel: the scores of the candidates without what their neighbours gave them; 0: none."""
    changed: frozenset[str] = frozenset()
    """Channels whose order is not that of the candidates' own scores."""
    held: frozenset[int] = frozenset()
    """Block numbers among the best that are there only because they were in the view before."""

    @property
    def selected(self) -> I64:
        """The best ones in history order."""
        return np.sort(self.best)

    def ranks(self) -> dict[int, dict[str, int]]:
        """Of each of the best: its rank, 1 for the first, in every channel that gave it a score."""
        return self._ranks(self.orders)

    def own_ranks(self) -> dict[int, dict[str, int]]:
        """As `ranks`, by the block's own score alone."""
        orders = {
            name: _found(scores, self.candidates) if name in self.changed else self.orders[name]
            for name, scores in self.own.items()
        }
        return self._ranks(orders)

    def _ranks(self, orders: Mapping[str, I64]) -> dict[int, dict[str, int]]:
        out: dict[int, dict[str, int]] = {int(number): {} for number in self.best}
        where = np.searchsorted(self.candidates, self.best)
        for name, best_first in orders.items():
            rank = np.zeros(len(self.candidates), np.int64)
            rank[best_first] = np.arange(1, len(best_first) + 1)
            for number, i in zip(self.best.tolist(), where, strict=True):
                if rank[i]:
                    out[number][name] = int(rank[i])
        return out


class Retriever:
    """Ranks blocks. Equal histories and queries give equal rankings. Owner thread only."""

    def __init__(
        self,
        channels: Channels,
        scorer: BlockScorer,
        head_scorer: HeadScorer | None = None,
        layers: Sequence[LayerInfo] = (),
        stickiness: float = 0.0,
        scan_limit: int = 0,
    ) -> None:
        """head_scorer, layers: only for the channel `heads`; layers as the hooks report them.
        stickiness: share of its score that a block in the view gets on top. scan_limit: most blocks that
        `heads` scores exactly, see scoring.two_stage; 0: all.

        Raises InvalidOption if the model does not have the heads of its calibration.
        """
        self.channels: Final = channels
        self._scorer: Final = scorer
        self._head_scorer: Final = head_scorer
        self._stickiness: Final = stickiness
        self._scan_limit: Final = scan_limit
        self._groups: Final[tuple[HeadGroup, ...]] = (
            () if channels.calibration is None else head_groups(channels.calibration, layers)
        )

    @property
    def name(self) -> str:
        """What steps remember: the channels, and the loops or the calibration behind them."""
        names = "+".join(self._scorer.name if name == "mean_k" else name for name in self.channels.shares)
        return f"{names}@{self.channels.calibration_id}" if self.channels.calibration else names

    def rank(
        self,
        query: Query,
        history: Searchable,
        candidates: I64,
        n: int,
        in_view: Iterable[int] = (),
        options: Settings | None = None,
    ) -> Ranking:
        """The best `n` of the candidates, or all of them if there are fewer.

        candidates: numbers of complete blocks, strictly ascending. in_view: numbers of blocks that were
        selected before; with stickiness they get a bonus in every channel, and displace no block whose score
        is more than that above theirs. options: `stickiness` and `scan_limit` of this search; None: those of
        the retriever.
        """
        stickiness = self._stickiness if options is None else options.stickiness
        scan_limit = self._scan_limit if options is None else options.scan_limit
        if not len(candidates) or n <= 0:
            return Ranking(candidates, candidates[:0], np.zeros(0))
        own, known = self._own(query, history, candidates, scan_limit)
        channels = {name: self._spread(name, every)[candidates] for name, every in own.items()}
        shares = shares_for(self.channels.shares, known)
        orders, best = self._best(channels, candidates, shares, n)
        changed = {name for name in own if self.channels.spread.get(name)}
        held: frozenset[int] = frozenset()
        stays = np.isin(candidates, np.fromiter(in_view, np.int64)) if stickiness else None
        if stays is not None and stays.any():
            without = set(best.tolist())
            for scores in channels.values():
                scores[stays] *= 1 + stickiness
            orders, best = self._best(channels, candidates, shares, n)
            changed = set(own)
            held = frozenset(int(candidates[i]) for i in best if i not in without and stays[i])
        return Ranking(
            candidates,
            candidates[best],
            self._total(channels)[best],
            orders,
            {name: every[candidates] for name, every in own.items()},
            frozenset(changed),
            held,
        )

    def _own(
        self, query: Query, history: Searchable, candidates: I64, scan_limit: int
    ) -> tuple[dict[str, F64], float]:
        """By channel: the scores of all blocks up to the last candidate or beyond, 0 where it has none; and
        how much of the query, by the weight of its words, the best candidate holds: 0 .. 1."""
        own: dict[str, F64] = {}
        known = 1.0
        if "lexical" in self.channels:
            own["lexical"], most = history.texts.search(query.text, history.tokens, history.n_complete)
            known = float(own["lexical"][candidates].max()) / (most or 1.0)
        if "mean_k" in self.channels:
            own["mean_k"] = _of_all(self._mean_k(query, history, candidates), candidates)
        if "heads" in self.channels:
            heads = self._heads(query, history, candidates, own.get("lexical"), scan_limit)
            own["heads"] = _of_all(heads, candidates)
        return {name: own[name] for name in self.channels.shares}, known

    def _best(
        self, channels: Mapping[str, F64], candidates: I64, shares: Mapping[str, float], n: int
    ) -> tuple[dict[str, I64], I64]:
        """Indices of the candidates: by channel from the best on, and the best `n` of all channels."""
        orders = {name: _found(scores, candidates) for name, scores in channels.items()}
        best = fuse(channels, orders, shares, self.channels.weights, n)
        if len(best) < min(n, len(candidates)):  # nothing speaks for the others: the newest
            rest = np.setdiff1d(np.arange(len(candidates)), best)[::-1]
            best = np.concatenate([best, rest[: n - len(best)]])
        return orders, best

    def _total(self, channels: Mapping[str, F64]) -> F64:
        if len(channels) == 1:
            return next(iter(channels.values()))
        weights = self.channels.weights
        parts = [weights.get(name, 1.0) * scores / (scores.sum() or 1.0) for name, scores in channels.items()]
        total: F64 = np.sum(parts, axis=0)
        return total

    def _mean_k(self, query: Query, history: Searchable, candidates: I64) -> F64:
        index = history.indexes.mean_k
        assert index is not None, "the history has no Mean-K index"
        rows = query.rows.only([layer.il for layer in index.layers])
        return self._scorer.score(rows, index, candidates)

    def _heads(
        self, query: Query, history: Searchable, candidates: I64, words: F64 | None, scan_limit: int
    ) -> F64:
        """words: scores of all blocks by words, for a history that is too long to be scored exactly."""
        index = history.indexes.tokens
        assert index is not None and self._head_scorer is not None, "the history has no token index"
        scores, with_row = np.zeros(len(candidates)), candidates[index.counts[candidates] > 0]
        rows = [group.rows(query.rows) for group in self._groups]
        if 0 < scan_limit < len(with_row):
            hints = with_row[:0] if words is None else with_row[_found(words[with_row], with_row)]
            with_row = narrowed(self._head_scorer, rows, index, with_row, scan_limit, hints)
        scores[np.searchsorted(candidates, with_row)] = self._head_scorer.score(rows, index, with_row)
        return scores

    def _spread(self, channel: str, every: F64) -> F64:
        """Scores that may be changed: [n], one per block."""
        share = self.channels.spread.get(channel, 0.0)
        return spread(every, share) if share else every.copy()


def _of_all(scores: F64, candidates: I64) -> F64:
    """Scores of the candidates among those of all blocks up to the last of them, 0 for the others."""
    every = np.zeros(int(candidates[-1]) + 1)
    every[candidates] = scores
    return every


def _found(scores: F64, candidates: I64) -> I64:
    """Indices of the candidates with a score, from the best on."""
    return order(scores, candidates)[: np.count_nonzero(scores > 0)]


def spread(scores: F64, share: float = SPREAD["lexical"]) -> F64:
    """Every block gets this share of the score of each of its neighbours."""
    out = scores.copy()
    out[1:] += share * scores[:-1]
    out[:-1] += share * scores[1:]
    return out


def fuse(
    scores: Mapping[str, F64],
    orders: Mapping[str, I64],
    shares: Mapping[str, float],
    weights: Mapping[str, float],
    n: int,
) -> I64:
    """The best `n` candidates of several channels, from the best on.

    Every channel has its share of the selection to itself, so that what it alone finds is found. What the
    shares leave of 1 goes by the sum of all channels' scores, each in parts of its best one and with its
    weight: there those come first that several channels find.

    scores: by channel, of the candidates. orders: by channel, indices of the candidates with a score.
    """
    together = 1 - sum(shares.values())
    if together < 1e-6:
        return interleave(list(orders.values()), [shares[name] for name in orders], n)
    total = np.sum(
        [weights.get(name, 1.0) * one / (one.max() or 1.0) for name, one in scores.items()], axis=0
    )
    joint = _found(total, np.arange(len(total)))
    return interleave([joint, *orders.values()], [together, *(shares[name] for name in orders)], n)


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
