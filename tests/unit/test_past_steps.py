"""Where the steps of a history ended, how old a token is, and whose text is the newest of a user."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fake_durable import engine_on
from fake_run import FakeTemplate, Run, asked, checked_sessions, request, text, truncate
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.engine import core
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.memory.past_steps import PastSteps
from kvmem_llama.workspace import Workspace

checked = checked_sessions


def with_user(start: int, end: int) -> str:
    return json.dumps({"user": [start, end]})


def test_age_counts_the_steps_since_the_one_that_appended_a_token() -> None:
    steps = PastSteps()
    for end in (10, 10, 25, 40):  # the second step added nothing
        steps.add(end)
    assert [steps.age(t) for t in (0, 9, 10, 24, 25, 39, 40, 99)] == [3, 3, 2, 2, 1, 1, 0, 0]


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(0, 400))
def test_truncation_leaves_what_steps_of_the_rest_would_have_left(lengths: list[int], n: int) -> None:
    steps, want, at = PastSteps(), PastSteps(), 0
    for length in lengths:
        options = with_user(at, at + max(length // 2, 1))
        steps.add(at + length, options)
        if at < n:
            want.add(min(at + length, n), options)
        at += length
    before = steps.fork()
    steps.truncate(n)
    assert [steps.age(t) for t in range(n)] == [want.age(t) for t in range(n)]
    assert steps.newest_with_user == want.newest_with_user
    assert len(before) == len(lengths)


def test_a_step_whose_user_text_was_cut_has_none() -> None:
    steps = PastSteps()
    steps.add(20, with_user(2, 8))
    steps.add(30)
    steps.add(50, with_user(32, 40))
    newest = steps.newest_with_user
    assert newest is not None and newest.user == (32, 40)
    steps.truncate(39)
    newest = steps.newest_with_user
    assert newest is not None and newest.user == (2, 8) and steps.age(38) == 1


@pytest.mark.parametrize(
    "options", ["[]", "null", "not json", '{"user": 5}', '{"user": [-5, 3]}', '{"user": [3, 99]}', "[" * 9999]
)
def test_options_that_nobody_here_wrote_name_no_user_text(options: str) -> None:
    steps = PastSteps()
    steps.add(20, options)
    assert steps.newest_with_user is None and len(steps) == 1


@pytest.mark.usefixtures("checked")
def test_a_report_tells_tier_and_age_of_every_block() -> None:
    run, session = asked(600, score="mean_k")
    run.read(session, text(600, 1))
    run.step(session, request(text(20, 2), 10))
    report = run.step(session, request(text(20, 3), 0)).recalls[0]
    assert report.n_selected
    for block in report.blocks:
        want = 3 if block.start < 600 else 2 if block.start < 1200 else 1 if block.start < 1230 else 0
        assert block.age == want
        assert block.tier == "device" or (block.why == "selected" and not block.resident)
        assert block.own == block.channels  # Mean-K has no part for neighbours
    assert {b.tier for b in report.blocks} == {"device", "host"}
    truncate(session, 700)
    report = run.step(session, request(text(20, 3), 0)).recalls[0]
    assert {b.age for b in report.blocks} == {0, 1, 2}
    fork = run.adopt(session.fork(), 0)
    session.evict()
    assert fork.history.steps.age(0) == session.history.steps.age(0) == 3


@pytest.mark.usefixtures("checked")
def test_an_interrupted_read_belongs_to_the_step_that_takes_it_up() -> None:
    run = Run()
    session = run.session()
    run.read(session, text(100))
    task = run.start_step(session, request(text(300, 1), 5, query_start=290))
    run.drive(task, batches=12)
    task.cancel()
    run.drive(task)
    assert len(session.history.orphans) and len(session.history.steps) == 1
    result = run.step(session, request(text(300, 1), 5, query_start=290))
    assert result.n_reused and session.history.steps.age(100) == 1 and session.history.steps.age(0) == 2


@pytest.mark.usefixtures("checked")
def test_ages_and_the_newest_users_text_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "ChatTemplate", FakeTemplate)
    none = np.zeros(20, np.bool_)

    def facts(ws: Workspace) -> tuple[list[int], object]:
        steps = ws._policy._session.history.steps  # type: ignore[attr-defined]
        newest = steps.newest_with_user
        return [steps.age(t) for t in range(0, 760, 10)], None if newest is None else newest.user

    def found(ws: Workspace) -> list[object]:
        result = ws.step(text(20, 5), sampling=SamplingParams(temp=0), max_tokens=9, user=none).result()
        ws.truncate(ws.n_tokens - 29)
        return [result.tokens, [(b.start, b.rank, b.age) for b in result.recalls[0].blocks]]

    with engine_on(tmp_path) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(600)).result()
        ws.step(text(20, 3), sampling=SamplingParams(temp=0), max_tokens=30).result()
        ws.step(text(20, 4), sampling=SamplingParams(temp=0), max_tokens=30, user=none).result()
        before, want = facts(ws), found(ws)
    with engine_on(tmp_path) as engine, engine.workspace("notes") as ws:
        assert facts(ws) == before and before[1] == (600, 620) and max(before[0]) == 3
        assert found(ws) == want
        ws.truncate(610)
    with engine_on(tmp_path) as engine, engine.workspace("notes") as ws:
        ages, user = facts(ws)
        assert user is None and max(ages) == 2
