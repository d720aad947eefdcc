"""Refresh as text: the best selected blocks are evaluated anew as tokens of the view, in place of the rows
that are kept of them.

A block's record holds what it attended to when it was read. Where that hurts a model, the block's tokens are
evaluated over what stands before them in the view of this recall. The rows lie in cells only: records and
indexes stay as they are, and whatever view comes next rebuilds the blocks from their records.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.errors import RecordDamaged
from kvmem_llama.store.records import NotStored

from .evaluating import evaluate_again
from .planner import Placed, Target
from .recompute import reach, take_cells
from .session import Session

I64 = NDArray[np.int64]


def spans_to_refresh(best: I64, n_blocks: int) -> list[range]:
    """Runs of block numbers, at most `n_blocks` of them together, in history order.

    best: selected blocks from the best on. Adjacent ones make a span; the span with the best block comes
    first, then the one with the next best. Of a span that is too long the best block stays with what lies
    around it, the better neighbour first.
    """
    rank = {number: i for i, number in enumerate(best.tolist())}
    taken: set[int] = set()
    for number in rank:
        if number in taken or len(taken) >= n_blocks:
            continue
        first = last = number
        while len(taken) + last - first + 1 < n_blocks:
            around = [n for n in (first - 1, last + 1) if n in rank and n not in taken]
            if not around:
                break
            nearest = min(around, key=rank.__getitem__)
            first, last = min(first, nearest), max(last, nearest)
        taken.update(range(first, last + 1))
    numbers = sorted(taken)
    edges = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1), len(numbers)]
    return [range(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(edges) if b > a]


def refresh(session: Session, target: Target, spans: list[range], *, may_stop: bool) -> TaskGenerator[None]:
    """Evaluates the blocks of `spans`, numbers in history order, in the view, which is `target`, and rebuilds
    what comes after them. Afterwards the view is `target` again.

    may_stop: see recompute.reach. Where rows of the other blocks are lost in between, the view is `target`
    without a refreshed block.
    """
    view, block = session.view, session.budget.block
    ends = [*(span.start * block for span in spans[1:]), None]
    view.drop_from(spans[0].start * block)
    try:
        for span, end in zip(spans, ends, strict=True):
            start, stop = span.start * block, span.stop * block
            cells = yield from take_cells(session, stop - start, may_stop=may_stop)
            yield from evaluate_again(session, start, cells, Phase.REPLAY, may_stop=may_stop, refreshed=True)
            view.grow(_between(target, stop, end))
    except (NotStored, RecordDamaged):
        yield from reach(session, target, rebuild=False, may_stop=may_stop)


def _between(target: Target, start: int, end: int | None) -> list[Placed]:
    """Parts that begin at or after token `start` and before `end`."""
    return [p for p in target.placed if start <= p.part.start and (end is None or p.part.start < end)]
