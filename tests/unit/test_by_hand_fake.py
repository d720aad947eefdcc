"""Answers that somebody else writes, token by token and in their own time."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import numpy as np
import pytest
from fake_run import Run, asked, checked_sessions, request, text

from kvmem_llama.engine.task import Task
from kvmem_llama.errors import Cancelled
from kvmem_llama.memory.report import StepResult
from kvmem_llama.memory.session import Session

checked = checked_sessions
pytestmark = pytest.mark.usefixtures("checked")


class Hand:
    """See memory.query.Hand."""

    def __init__(self) -> None:
        self.offers: list[np.ndarray[Any, Any]] = []
        self.chosen: deque[int | None] = deque()

    def offer(self, logits: np.ndarray[Any, Any]) -> None:
        self.offers.append(logits.copy())

    def has_chosen(self) -> bool:
        return bool(self.chosen)

    def take(self) -> int | None:
        return self.chosen.popleft()


def started(run: Run, session: Session, n: int = 20) -> tuple[Hand, Task[StepResult]]:
    hand = Hand()
    task = run.start_step(session, dataclasses.replace(request(text(n, 7)), hand=hand))
    run.drive(task)
    return hand, task


def fed(run: Run, task: Task[StepResult], hand: Hand, *tokens: int | None) -> None:
    for token in tokens:
        hand.chosen.append(token)
        run.drive(task)


def test_each_token_is_asked_for_with_the_logits_that_a_sampler_would_get() -> None:
    run, session = asked(100)
    other_run, other = asked(100)
    expected = other_run.step(other, request(text(20, 7), 5)).tokens
    hand, task = started(run, session)
    for token in expected:
        assert int(hand.offers[-1].argmax()) == token and not task.done
        fed(run, task, hand, token)
    fed(run, task, hand, None)
    assert task.result(0).tokens == expected and task.result(0).finish_reason == "stop"
    assert session.history.n_committed == 120 + len(expected)


def test_no_token_ends_the_answer_but_the_hand_does_and_a_full_view_goes_on() -> None:
    run, session = asked(1500)
    hand, task = started(run, session)
    end = next(token for token in range(run.core.decoder.n_vocab) if run.core.model.vocab.is_eog(token))
    tokens = [end, *text(150, 3).tolist()]
    fed(run, task, hand, *tokens)
    assert not task.done and len(hand.offers) == len(tokens) + 1
    fed(run, task, hand, None)
    result = task.result(0)
    assert list(result.tokens) == tokens
    assert any(report.mid_answer for report in result.recalls)


def test_a_stop_keeps_the_answer_and_a_cancel_undoes_it() -> None:
    run, session = asked(300)
    hand, task = started(run, session)
    fed(run, task, hand, 11, 12)
    task.stop()
    run.drive(task)
    assert task.result(0).tokens == (11, 12) and session.history.n_committed == 322
    hand, task = started(run, session)
    fed(run, task, hand, 13)
    task.cancel()
    run.drive(task)
    with pytest.raises(Cancelled):
        task.result(0)
    assert session.history.n_committed == 322
