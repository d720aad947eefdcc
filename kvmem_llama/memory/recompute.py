"""Blocks whose rows are lost, by damage or to the tokens tier: computed again when they are wanted.

A block is evaluated over the canonical view at its start, as far as the rows of that are still there, so it
is not a reconstruction of what it was; the journal and the report mark it.
"""

from __future__ import annotations

import contextlib

import numpy as np

from kvmem_llama.engine.cells import Cells
from kvmem_llama.engine.requests import Decoded, Phase, TaskGenerator
from kvmem_llama.errors import RecordDamaged
from kvmem_llama.store.records import NotStored

from .evaluating import evaluate_again
from .history import History
from .planner import Placed, Target
from .session import Session


def prepare(session: Session) -> TaskGenerator[None]:
    """Before a step: what it cannot do without is computed again. That is the partial last block, which is
    about to grow, and blocks that can be neither scored nor read."""
    history = session.history
    for number in list(history.unscored):
        block = history.table[number]
        yield from _recompute(session, block.start)
        _let_go(history, block.start)
    last = history.table.at(history.table.n_complete * history.block)
    if last is not None:  # it is partial
        try:
            history.rows(last.start)
        except (NotStored, RecordDamaged):
            yield from _recompute(session, last.start)


def reach(
    session: Session, target: Target, *, rebuild: bool, may_stop: bool = True
) -> TaskGenerator[frozenset[int]]:
    """Makes the view `target`, by the cheapest plan -> first tokens of the blocks that had to be computed
    again. Then everything that was in the view has gone through records.

    may_stop: there is no answer to keep yet, so a task that is asked to stop is cancelled.
    """
    recomputed, _ = yield from _reach(session, target, 0, rebuild=rebuild, may_stop=may_stop)
    return recomputed


def take_cells(session: Session, n: int, *, may_stop: bool) -> TaskGenerator[Cells]:
    """As View.take_cells. Where that has to rebuild the view in other cells and rows of it are lost, these
    are computed again. may_stop: see `reach`."""
    view = session.view
    if not view.rules.exact:
        return view.take_cells(n)  # any will do
    target = as_it_is(session)
    with contextlib.suppress(NotStored, RecordDamaged):  # then nothing is left of the view
        return view.take_cells(n)
    _, cells = yield from _reach(session, target, n, rebuild=True, may_stop=may_stop)
    return cells


def as_it_is(session: Session) -> Target:
    """The view that there is, as a target: blocks that were refreshed become those that are kept of them."""
    view = session.view
    return Target(tuple(Placed(r.part, r.position) for r in view), view.original)


def _reach(
    session: Session, target: Target, n: int, *, rebuild: bool, may_stop: bool
) -> TaskGenerator[tuple[frozenset[int], Cells]]:
    """As `reach`, and takes cells for the next `n` tokens."""
    history, view = session.history, session.view
    done: set[int] = set()
    try:
        while True:
            lost: list[int] = []
            if history.ledger is not None:
                lost = history.lost(p.part.start for p in view.plan(target, rebuild=rebuild).write)
            if not lost:
                try:
                    session.go_to(target, rebuild=rebuild)
                    return frozenset(done), view.take_cells(n)
                except (NotStored, RecordDamaged) as error:
                    lost = _lost_of(session, error, done)
            for start in lost:
                yield from _recompute(session, start, may_stop=may_stop)
                done.add(start)
    finally:
        for start in done:
            _let_go(history, start)


def _recompute(session: Session, start: int, *, may_stop: bool = True) -> TaskGenerator[None]:
    """Evaluates the block at token `start` again; its rows are then in `history.recomputed`."""
    history, view, canonical = session.history, session.view, session.canonical
    block = history.table.at(start)
    assert block is not None
    whole = canonical.view(start)
    gone = set(history.lost(part.start for part in whole))
    while True:
        parts = [part for part in whole if part.start not in gone]
        try:
            session.go_to(session.target(parts, canonical.epoch_end(start)), rebuild=True)
            cells = view.take_cells(block.count)
            break
        except (NotStored, RecordDamaged) as error:
            gone.update(_lost_of(session, error, gone))
    record = np.zeros(session.hooks.layout.nbytes, np.uint8)

    def keep(at: int, decoded: Decoded, cells: Cells) -> None:
        session.hooks.stage_out(record, at - start, decoded.rows, cells)

    try:
        yield from evaluate_again(session, start, cells, Phase.REPLAY, keep, may_stop=may_stop)
    finally:
        view.drop_from(start)
    history.recompute(start, record)
    session.n_recomputed += 1


def _let_go(history: History, start: int) -> None:
    """The rows of a block that was computed again have been used. Those of the partial last block are wanted
    until the step has copied them."""
    block = history.table.at(start)
    if block is None or block.count == history.block:
        history.recomputed.pop(start, None)


def _lost_of(session: Session, error: NotStored | RecordDamaged, known: set[int]) -> list[int]:
    """First tokens of the blocks that a view could not be made of. Raises `error` if there is none that is
    not known."""
    lost = [start for start in session.history.starts_of(error.refs) if start not in known]
    if not lost:
        raise error
    return lost
