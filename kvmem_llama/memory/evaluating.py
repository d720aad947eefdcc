"""Evaluating tokens of the history again, at the end of the view; the caller keeps of it what it wants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvmem_llama.engine.cells import Cells
from kvmem_llama.engine.requests import Decode, Decoded, Phase, TaskGenerator
from kvmem_llama.errors import Cancelled

from .session import Session

Seen = Callable[[int, Decoded, Cells], None]
"""(token position of the first token, what the batch did, its cells): before the next batch."""


def evaluate_again(
    session: Session,
    start: int,
    cells: Cells,
    phase: Phase,
    seen: Seen | None = None,
    *,
    may_stop: bool,
    refreshed: bool = False,
    capture_q: bool = False,
) -> TaskGenerator[None]:
    """Evaluates the tokens from `start` on, one in each of `cells`, which were taken for them.

    may_stop: there is no answer to keep yet, so a task that is asked to stop is cancelled. refreshed: see
    View.extend. Whatever is raised, cells that hold nothing are given back; the others are in the view.
    """
    history, view = session.history, session.view
    tokens = history.tokens(start, start + len(cells))
    first = view.position_of(start)
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    n = 0
    try:
        while n < len(tokens):
            if may_stop and session.link.stop_requested:
                raise Cancelled()
            decoded = yield Decode(view.seq, tokens[n:], positions[n:], cells[n:], phase, capture_q)
            here = cells[n : n + decoded.n]
            view.extend(start + n, here, refreshed=refreshed)
            if seen is not None:
                seen(start + n, decoded, here)
            n += decoded.n
    finally:
        view.give_back(cells[n:])
