"""What a recall keeps whatever the scores are, and how many blocks are left to select. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .budget import Budget
from .canonical import Canonical, Part, floor_to
from .positions import TokenPos
from .report import Why


@dataclass(frozen=True, slots=True)
class Frame:
    """Blocks by their first token. Tokens from `replay_start` on are evaluated after the recall."""

    block: int
    why: dict[int, Why]  # the blocks that are kept
    replay_start: TokenPos
    n_select: int  # blocks

    def candidates(self) -> NDArray[np.int64]:
        """Numbers of the complete blocks before the replay that are not kept anyway, ascending."""
        is_candidate = np.ones(self.replay_start // self.block, dtype=np.bool_)
        kept = np.array(list(self.why), dtype=np.int64) // self.block
        is_candidate[kept[kept < len(is_candidate)]] = False
        return np.flatnonzero(is_candidate)

    def parts(self, selected: NDArray[np.int64]) -> tuple[Part, ...]:
        """The target view before the replay, in history order. selected: block numbers."""
        starts = sorted({*self.why, *(selected * self.block).tolist()})
        counts = ((start, min(self.block, self.replay_start - start)) for start in starts)
        return tuple(Part(TokenPos(start), count) for start, count in counts if count > 0)


def frame_of_query(budget: Budget, canonical: Canonical, query_start: int, n_query: int) -> Frame:
    """The recall after the first pass of a query: sink, pins, recent, then the query with its reserve."""
    why, n_free, _ = _keep(budget, canonical, query_start, query=(query_start, query_start), n_after=n_query)
    return Frame(budget.block, why, TokenPos(query_start), max(n_free, 0) // budget.block)


def frame_of_answer(budget: Budget, canonical: Canonical, query: tuple[int, int], n_tokens: int) -> Frame:
    """The recall in mid-answer, when the view is full: the query's blocks stay as well, and the newest
    tokens of the answer are replayed. query: token positions [start, end)."""
    why, n_free, recent_start = _keep(budget, canonical, n_tokens, query=query, n_after=0)
    replay_start = max(n_tokens - budget.n_query_tail, query[1], recent_start)
    return Frame(budget.block, why, TokenPos(replay_start), max(n_free, 0) // budget.block)


def _keep(
    budget: Budget, canonical: Canonical, t: int, *, query: tuple[int, int], n_after: int
) -> tuple[dict[int, Why], int, int]:
    """Blocks kept of the tokens before `t`, tokens left beside them and the reserve, start of recent.

    Recent shrinks by whole blocks, the oldest first, until the rest fits. The block that `t` lies in is
    always kept. What is left can be negative only for a mid-answer recall in a view without a block to
    spare; the reserve then gives way, and a block of it remains (Budget.check_step).
    """
    block = budget.block
    newest = floor_to(block, t)
    fixed: dict[int, Why] = dict.fromkeys(range(floor_to(block, query[0]), query[1], block), "query")
    fixed |= dict.fromkeys((pin for pin in canonical.pins if pin < t), "pinned")
    fixed |= dict.fromkeys(range(0, min(canonical.n_sink, t), block), "sink")
    n_kept = sum(min(block, t - start) for start in fixed) + (0 if newest in fixed else t - newest)
    n_free = budget.n_view - n_kept - n_after - budget.n_reserve
    recent_start, oldest = newest, max(newest - budget.n_recent, 0)
    while recent_start > oldest:
        n_more = 0 if recent_start - block in fixed else block
        if n_free < n_more:
            break
        recent_start -= block
        n_free -= n_more
    why: dict[int, Why] = dict.fromkeys(range(recent_start, t, block), "recent")
    return why | fixed, n_free, recent_start
