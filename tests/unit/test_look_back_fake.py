"""What a step is scored with when its own text is long, or none of it is a user's: on the fake model, whose
raw Q names the token it belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_model import _MEANING
from fake_run import Run, asked, checked_sessions, records, request, same, text, truncate

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import DecodeFailed
from kvmem_llama.memory.query import StepRequest
from kvmem_llama.memory.retrieval import Query, Retriever
from kvmem_llama.memory.session import Session

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions


def step(tokens: Any, user: tuple[int, int] | None, n: int = 0) -> StepRequest:
    """user: [start, end) of the tokens that are a user's text; None: none is."""
    ids = np.asarray(tokens, np.int32)
    marks = np.zeros(len(ids), np.bool_)
    marks[slice(*(user or (0, 0)))] = True
    return StepRequest(ids, 0, np.ones(len(ids), np.bool_), SamplingParams(temp=0), n, user=marks)


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Token ids that recalls were scored with, and the text."""
    seen: list[Any] = []
    rank = Retriever.rank

    def spy(self: Retriever, query: Query, *args: Any, **kwargs: Any) -> Any:
        rows = query.rows.layers[0][:, 0, :6]
        ids = np.abs(rows[:, None] - _MEANING[None]).sum(axis=2).argmin(axis=1)
        seen.append((ids.tolist(), query.text))
        return rank(self, query, *args, **kwargs)

    monkeypatch.setattr(Retriever, "rank", spy)
    return seen


OPTIONS = {"n_query": 24, "query_ends": 8, "query_user": 6}


def test_a_long_result_is_scored_by_the_users_words_and_both_ends(queries: list[Any]) -> None:
    run, session = asked(**OPTIONS)
    tokens = text(700, 2)
    result = run.step(session, step(tokens, (3, 40), 5))
    assert result.n_query == 24 and result.n_read == 676
    first = [*tokens[34:40], *tokens[:3], *tokens[40:45], *tokens[-8:]]
    assert sorted(queries[0][0]) == sorted(int(t) for t in first)
    assert queries[0][1].count("\n") == 1  # a line for each place


@pytest.mark.parametrize("exact", [False, True])
def test_a_result_without_a_users_text_is_scored_with_the_newest_one(queries: list[Any], exact: bool) -> None:
    run, session = asked(exact=exact, **OPTIONS)
    question, result = text(10, 3), text(12, 4)
    run.step(session, step(question, (0, 10), 5))
    seen = records(run, session)
    run.step(session, step(result, None, 5))
    n = run.model.n_calls
    assert queries[1][0] == [*question[-6:], *result]
    assert records(run, session)[: len(seen) - 1] == seen[:-1]
    run.step(session, step(result, None, 0))  # the rows of the question are not made a second time
    assert queries[2][0] == queries[1][0] and run.model.n_calls <= n + 3
    run.step(session, step(result, (0, 12), 5))
    assert queries[3][0] == [int(t) for t in result]


def test_what_a_result_finds_does_not_depend_on_what_was_kept_in_memory() -> None:
    run, session = asked(**OPTIONS)
    run.step(session, step(text(10, 3), (0, 10), 5))
    fork = run.adopt(session.fork(), 1) if run.settings.n_parallel > 1 else None
    assert fork is None
    want = run.step(session, step(text(12, 4), None, 20))
    kept = session.user_rows
    truncate(session, len(session.history.tokens()) - 32)
    again = run.step(session, step(text(12, 4), None, 20))
    assert session.user_rows is kept and same(want, again)
    truncate(session, len(session.history.tokens()) - 32)
    session.user_rows = None
    assert same(want, run.step(session, step(text(12, 4), None, 20)))


def test_another_users_text_in_the_same_place_is_not_taken_for_the_old_one(queries: list[Any]) -> None:
    run, session = asked(**OPTIONS)
    n = session.history.n_committed
    for seed in (3, 4):
        question = text(10, seed)
        run.step(session, step(question, (0, 10), 5))
        run.step(session, step(text(12, 5), None, 0))
        assert queries[-1][0][:6] == [int(t) for t in question[-6:]]
        truncate(session, n)


def test_nothing_is_evaluated_twice_while_everything_fits() -> None:
    run = Run(**OPTIONS)
    session = run.session()
    run.step(session, step(text(40, 3), (0, 10), 5))
    run.step(session, step(text(40, 4), None, 5))
    assert sum(len(b) for b in run.model.batches) == 90 and not run.model.writes


def test_the_first_pass_over_the_working_set_is_left_as_it_was() -> None:
    run, session = asked(first_pass="current", **OPTIONS)
    run.step(session, step(text(10, 3), (0, 10), 5))
    view = [(r.part, r.position) for r in session.view]
    shown: list[Any] = []
    first = session.history.n_committed

    def check(batch: Any) -> None:
        if int(batch.tokens[0]) == tool[0] and batch.n == len(tool):
            shown.append([(r.part, r.position) for r in session.view])

    tool = text(12, 4)
    before, run.model.before_decode = run.model.before_decode, check
    run.step(session, step(tool, None, 0))
    run.model.before_decode = before
    assert shown and [p for p in shown[0] if p[0].start < first - first % 8] == [
        p for p in view if p[0].start < first - first % 8
    ]


@pytest.mark.parametrize("batch", [0, 1])
def test_a_failed_or_cancelled_look_back_undoes_the_step(batch: int) -> None:
    run, session = asked(n_ubatch=4, **OPTIONS)
    run.step(session, step(text(10, 3), (0, 10), 5))
    want = records(run, session)
    run.model.fail[run.model.n_calls + batch] = 1
    with pytest.raises(DecodeFailed):
        run.step(session, step(text(12, 4), None, 5))
    assert records(run, session) == want
    task = run.start_step(session, step(text(12, 4), None, 5))
    run.drive(task, batches=batch + 1)
    task.cancel()
    run.drive(task)
    assert records(run, session) == want
    twin, other = asked(n_ubatch=4, **OPTIONS)
    twin.step(other, step(text(10, 3), (0, 10), 5))
    assert same(run.step(session, step(text(12, 4), None, 5)), twin.step(other, step(text(12, 4), None, 5)))


def test_without_the_option_only_the_result_is_scored(queries: list[Any]) -> None:
    run, session = asked(**{**OPTIONS, "query_user": 0})
    run.step(session, step(text(10, 3), (0, 10), 0))
    run.step(session, step(text(12, 4), None, 0))
    assert queries[1][0] == [int(t) for t in text(12, 4)]


def test_request_helper_counts_all_text_as_a_users() -> None:
    run, session = asked()
    run.step(session, request(text(20, 1), 0))
    newest = session.history.steps.newest_with_user
    assert newest is not None and newest.user == (1500, 1520)
    assert isinstance(session, Session)
