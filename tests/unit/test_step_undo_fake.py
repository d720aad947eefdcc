"""Steps that do not reach their commit, on the fake model: cancel, stop, failed decodes, eviction; and what
a long random life with all of them leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_model import END
from fake_run import Run, asked, checked_sessions, records, request, same, text, truncate
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem_llama.engine.requests import Phase
from kvmem_llama.errors import Cancelled, DecodeFailed
from kvmem_llama.memory.invariants import check, check_history
from kvmem_llama.memory.report import TextPiece
from kvmem_llama.memory.session import Session

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions


def cancelled_after(run: Run, session: Session, req: Any, batches: int) -> bool:
    """Starts a step and cancels it after some batches -> False if it was done by then."""
    task = run.start_step(session, req)
    run.drive(task, batches=batches)
    if task.done:
        return False
    task.cancel()
    run.drive(task)
    with pytest.raises(Cancelled):
        task.result(0)
    check_history(session)
    return True


@settings(max_examples=40)
@given(st.integers(0, 80), st.integers(0, 60), st.booleans())
def test_a_cancelled_step_leaves_the_workspace_as_it_was(batches: int, n_front: int, exact: bool) -> None:
    run, session = asked(600, exact=exact)
    before = records(run, session)
    n_bytes = session.history.store.stats().n_bytes
    req = request([*text(n_front, 5), *text(20, 1)], 40, query_start=n_front)
    if cancelled_after(run, session, req, batches):
        assert session.history.n_committed == session.history.n_tokens == 600
        assert records(run, session) == before
        orphans = len(session.history.orphans) * run.model.layout.nbytes
        assert session.history.store.stats().n_bytes == n_bytes + orphans
    else:
        truncate(session, 600)
    twin, other = asked(600, exact=exact)
    question = request(text(20, 2), 60)
    assert same(run.step(session, question), twin.step(other, question))


def test_blocks_read_by_a_cancelled_prompt_are_not_read_again() -> None:
    run, session = asked(603)  # the last block is partial: its orphan holds committed tokens as well
    req = request([*text(400, 5), *text(20, 1)], 10, query_start=400)
    assert cancelled_after(run, session, req, 20)
    evaluated = sum(len(batch) for batch in run.model.batches[-20:])
    result = run.step(session, req)
    assert result.n_reused > 0 and result.n_reused + 603 == (603 + evaluated) // 8 * 8
    assert result.n_read == 400 - result.n_reused
    twin, other = asked(603)
    assert same(result, twin.step(other, req))
    assert records(run, session) == records(twin, other)
    assert not len(session.history.orphans)


def test_another_prompt_adopts_only_what_it_begins_with() -> None:
    run, session = asked(600)
    front = text(400, 5)
    assert cancelled_after(run, session, request([*front, *text(20, 1)], query_start=400), 20)
    n_orphans = len(session.history.orphans)
    other_front = np.concatenate([front[:100], text(100, 6)])
    req = request([*other_front, *text(20, 1)], 10, query_start=200)
    assert cancelled_after(run, session, req, 12)
    result = run.step(session, req)
    assert 96 <= result.n_reused < 8 * n_orphans
    twin, other = asked(600)
    assert same(result, twin.step(other, req))
    assert session.history.store.stats().n_records == len(session.history.table)


def test_a_cancelled_read_goes_on_where_it_was() -> None:
    run, session = asked(0)
    from kvmem_llama.memory.step import read

    task = run.start(lambda: read(session, text(1000)), 0)
    run.drive(task, batches=40)
    task.cancel()
    run.drive(task)
    assert session.history.n_committed == 0 and not session.view.n_tokens
    result = run.read(session, text(1000))
    assert (result.n_reused, result.n_read) == (640, 360)
    assert records(run, session) == records(*asked(1000))


def test_a_stopped_answer_is_kept_as_far_as_it_goes() -> None:
    run, session = asked(600)
    task = run.start_step(session, request(text(20, 1), 100))
    pieces = 0
    while pieces < 10:
        run.drive(task, batches=1)
        pieces = session.history.n_tokens - 620
    task.stop()
    run.drive(task)
    result = task.result(0)
    assert result.finish_reason == "truncated" and 10 <= result.n_generated <= 11
    assert session.history.n_committed == 620 + result.n_generated


def test_stopping_before_the_answer_began_is_a_cancel() -> None:
    run, session = asked(600)
    task = run.start_step(session, request(text(300, 1), 100, query_start=280))
    run.drive(task, batches=2)
    task.stop()
    run.drive(task)
    with pytest.raises(Cancelled):
        task.result(0)
    assert session.history.n_committed == 600 and 4 <= len(session.history.orphans) <= 6


@settings(max_examples=30)
@given(st.integers(0, 90))
def test_a_failed_decode_leaves_a_workspace_that_goes_on(number: int) -> None:
    run, session = asked(600)
    first = run.model.n_calls
    run.model.fail[first + number] = 1
    req = request([*text(100, 5), *text(20, 1)], 40, query_start=100)
    try:
        run.step(session, req)
        failed = False
    except DecodeFailed:
        failed = True
        assert session.history.n_committed == 600 and session.view.n_tokens == 0
        assert run.core.pool.n_used == 0
        check(session)
    assert failed == (first + number not in run.model.fail)
    if failed:
        run.model.fail.clear()
        twin, other = asked(600)
        assert same(run.step(session, req), twin.step(other, req))


def test_a_sequence_without_a_failure_goes_on_when_another_fails() -> None:
    run, session = asked(300, n_parallel=2)
    other = run.session(1)
    run.read(other, text(300, 9))
    run.model.fail[run.model.n_calls + 3] = 1
    tasks = [run.start_step(session, request(text(20, 1), 5)), run.start_step(other, request(text(20, 2), 5))]
    run.drive(*tasks)
    errors = [task.error for task in tasks]
    assert all(isinstance(e, DecodeFailed) for e in errors if e is not None) and any(errors)
    for one in (session, other):
        assert run.step(one, request(text(20, 3), 5)).n_generated == 5


def test_an_error_in_the_books_of_a_step_gives_all_cells_back() -> None:
    run, session = asked(600)

    def fail(batch: Any) -> None:
        raise RuntimeError("a defect")

    task = run.start_step(session, request(text(20, 1), 5))
    run.drive(task, batches=1)
    check_decode, run.model.before_decode = run.model.before_decode, fail
    run.drive(task)
    assert isinstance(task.error, RuntimeError)
    run.model.before_decode = check_decode
    assert run.core.pool.n_used == 0 and session.history.n_committed == 600
    assert run.step(session, request(text(20, 1), 5)).n_generated == 5


# -- how an answer ends


def test_the_end_token_belongs_to_the_history_but_not_to_the_text() -> None:
    run, session = asked(600)
    run.model.forced = [0, 40, 41, END]  # the first pass of the query has logits, too
    result = run.step(session, request(text(20, 1), 100))
    assert result.finish_reason == "stop" and result.tokens == (40, 41, END)
    assert result.text == "HI" and session.history.tokens(620).tolist() == [40, 41, END]


def test_tokens_after_the_beginning_of_a_stop_string_are_dropped() -> None:
    run, session = asked(600)
    run.model.forced = [0, 40, 41, 42, 43, 44]  # H I J K L
    events: list[Any] = []
    task = run.start_step(session, request(text(20, 1), 100, stop=["JKL"]))
    task._on_event = events.append
    run.drive(task)
    result = task.result(0)
    assert result.finish_reason == "stop" and result.text == "HI" and result.tokens == (40, 41)
    assert "".join(e.text for e in events if isinstance(e, TextPiece)) == "HI"
    assert session.history.tokens(620).tolist() == [40, 41]
    check(session)
    # The next step finds rows of these tokens only.
    twin, other = asked(600)
    twin.model.forced = [0, 40, 41]
    twin.step(other, request(text(20, 1), 2))
    assert records(run, session) == records(twin, other)


def test_characters_come_whole() -> None:
    run, session = asked(600)
    run.model.forced = [0, 40, 5, 6, 41]
    events: list[Any] = []
    task = run.start_step(session, request(text(20, 1), 4))
    task._on_event = events.append
    run.drive(task)
    assert [e.text for e in events if isinstance(e, TextPiece)] == ["H", "é", "I"]


# -- forks, pins, truncation


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    run, session = asked(603)
    fork = run.adopt(session.fork(), 0)
    store = session.history.store
    counts = [store.refcount(b.ref) for b in session.history.table]
    assert counts == [2] * 75 + [1]
    assert fork.history.table[75].ref != session.history.table[75].ref
    session.evict()
    question = request(text(20, 1), 30)
    forked = run.step(fork, question)
    fork.evict()
    assert same(forked, run.step(session, question))
    fork.history.close()
    session.history.close()
    assert store.stats().n_records == 0 and store.stats().n_bytes == 0


@pytest.mark.parametrize("n", [0, 1, 8, 595, 597, 600, 602])
def test_a_truncated_history_is_the_shorter_one(n: int) -> None:
    run, session = asked(603)
    truncate(session, n)
    check_history(session)
    twin, other = asked(n)
    question = request(text(20, 1), 30)
    assert same(run.step(session, question), twin.step(other, question))
    assert records(run, session) == records(twin, other)
    means = [s.history.indexes.mean_k.means(0) for s in (session, other)]
    assert np.array_equal(*means)


def test_pinned_blocks_are_in_every_view() -> None:
    run, session = asked(600)
    session.history.pins = [(100, 104), (203, 210)]
    result = run.step(session, request(text(20, 1), 600))
    for report in result.recalls:
        pinned = [b.start for b in report.blocks if b.why == "pinned"]
        assert pinned == [96, 200, 208]
    run.read(session, text(700, 4))
    starts = [r.part.start for r in session.view]
    assert {96, 200, 208} <= set(starts)


def test_pins_can_take_all_but_the_hard_set() -> None:
    run, session = asked(600)
    n = 256 - 8 - 32 - 16 - 24
    session.history.pins = [(64, 64 + n)]
    assert run.step(session, request(text(16, 1), 300)).n_generated == 300


# -- several sequences


@pytest.mark.parametrize("exact", [False, True])
def test_sequences_that_run_together_answer_as_alone(exact: bool) -> None:
    run = Run(n_parallel=3, exact=exact)
    sessions = [run.session(seq) for seq in range(3)]
    for seq, session in enumerate(sessions):
        run.read(session, text(400 + 50 * seq, seq))
    requests = [request(text(20, 10 + seq), 300) for seq in range(3)]
    tasks = [run.start_step(s, r) for s, r in zip(sessions, requests, strict=True)]
    run.drive(*tasks)
    for seq in range(3):
        alone, other = asked(400 + 50 * seq, seed=seq, exact=exact)
        assert same(tasks[seq].result(0), alone.step(other, requests[seq]))


def test_a_cancel_does_not_disturb_the_other_sequence() -> None:
    run = Run(n_parallel=2)
    one, two = run.session(0), run.session(1)
    run.read(one, text(400))
    run.read(two, text(400, 1))
    answering = run.start_step(two, request(text(20, 2), 200))
    for batches in (3, 9, 15):
        cancelled_after(run, one, request([*text(60, 3), *text(20, 4)], 20, query_start=60), batches)
    run.drive(answering)
    alone, other = asked(400, seed=1)
    assert same(answering.result(0), alone.step(other, request(text(20, 2), 200)))


# -- a long life

OPERATIONS = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 120), st.integers(0, 5)),
    st.tuples(st.just("step"), st.integers(1, 60), st.integers(0, 120)),
    st.tuples(st.just("truncate"), st.integers(0, 100), st.just(0)),
    st.tuples(st.just("pin"), st.integers(0, 99), st.integers(1, 20)),
)
DISTURBANCES = st.one_of(
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("fail"), st.integers(0, 20)),
    st.tuples(st.just("evict"), st.just(0)),
    st.tuples(st.just("nothing"), st.just(0)),
)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(DISTURBANCES, OPERATIONS), min_size=3, max_size=12),
    st.sampled_from([1, 7, 16]),
    st.sampled_from(["auto", "compact", "original"]),
    st.booleans(),
    st.sampled_from([300, 10_000]),
)
def test_a_random_life_is_that_of_its_commits(
    life: list[Any], block: int, mode: str, exact: bool, n_train: int
) -> None:
    """Cancelled steps, failures and evictions in between change nothing of what is answered and stored."""
    options = {"block_size": block, "exact": exact, "n_ctx": 112, "n_train": n_train}
    options["position_mode"] = "auto" if n_train == 300 and mode == "original" else mode
    run, twin = Run(**options), Run(**options)
    mine, other = run.session(), twin.session()
    for (disturbance, when), (operation, a, b) in life:
        n = mine.history.n_committed
        if disturbance == "cancel":
            cancelled_after(run, mine, request(text(a + 40, b), 20, query_start=a + 30), when)
            if mine.history.n_committed > n:
                truncate(mine, n)
        elif disturbance == "fail":
            run.model.fail[run.model.n_calls + when] = 1
            with pytest.raises(DecodeFailed) if when < 3 else _either():
                run.step(mine, request(text(a + 40, b), 20, query_start=a + 30))
            run.model.fail.clear()
            if mine.history.n_committed > n:
                truncate(mine, n)
        elif disturbance == "evict":
            mine.evict()
        for s in (mine, other):
            if operation == "truncate":
                truncate(s, n * a // 100)
            elif operation == "pin" and n > 20:
                s.history.pins = [(n * a // 100, min(n * a // 100 + b, n))]
        if operation == "read":
            run.read(mine, text(a, b))
            twin.read(other, text(a, b))
        elif operation == "step":
            req = request(text(a, b), b)
            answers = []
            for r, s in ((run, mine), (twin, other)):
                try:
                    answers.append(r.step(s, req))
                except Exception as error:
                    answers.append(type(error))
            if isinstance(answers[0], type):
                assert answers[0] is answers[1]
            else:
                assert same(*answers)
        assert records(run, mine) == records(twin, other)


class _either:
    """A decode that may not come to fail."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is None or issubclass(kind, DecodeFailed)


def test_phases_are_named_to_the_engine() -> None:
    run, session = asked(600)
    phases: list[Phase] = []
    run.scheduler.observe(lambda report: phases.extend(p.phase for p in report.pieces))
    run.step(session, request([*text(32, 5), *text(20, 1)], 3, query_start=32))
    assert list(dict.fromkeys(phases)) == [Phase.READ, Phase.QUERY, Phase.REPLAY, Phase.DECODE]
