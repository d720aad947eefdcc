"""Evaluating tokens of the history at the end of the view."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.requests import Decode, Phase, TaskGenerator
from kvmem_llama.errors import Cancelled
from kvmem_llama.native.layout import F32

from .query_rows import QueryBuffer
from .recompute import take_cells
from .session import Session


def feed(
    session: Session,
    start: int,
    end: int,
    phase: Phase,
    *,
    logits: bool = False,
    query: QueryBuffer | None = None,
    scored: NDArray[np.bool_] | None = None,
    done: Callable[[int], None] | None = None,
) -> TaskGenerator[F32 | None]:
    """Evaluates the tokens start .. end-1 of the history at the end of the view -> logits of the last
    one if asked for, valid until the next request.

    query: takes the raw Q of the tokens where `scored` ([end - start]; None: all) is true.
    done: called with the token position reached, after every batch.
    Raises Cancelled, too, if the task was asked to stop before there is an answer to keep.
    """
    history, view = session.history, session.view
    may_stop = phase in (Phase.READ, Phase.QUERY)
    cells = yield from take_cells(session, end - start, may_stop=may_stop)
    tokens = history.tokens(start, end)
    first = view.position_of(start)
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    n = 0
    last: F32 | None = None
    try:
        while n < len(tokens):
            if may_stop and session.link.stop_requested:
                raise Cancelled()
            decoded = yield Decode(
                view.seq, tokens[n:], positions[n:], cells[n:], phase, query is not None, logits
            )
            here = slice(n, n + decoded.n)
            view.extend(start + n, cells[here])
            n += decoded.n
            history.stage(session.hooks, start + here.start, decoded.rows, cells[here])
            if query is not None:
                query.add(session.hooks, decoded.rows if scored is None else decoded.rows[scored[here]])
            last = decoded.logits
            if done is not None:
                done(start + n)
    finally:
        if n < len(tokens):
            view.give_back(cells[n:])
    return last
