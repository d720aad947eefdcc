"""What must hold between two steps, and before every decode. Used by the tests after every step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .session import Session


def check(session: Session) -> None:
    """Raises AssertionError, with what is wrong, if the books of a session contradict each other."""
    check_history(session)
    check_view(session)
    check_cells(session)


def check_history(session: Session) -> None:
    history = session.history
    table, store = history.table, history.store
    assert table.n_tokens == history.n_tokens == history.n_committed, (
        "the table does not end with the history"
    )
    for index in history.indexes:
        assert len(index) == len(table), f"{len(index)} rows of an index, {len(table)} blocks"
    for number, block in enumerate(table):
        assert block.start == number * history.block
        assert store.refcount(block.ref) > 0, f"the record of block {number} is gone"


def check_view(session: Session) -> None:
    """Parts in history order, each once, at positions of one kind, none beyond the history."""
    view, budget = session.view, session.budget
    residents = list(view)
    assert view.n_tokens == sum(r.part.count for r in residents)
    assert view.n_tokens <= budget.n_view, f"{view.n_tokens} tokens in a view of {budget.n_view}"
    assert view.slack.n_tokens <= budget.n_slack
    assert not any(entry.resident.refreshed for entry in view.slack), "hidden rows that are on no record"
    for before, after in pairwise(residents):
        assert before.part.end <= after.part.start, "parts overlap"
        assert before.part.count == budget.block, f"a gap in the block at {before.part.start}"
    if not residents:
        return
    assert view.end <= session.history.n_tokens
    packed = np.cumsum([0, *(r.part.count for r in residents)])[:-1].tolist()
    expected = [r.part.start for r in residents] if view.original else packed
    assert [r.position for r in residents] == expected, "positions are not those of their kind"
    assert residents[-1].position + residents[-1].part.count <= budget.n_train, "beyond the trained window"
    for resident in residents:
        assert resident.moves <= view.rules.max_moves
        assert resident.part.start % budget.block == 0 and len(resident.cells) == resident.part.count


def check_cells(session: Session) -> None:
    """Visible cells of the sequence are the view, no more and no less; hidden ones are empty but kept."""
    view, pool = session.view, session.core.pool
    positions, seqs = session.hooks.cells()
    expected = {
        int(cell): int(resident.position) + i for resident in view for i, cell in enumerate(resident.cells)
    }
    assert len(expected) == view.n_tokens, "a cell holds two tokens"
    shown = {int(cell): int(positions[cell]) for cell in np.flatnonzero(seqs == view.seq)}
    assert view.seq < 0 or shown == expected, "the visible cells are not the view"
    hidden = [int(cell) for entry in view.slack for cell in entry.resident.cells]
    assert not set(hidden) & set(expected) and len(set(hidden)) == len(hidden)
    assert all(seqs[cell] == -1 for cell in hidden), "a hidden cell is visible"
    cells = np.array([*expected, *hidden], dtype=np.int32)
    assert pool.is_used(cells), "the pool gives away a cell in use"
    if view.rules.exact:
        assert list(expected) == sorted(expected), "cells do not ascend in view order"
    ratio = session.settings.compact_ratio
    assert view.highest_cell + 1 <= ratio * pool.n_used, f"cell {view.highest_cell} of {pool.n_used} used"
