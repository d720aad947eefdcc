"""Raw Q of tokens that lie before the query of a step: they are evaluated once more, over the canonical view
at their start, so what a recall finds with them is a function of history and query."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.cells import Cells
from kvmem_llama.engine.requests import Decoded, Phase, TaskGenerator

from .evaluating import evaluate_again
from .past_steps import PastStep
from .query import I64, runs
from .query_rows import QueryBuffer
from .recompute import as_it_is, reach, take_cells
from .session import Session


def look_back(
    session: Session, past: PastStep | None, earlier: I64, rows: QueryBuffer
) -> TaskGenerator[None]:
    """Adds the raw Q of the newest text of a user in `past`, at most `query_user` tokens of it, and of the
    tokens at the positions `earlier`, ascending. Their own rows stay as they are.

    The view is then another, but with first_pass = current. Raises Cancelled if the task is asked to stop.
    """
    if past is None and not len(earlier):
        return
    before = as_it_is(session) if session.settings.first_pass == "current" else None
    if past is not None and past.user is not None:
        yield from _add_user(session, past, rows)
    for start, end in runs(earlier):
        wanted = np.isin(np.arange(start, end), earlier)
        yield from _add(session, start, wanted, rows)
    if before is not None:
        yield from reach(session, before, rebuild=False)


def _add_user(session: Session, past: PastStep, rows: QueryBuffer) -> TaskGenerator[None]:
    """The rows are kept for the next step: while a tool is at work, many steps have no text of a user."""
    kept = session.user_rows
    made = (tuple(session.history.pins), session.options.query_user)  # over which view, and how many
    if kept is None or kept[0] is not past or kept[1] != made:
        own = QueryBuffer(session.layers)
        start, end = newest_of(past, session.options.query_user)
        yield from _add(session, start, np.ones(end - start, dtype=np.bool_), own)
        kept = session.user_rows = (past, made, own)
    rows.take(kept[2])


def newest_of(past: PastStep, n_most: int) -> tuple[int, int]:
    """Token positions [start, end) of the newest `n_most` tokens of a user's text."""
    assert past.user is not None
    start, end = past.user
    return max(start, end - n_most), end


def _add(session: Session, start: int, wanted: NDArray[np.bool_], rows: QueryBuffer) -> TaskGenerator[None]:
    """wanted: [n] which of the tokens from `start` on. As in reading, room is made where the canonical view
    makes it."""
    canonical, view, end = session.canonical, session.view, start + len(wanted)

    def keep(at: int, decoded: Decoded, _cells: Cells) -> None:
        rows.add(session.hooks, decoded.rows[wanted[at - start :][: decoded.n]])

    at = start
    while at < end:
        stop = min(end, canonical.next_room(at))
        target = session.target(canonical.view(at), canonical.epoch_end(at))
        yield from reach(session, target, rebuild=True)
        cells = yield from take_cells(session, stop - at, may_stop=True)
        try:
            yield from evaluate_again(session, at, cells, Phase.QUERY, keep, may_stop=True, capture_q=True)
        finally:
            view.drop_from(at)
        at = stop
