"""Blocks whose rows are lost, by damage or to the tokens tier: computed again when they are wanted.

A block is evaluated over the canonical view at its start, as far as the rows of that are still there, so it
is not a reconstruction of what it was; the journal and the report mark it.
"""

from __future__ import annotations

import contextlib

import numpy as np

from kvmem_llama.engine.cells import Cells
from kvmem_llama.engine.requests import Decode, Phase, TaskGenerator
from kvmem_llama.errors import Cancelled, RecordDamaged, StoreError
from kvmem_llama.store.records import NotStored

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
        history.index.replace(number, history.rows(block.start), block.count)
        history.unscored.remove(number)
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
    target = Target(tuple(Placed(r.part, r.position) for r in view), view.original)
    with contextlib.suppress(NotStored, RecordDamaged):  # then nothing is left of the view
        return view.take_cells(n)
    _, cells = yield from _reach(session, target, n, rebuild=True, may_stop=may_stop)
    return cells


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
    tokens = history.tokens(start, block.end)
    while True:
        parts = [part for part in whole if part.start not in gone]
        try:
            session.go_to(session.target(parts, canonical.epoch_end(start)), rebuild=True)
            cells = view.take_cells(len(tokens))
            break
        except (NotStored, RecordDamaged) as error:
            gone.update(_lost_of(session, error, gone))
    first = view.position_of(start)
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    record = np.zeros(session.hooks.layout.nbytes, np.uint8)
    n = 0
    try:
        while n < len(tokens):
            if may_stop and session.link.stop_requested:
                raise Cancelled()
            decoded = yield Decode(view.seq, tokens[n:], positions[n:], cells[n:], Phase.REPLAY)
            here = slice(n, n + decoded.n)
            view.extend(start + n, cells[here])
            n += decoded.n
            session.hooks.stage_out(record, here.start, decoded.rows, cells[here])
    finally:
        view.give_back(cells[n:])
        view.drop_from(start)
    history.recomputed[start] = record
    session.n_recomputed += 1
    with contextlib.suppress(StoreError):  # it is used now, and computed again when it is wanted again
        history.store.restore(block.ref, record)
        if history.ledger is not None and block.end <= history.n_committed:  # it knows of no others
            history.ledger.recomputed(start // history.block, block.ref)


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
