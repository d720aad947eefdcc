"""Refresh as text: selected blocks are evaluated anew in the view. The fake model's rows tell what they had
attended to, so stored and refreshed rows cannot be mistaken for each other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_run import asked, checked_sessions, records, request, same, text
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.engine.requests import Phase
from kvmem_llama.errors import DecodeFailed
from kvmem_llama.memory.refresh import spans_to_refresh
from kvmem_llama.store.records import NotStored

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions


def shown(run: Any, session: Any, starts: set[int]) -> dict[int, list[int]]:
    """What the rows in cells of these blocks had attended to."""
    return {
        r.part.start: run.model.k[0, r.cells, 7].astype(int).tolist()
        for r in session.view
        if r.part.start in starts
    }


def stored(run: Any, session: Any, starts: set[int]) -> dict[int, list[int]]:
    return {s: run.model.fingerprints_of(session.history.rows(s), 8) for s in starts}


# -- which blocks


def test_adjacent_blocks_make_a_span_and_the_one_with_the_best_comes_first() -> None:
    best = np.array([20, 5, 21, 4, 30, 6])
    assert spans_to_refresh(best, 9) == [range(4, 7), range(20, 22), range(30, 31)]
    assert spans_to_refresh(best, 2) == [range(20, 22)]
    assert spans_to_refresh(best, 4) == [range(4, 6), range(20, 22)]  # 5 and its better neighbour
    assert spans_to_refresh(best, 0) == [] == spans_to_refresh(best[:0], 3)


@given(st.permutations(range(14)), st.integers(0, 14), st.integers(0, 16))
def test_spans_hold_selected_blocks_within_the_budget(order: list[int], n: int, most: int) -> None:
    best = np.array(order[:n], np.int64)
    spans = spans_to_refresh(best, most)
    blocks = [number for span in spans for number in span]
    assert blocks == sorted(set(blocks)) and set(blocks) <= set(best.tolist())
    assert len(blocks) == min(most, n)
    assert all(b.start > a.stop for a, b in pairwise(spans))
    if blocks:
        assert int(best[0]) in blocks


# -- in a step


@pytest.mark.parametrize(
    "options",
    [{}, {"exact": True}, {"position_mode": "compact"}, {"reuse_resident": False}, {"n_ubatch": 3}],
)
def test_the_best_blocks_are_evaluated_over_what_stands_before_them(options: dict[str, Any]) -> None:
    run, session = asked(refresh=40, **options)
    kept = records(run, session)
    report = run.step(session, request(text(20, 1), 0)).recalls[0]
    fresh = {b.start for b in report.blocks if b.refreshed}
    best = min((b for b in report.blocks if b.rank), key=lambda b: b.rank or 0)
    assert len(fresh) == 5 and best.start in fresh and report.timings.refresh_s > 0 and not report.noop
    assert not any(b.resident for b in report.blocks if b.refreshed)
    assert {r.part.start for r in session.view if r.refreshed} == fresh
    # Their rows are those of a plain prefill of the view up to there; the records are as they were.
    in_cells, on_record = shown(run, session, fresh), stored(run, session, fresh)
    assert in_cells != on_record
    attended = 0
    for r in session.view:
        tokens = session.history.tokens(r.part.start, r.part.end).tolist()
        prints = run.model.k[0, r.cells, 7].astype(int).tolist()
        positions = range(r.position, r.position + r.part.count)
        for position, token, print_ in zip(positions, tokens, prints, strict=True):
            if r.part.start in fresh:
                assert print_ == (attended + token) % 2039
            attended += (position * 131 + token * 17 + 1) * (print_ + 3)
    assert records(run, session)[: len(kept) - 1] == kept[:-1]


def test_refreshed_rows_are_never_taken_for_stored_ones() -> None:
    run, session = asked(refresh=64)
    twin, other = asked(refresh=64, reuse_resident=False)
    for seed in (1, 1, 2, 1, 3):
        req = request(text(20, seed), 150)
        result, want = run.step(session, req), twin.step(other, req)
        assert same(result, want) and records(run, session) == records(twin, other)
        for r in session.view:
            if not r.refreshed and r.part.count == 8:
                assert shown(run, session, {r.part.start}) == stored(run, session, {r.part.start})
        assert not any(h.resident.refreshed for h in session.view.slack)


def test_without_room_for_a_block_nothing_is_refreshed() -> None:
    run, session = asked(refresh=7)
    report = run.step(session, request(text(20, 1), 0)).recalls[0]
    assert not any(b.refreshed for b in report.blocks) and report.timings.refresh_s == 0


def test_blocks_are_refreshed_in_mid_answer_too() -> None:
    run, session = asked(refresh=16)
    result = run.step(session, request(text(20, 1), 600))
    assert result.n_generated == 600 and len(result.recalls) > 2
    for report in result.recalls:
        n = sum(b.refreshed for b in report.blocks)
        assert n == min(2, report.n_selected) and n


def test_a_view_of_the_last_step_goes_on_without_refreshed_rows() -> None:
    run, session = asked(refresh=40, first_pass="current")
    run.step(session, request(text(20, 1), 4))
    assert session.view.has_refreshed
    run.read(session, text(9, 2))
    assert not session.view.has_refreshed
    run.step(session, request(text(20, 1), 4))


@pytest.mark.parametrize("how", ["cancel", "stop", "fail"])
@pytest.mark.parametrize("batch", range(4))
def test_a_step_that_ends_while_it_refreshes_is_undone(how: str, batch: int) -> None:
    run, session = asked(refresh=48, n_ubatch=4)
    want = records(run, session)
    n = run.model.n_calls
    req = request(text(8, 1), 30)
    task = run.start_step(session, req)
    n_first = 2  # batches of the first pass
    if how == "fail":
        run.model.fail[n + n_first + batch] = 1
        run.drive(task)
        with pytest.raises(DecodeFailed):
            task.result(0)
    else:
        run.drive(task, batches=n_first + batch)
        assert run.scheduler._running[0].request is not None
        assert run.scheduler._running[0].request.phase is Phase.REPLAY
        task.cancel() if how == "cancel" else task.stop()
        run.drive(task)
    assert records(run, session) == want and session.history.n_committed == 1500
    twin, other = asked(refresh=48, n_ubatch=4)
    assert same(run.step(session, req), twin.step(other, req))
    assert records(run, session) == records(twin, other)


def test_rows_that_are_lost_on_the_way_leave_the_view_without_a_refreshed_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, session = asked(refresh=40)
    twin, other = asked()
    ref = session.history.table[0].ref

    def grow(placed: Any) -> None:
        session.view.clear()
        raise NotStored((ref,))

    monkeypatch.setattr(session.view, "grow", grow)
    req = request(text(20, 1), 30)
    result, want = run.step(session, req), twin.step(other, req)
    assert same(result, want) and not any(b.refreshed for b in result.recalls[0].blocks)
    assert records(run, session) == records(twin, other)
