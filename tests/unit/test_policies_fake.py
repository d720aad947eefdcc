"""The policies without recall on the fake model, with and without hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_run import Run, checked_sessions, request, text

from kvmem_llama.errors import Cancelled, DecodeFailed, InvalidOption, MandatoryTooLarge, ModelUnsupported
from kvmem_llama.memory.report import Finished
from kvmem_llama.policies import POLICIES, KVMem, make_policy
from kvmem_llama.policies.full_context import FullContext
from kvmem_llama.policies.plain import PlainMemory
from kvmem_llama.policies.sliding_window import SlidingWindow
from kvmem_llama.settings import BY_NAME

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions
HOOKS = pytest.mark.parametrize("hooks", [True, False], ids=["hooks", "no hooks"])
PLAIN = pytest.mark.parametrize("make", [FullContext, SlidingWindow])


class PlainRun(Run):
    """Runs steps of a policy. Without hooks the fake places tokens as llama.cpp does, captures nothing."""

    def __init__(self, make: Callable[..., PlainMemory], *, hooks: bool = True, **options: Any) -> None:
        super().__init__(hooks=hooks, **options)
        self.model.before_decode = self._check
        if not hooks:
            self.model.auto_place = True
        self.policy = make(self.core)

    def _check(self, batch: Any) -> None:
        if self.core.hooks is None:
            return
        held = self.policy._cells.held
        tokens = self.policy.tokens()[held].tolist()
        assert self.model.visible(0) == list(enumerate(tokens)), "the view is not what the policy says"

    def result(self, generator: Any, seq: int = 0) -> Any:
        task = self.start(lambda: generator, seq)
        self.drive(task)
        return task.result(0)


@HOOKS
@PLAIN
def test_a_history_that_fits_is_plain_decoding(make: Any, hooks: bool) -> None:
    run = PlainRun(make, hooks=hooks)
    run.result(run.policy.read(text(100)))
    result = run.result(run.policy.step(request(text(20, 1), 30)))
    assert result.n_generated == 30 and result.finish_reason == "length" and result.n_query == 20
    assert [p for batch in run.model.batches for _, p, _ in batch] == list(range(150))
    other = PlainRun(FullContext)
    other.result(other.policy.read(text(100)))
    assert other.result(other.policy.step(request(text(20, 1), 30))).tokens == result.tokens


@HOOKS
def test_full_context_refuses_what_does_not_fit_and_ends_an_answer_at_the_view(hooks: bool) -> None:
    run = PlainRun(FullContext, hooks=hooks)
    with pytest.raises(MandatoryTooLarge) as raised:
        run.result(run.policy.read(text(257)))
    assert (raised.value.n_needed, raised.value.n_view) == (257, 256) and not run.model.n_calls
    run.result(run.policy.read(text(200)))
    with pytest.raises(MandatoryTooLarge):
        run.result(run.policy.step(request(text(56), -1)))
    result = run.result(run.policy.step(request(text(20, 1), -1)))
    assert result.finish_reason == "length" and run.policy.n_tokens == 256


@HOOKS
def test_a_sliding_window_reads_and_answers_without_end(hooks: bool) -> None:
    run = PlainRun(SlidingWindow, hooks=hooks)
    run.result(run.policy.read(text(1000)))
    result = run.result(run.policy.step(request(text(20, 1), 700)))
    assert result.n_generated == 700
    held = run.policy._cells.held
    assert held[:8].tolist() == list(range(8)) and held[-1] == 1719 and len(held) <= 256
    assert np.array_equal(held[8:], np.arange(held[8], 1720))
    assert run.core.pool.n_used == len(held)


@PLAIN
def test_a_cancelled_step_is_undone(make: Any) -> None:
    run = PlainRun(make)
    run.result(run.policy.read(text(200)))
    task = run.start(lambda: run.policy.step(request(text(30, 1), 20)), 0)
    run.drive(task, batches=5)
    task.cancel()
    run.drive(task)
    assert isinstance(task.error, Cancelled) and run.policy.n_tokens == 200
    twin = PlainRun(make)
    twin.result(twin.policy.read(text(200)))
    question = request(text(10, 2), 20)
    assert run.result(run.policy.step(question)).tokens == twin.result(twin.policy.step(question)).tokens


@HOOKS
@PLAIN
def test_after_a_failed_decode_the_view_is_read_again(make: Any, hooks: bool) -> None:
    run = PlainRun(make, hooks=hooks)
    run.result(run.policy.read(text(150)))
    run.model.fail[run.model.n_calls + 1] = 1
    with pytest.raises(DecodeFailed):
        run.result(run.policy.step(request(text(30, 1), 20)))
    assert run.core.pool.n_used == 0 and run.policy.n_tokens == 150
    result = run.result(run.policy.step(request(text(30, 1), 20)))
    twin = PlainRun(make)
    twin.result(twin.policy.read(text(150)))
    assert result.tokens == twin.result(twin.policy.step(request(text(30, 1), 20))).tokens


@HOOKS
@PLAIN
def test_cells_that_were_given_up_are_read_again(make: Any, hooks: bool) -> None:
    run = PlainRun(make, hooks=hooks)
    run.result(run.policy.read(text(150)))
    run.policy.evict()
    assert run.core.pool.n_used == 0
    result = run.result(run.policy.step(request(text(30, 1), 20)))
    assert result.n_generated == 20 and len(run.policy._cells.held) == 200
    fork = run.policy.fork()
    run.policy.evict()
    run.policy = fork
    assert run.result(run.policy.step(request(text(5, 1), 5))).n_generated == 5


@PLAIN
@pytest.mark.parametrize("n", [0, 3, 140])
def test_a_truncated_history_goes_on(make: Any, n: int) -> None:
    run = PlainRun(make)
    run.result(run.policy.read(text(150)))
    run.policy.truncate(n)
    result = run.result(run.policy.step(request(text(30, 1), 20)))
    twin = PlainRun(make)
    twin.result(twin.policy.read(text(n)))
    assert result.tokens == twin.result(twin.policy.step(request(text(30, 1), 20))).tokens


def test_a_window_that_slid_past_a_truncation_is_read_again() -> None:
    run = PlainRun(SlidingWindow)
    run.result(run.policy.read(text(1000)))
    run.policy.truncate(500)
    assert run.result(run.policy.step(request(text(30, 1), 20))).n_generated == 20
    assert run.policy._cells.held[8] == run.policy._canonical.tail_start(549)


def test_stopping_and_stop_strings_work_without_recall() -> None:
    run = PlainRun(SlidingWindow)
    run.result(run.policy.read(text(600)))
    run.model.forced = [40, 41, 42, 43, 44]
    result = run.result(run.policy.step(request(text(20, 1), 100, stop=["JK"])))
    assert result.text == "HI" and run.policy.tokens(620).tolist() == [40, 41]
    task = run.start(lambda: run.policy.step(request(text(20, 1), 100)), 0)
    run.drive(task, batches=10)
    task.stop()
    run.drive(task)
    assert task.result(0).finish_reason == "truncated"


@PLAIN
def test_events_end_with_the_result(make: Any) -> None:
    run = PlainRun(make)
    events: list[Any] = []
    task = run.start(lambda: run.policy.step(request(text(20, 1), 3)), 0)
    task._on_event = events.append
    run.drive(task)
    assert isinstance(events[-1], Finished) and events[-1].result is task.result(0)


@PLAIN
def test_pins_are_refused(make: Any) -> None:
    run = PlainRun(make)
    with pytest.raises(InvalidOption):
        run.policy.pin(0, 1)
    with pytest.raises(InvalidOption):
        run.policy.unpin(0, 1)


def test_a_model_that_cannot_slide_says_what_can_be_done() -> None:
    run = PlainRun(SlidingWindow, hooks=False)
    run.model.shift = lambda *a: False  # type: ignore[method-assign]
    with pytest.raises(Exception, match="full_context"):
        run.result(run.policy.read(text(600)))
    assert run.core.pool.n_used == 0 and run.policy.n_tokens == 0


def test_policies_are_found_by_name_and_kvmem_needs_hooks() -> None:
    run = Run(hooks=False)
    assert set(POLICIES) == set(BY_NAME["policy"].choices)
    assert isinstance(make_policy("full_context", run.core), FullContext)
    with pytest.raises(InvalidOption):
        make_policy("best", run.core)
    with pytest.raises(ModelUnsupported, match="sliding_window"):
        make_policy("kvmem", run.core)


def test_kvmem_pins_and_counts() -> None:
    run = Run()
    policy = KVMem(run.core)
    run.adopt(policy._session, 0)
    task = run.start(lambda: policy.read(text(600)), 0)
    run.drive(task)
    policy.pin(100, 120)
    with pytest.raises(MandatoryTooLarge):
        policy.pin(200, 450)
    stats = policy.stats()
    assert (stats.n_tokens, stats.n_blocks, stats.n_records) == (600, 75, 75)
    assert stats.pins == ((100, 120),) and stats.store_bytes == 75 * run.model.layout.nbytes
    assert stats.n_resident + stats.n_hidden == stats.n_cells_used
    with pytest.raises(InvalidOption):
        policy.unpin(0, 5)
    policy.unpin(100, 120)
    assert policy.stats().pins == ()
    policy.truncate(7)
    assert policy.n_tokens == 7 and policy.tokens().tolist() == text(600)[:7].tolist()
    policy.evict()
    policy.close()
    assert run.core.pool.n_used == 0
