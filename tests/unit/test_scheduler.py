from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from fake_context import Answer, FakeContext, expected_answer, fake_core
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.engine.batching import Candidate, compose
from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import Decode, Decoded, Phase
from kvmem_llama.engine.scheduler import BatchReport, Scheduler
from kvmem_llama.engine.task import Task
from kvmem_llama.errors import Cancelled, CaptureMismatch, DecodeFailed, EngineClosed, HookFailed


def run(core: EngineCore, *makers: Any) -> list[Task[Any]]:
    """Runs tasks on sequences 0, 1, ... until all have ended."""
    scheduler = Scheduler(core)
    tasks = [Task(make) for make in makers]
    for seq, task in enumerate(tasks):
        scheduler.add(task, seq)
    while scheduler.run_batch():
        pass
    assert scheduler.n_running == 0
    return tasks


# Composing


candidates = st.lists(
    st.builds(Candidate, n=st.integers(1, 40), decode=st.booleans(), last_served=st.integers(-1, 5)),
    max_size=8,
).map(lambda many: [Candidate(1 if c.decode else c.n, c.decode, c.last_served) for c in many])


@given(candidates, st.integers(1, 64))
def test_a_batch_is_as_full_as_the_requests_allow_and_no_fuller(many: list[Candidate], n_batch: int) -> None:
    pieces = compose(many, n_batch)
    assert len({i for i, _ in pieces}) == len(pieces)
    assert all(1 <= n <= many[i].n for i, n in pieces)
    total = sum(n for _, n in pieces)
    assert total <= n_batch
    if n_batch > 1:
        assert total == min(n_batch, sum(c.n for c in many)) or any(c.decode for c in many)
    kinds = [many[i].decode for i, _ in pieces]
    assert kinds == sorted(kinds, reverse=True), "answers come first"


@given(candidates, st.integers(2, 64))
def test_both_kinds_advance_in_every_batch(many: list[Candidate], n_batch: int) -> None:
    pieces = compose(many, n_batch)
    for kind in (True, False):
        if any(c.decode is kind for c in many):
            assert any(many[i].decode is kind for i, _ in pieces)


@given(candidates, st.integers(1, 64))
def test_prefill_shares_differ_by_one_token_unless_a_request_is_smaller(
    many: list[Candidate], n_batch: int
) -> None:
    taken = dict(compose(many, n_batch))
    shares = [taken.get(i, 0) for i, c in enumerate(many) if not c.decode and taken.get(i, 0) < c.n]
    assert not shares or max(shares) - min(shares) <= 1


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 5))
def test_nobody_waits_for_more_batches_than_there_are_requests(kinds: list[bool], n_batch: int) -> None:
    last = [-1] * len(kinds)
    for number in range(5 * len(kinds)):
        many = [Candidate(1 if d else 100, d, last[i]) for i, d in enumerate(kinds)]
        for i, _ in compose(many, n_batch):
            last[i] = number
    assert min(last) >= 4 * len(kinds) - 1


# Running


def test_one_sequence_is_decoded_as_a_plain_loop_does_it() -> None:
    context = FakeContext(n_batch=16)
    prompt = list(range(1, 41))
    [task] = run(fake_core(context), Answer(prompt, 3))
    assert task.result() == expected_answer(prompt, 3)
    assert [len(batch) for batch in context.batches] == [16, 16, 8, 1, 1, 1]
    assert [p for batch in context.batches for _, p in batch] == list(range(43))


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("n_batch", [1, 2, 5, 16, 64])
def test_sequences_together_answer_as_each_alone(hooks: bool, n_batch: int) -> None:
    context = FakeContext(n_batch=n_batch)
    prompts = [[3, 1, 4], list(range(30)), [9] * 17, [5]]
    tasks = run(fake_core(context, hooks=hooks), *(Answer(p, 6) for p in prompts))
    assert [task.result() for task in tasks] == [expected_answer(p, 6) for p in prompts]
    assert max(len(batch) for batch in context.batches) <= n_batch


def test_answers_go_on_during_a_long_prefill_and_the_prefill_too() -> None:
    context = FakeContext(n_cells=1024, n_batch=8)
    run(fake_core(context), Answer(list(range(90)) * 4), Answer([1], 30), Answer([2], 30))
    mixed = [batch for batch in context.batches if len({seq for seq, _ in batch}) == 3]
    assert len(mixed) >= 29
    assert all([seq for seq, _ in batch].count(0) == 6 for batch in mixed[1:])


def test_rows_number_the_tokens_of_the_batch_and_none_exist_without_hooks() -> None:
    context = FakeContext(n_batch=16)
    first, second = Answer(list(range(12))), Answer(list(range(12)))
    run(fake_core(context), first, second)
    assert [d.rows.tolist() for d in first.decoded] == [list(range(8)), list(range(4))]
    assert [d.rows.tolist() for d in second.decoded] == [list(range(8, 16)), list(range(4, 8))]
    bare = Answer([1, 2, 3])
    run(fake_core(FakeContext(), hooks=False), bare)
    assert bare.decoded[0].rows.tolist() == []


def test_logits_come_only_with_the_last_token_and_belong_to_the_sequence() -> None:
    context = FakeContext(n_batch=4)
    answers = [Answer([1, 2, 3]), Answer([4, 5, 6])]
    run(fake_core(context), *answers)
    for answer in answers:
        assert [d.logits is None for d in answer.decoded] == [True, False]
        assert np.array_equal(answer.decoded[-1].logits, _alone(answer.prompt))


def _alone(prompt: list[int]) -> np.ndarray:
    logits = np.zeros(97, dtype=np.float32)
    logits[expected_answer(prompt, 1)[0]] = 1
    return logits


def test_k_is_always_captured_and_q_when_one_request_of_the_batch_wants_it() -> None:
    context = FakeContext(n_batch=16)
    run(fake_core(context), Answer(list(range(20))), Answer([1, 2], capture_q=True))
    assert context.flags == [(True, True), (True, False)]


# Failures


def test_a_failed_decode_reaches_the_tasks_of_its_batch_and_leaves_no_cell_visible() -> None:
    context = FakeContext(n_batch=16)
    core = fake_core(context)
    scheduler = Scheduler(core)
    hit = [Task(Answer([1, 2, 3], 4)), Task(Answer([4, 5, 6], 4))]
    for seq, task in enumerate(hit):
        scheduler.add(task, seq)
    scheduler.run_batch()
    context.fail = [-3]
    scheduler.run_batch()
    for task in hit:
        with pytest.raises(DecodeFailed, match="-3"):
            task.result()
    assert np.all(context.position == -1)
    assert core.pool.n_free == core.pool.n_cells
    later = Task(Answer([7, 8], 3))
    scheduler.add(later, 0)
    while scheduler.run_batch():
        pass
    assert later.result() == expected_answer([7, 8], 3)


def test_tasks_outside_the_failed_batch_go_on() -> None:
    context = FakeContext(n_batch=1)
    core = fake_core(context)
    scheduler = Scheduler(core)
    first, second = Task(Answer([1], 5)), Task(Answer([2], 5))
    scheduler.add(first, 0)
    scheduler.add(second, 1)
    context.fail = [1]
    while scheduler.run_batch():
        pass
    with pytest.raises(DecodeFailed):
        first.result()
    assert second.result() == expected_answer([2], 5)


def test_a_task_may_survive_a_failed_decode_and_ask_again() -> None:
    context = FakeContext()

    def stubborn(core: EngineCore) -> Generator[Decode, Decoded, int]:
        cells = core.pool.alloc(3)
        request = Decode(
            core.seq,
            np.array([1, 2, 3], np.int32),
            np.arange(3, dtype=np.int32),
            cells,
            Phase.READ,
            logits=True,
        )
        try:
            yield request
        except DecodeFailed:
            decoded = yield request
            assert decoded.logits is not None
            return int(decoded.logits.argmax())
        return -1

    context.fail = [1]
    [task] = run(fake_core(context), stubborn)
    assert task.result() == expected_answer([1, 2, 3], 1)[0]


def test_a_missing_captured_row_is_noticed() -> None:
    context = FakeContext()
    context.lose_rows = 1
    answer = Answer([1, 2, 3])
    [task] = run(fake_core(context), answer)
    with pytest.raises(CaptureMismatch, match=r"expected 3 rows .* got 2 rows"):
        task.result()
    assert answer.log == ["CaptureMismatch", "freed"]
    assert np.all(context.position == -1)


def test_a_hook_that_refuses_fails_the_batch_before_anything_is_decoded() -> None:
    context = FakeContext()
    context.refuse = HookFailed(-3, "cell 0 is occupied")
    [task] = run(fake_core(context), Answer([1, 2, 3]))
    with pytest.raises(HookFailed, match="occupied"):
        task.result()
    assert context.batches == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq": 3}, "sequence 3"),
        ({"tokens": np.array([97, 1], np.int32)}, "vocabulary"),
        ({"tokens": np.array([-1, 1], np.int32)}, "vocabulary"),
        ({"tokens": np.empty(0, np.int32)}, "at least one"),
        ({"positions": np.array([1, 1], np.int32)}, "ascend"),
        ({"positions": np.array([-1, 1], np.int32)}, "ascend"),
        ({"positions": np.array([1], np.int32)}, "as many"),
        ({"cells": np.array([0, 0], np.int32)}, "twice"),
        ({"cells": np.array([0, 200], np.int32)}, "not allocated"),
        ({"cells": np.array([0, 9999], np.int32)}, "not allocated"),
    ],
)
def test_a_malformed_request_fails_its_own_task_and_no_other(change: dict[str, Any], message: str) -> None:
    context = FakeContext()

    def faulty(core: EngineCore) -> Generator[Decode, Decoded, None]:
        cells = core.pool.alloc(2)
        try:
            fields = {
                "seq": core.seq,
                "tokens": np.array([1, 2], np.int32),
                "positions": np.array([0, 1], np.int32),
                "cells": cells,
                "phase": Phase.READ,
            }
            yield Decode(**{**fields, **change})
        finally:
            core.pool.free(cells)

    bad, good = run(fake_core(context), faulty, Answer([1, 2], 2))
    with pytest.raises(ValueError, match=message):
        bad.result()
    assert good.result() == expected_answer([1, 2], 2)
    assert all(seq == 1 for batch in context.batches for seq, _ in batch)


def test_what_a_task_raises_reaches_its_result_alone() -> None:
    context = FakeContext()

    def broken(core: EngineCore) -> Generator[Decode, Decoded, None]:
        raise ZeroDivisionError
        yield

    def unmakeable(core: EngineCore) -> Generator[Decode, Decoded, None]:
        raise KeyError("no")

    late = Answer([1, 2], 5)
    late.before_token = lambda core, i: 1 // (3 - i) and None
    tasks = run(fake_core(context), broken, unmakeable, late, Answer([3], 8))
    for task, error in zip(tasks[:3], (ZeroDivisionError, KeyError, ZeroDivisionError), strict=True):
        with pytest.raises(error):
            task.result()
    assert tasks[3].result() == expected_answer([3], 8)


def test_a_task_without_any_decode_ends_at_once() -> None:
    def quick(core: EngineCore) -> Generator[Decode, Decoded, str]:
        if core.n_view < 0:
            yield  # type: ignore[misc]
        return "quick"

    context = FakeContext()
    [task] = run(fake_core(context), quick)
    assert task.result() == "quick"
    assert context.batches == []


# Cancelling


@pytest.mark.parametrize("point", range(9))
def test_cancel_rolls_back_before_the_next_decode_and_leaves_the_others_alone(point: int) -> None:
    context = FakeContext(n_batch=8)
    core = fake_core(context)
    scheduler = Scheduler(core)
    answer = Answer(list(range(20)), 9)
    doomed, other = Task(answer), Task(Answer([1], 20))
    scheduler.add(doomed, 0)
    scheduler.add(other, 1)
    for _ in range(point):
        scheduler.run_batch()
    doomed.cancel()
    n = len(context.batches)
    while scheduler.run_batch():
        pass
    with pytest.raises(Cancelled):
        doomed.result()
    assert answer.log == ["Cancelled", "freed"]
    assert all(seq == 1 for batch in context.batches[n:] for seq, _ in batch)
    assert other.result() == expected_answer([1], 20)
    assert core.pool.n_free == core.pool.n_cells


def test_a_generator_that_asks_for_a_decode_while_it_is_rolled_back_is_ended() -> None:
    def clinging(core: EngineCore) -> Generator[Decode, Decoded, None]:
        cells = core.pool.alloc(1)
        request = Decode(core.seq, np.array([1], np.int32), np.array([0], np.int32), cells, Phase.READ)
        try:
            yield request
        except Cancelled:
            yield request

    core = fake_core(FakeContext())
    scheduler = Scheduler(core)
    task = Task(clinging)
    scheduler.add(task, 0)
    task.cancel()
    assert not scheduler.run_batch()
    with pytest.raises(RuntimeError, match="rolled back"):
        task.result()


def test_a_generator_may_end_with_a_result_when_it_is_cancelled() -> None:
    def graceful(core: EngineCore) -> Generator[Decode, Decoded, str]:
        cells = core.pool.alloc(1)
        try:
            yield Decode(core.seq, np.array([1], np.int32), np.array([0], np.int32), cells, Phase.READ)
        except Cancelled:
            return "as far as it went"
        return "all"

    scheduler = Scheduler(fake_core(FakeContext()))
    task = Task(graceful)
    scheduler.add(task, 0)
    task.cancel()
    scheduler.run_batch()
    assert task.result() == "as far as it went"


def test_closing_ends_every_task_after_it_has_cleaned_up() -> None:
    core = fake_core(FakeContext())
    scheduler = Scheduler(core)
    answers = [Answer([1, 2], 50), Answer([3], 50)]
    tasks = [Task(answer) for answer in answers]
    for seq, task in enumerate(tasks):
        scheduler.add(task, seq)
    scheduler.run_batch()
    scheduler.close(EngineClosed())
    for task, answer in zip(tasks, answers, strict=True):
        with pytest.raises(EngineClosed):
            task.result()
        assert answer.log == ["EngineClosed", "freed"]


# Watching


def test_observers_see_every_batch_with_its_parts() -> None:
    context = FakeContext(n_batch=8)
    scheduler = Scheduler(fake_core(context))
    seen: list[BatchReport] = []
    forget = scheduler.observe(seen.append)
    task = Task(Answer(list(range(10)), 2))
    scheduler.add(task, 2)
    for _ in range(3):
        scheduler.run_batch()
    forget()
    while scheduler.run_batch():
        pass
    assert [(r.number, r.n_tokens, r.rc) for r in seen] == [(0, 8, 0), (1, 2, 0), (2, 1, 0)]
    assert [(p.task, p.seq, p.phase, p.n) for p in seen[2].pieces] == [(task, 2, Phase.DECODE, 1)]
    assert all(r.seconds >= 0 for r in seen)


def test_an_observer_that_fails_is_removed_and_disturbs_nobody() -> None:
    scheduler = Scheduler(fake_core(FakeContext()))
    calls = []

    def faulty(report: BatchReport) -> None:
        calls.append(report)
        raise OSError

    scheduler.observe(faulty)
    task = Task(Answer([1, 2], 4))
    scheduler.add(task, 0)
    while scheduler.run_batch():
        pass
    assert task.result() == expected_answer([1, 2], 4)
    assert len(calls) == 1


def test_events_come_in_order_and_a_reader_that_lags_pauses_its_task_only() -> None:
    context = FakeContext(n_cells=1000, n_batch=8)
    scheduler = Scheduler(fake_core(context))
    slow, other = (Task(Answer([i], 300), event_capacity=50) for i in (1, 2))
    scheduler.add(slow, 0)
    scheduler.add(other, 1)
    events = slow.events()
    scheduler.run_batch()
    scheduler.run_batch()
    first = next(events)
    while scheduler.run_batch():
        pass
    assert other.done and not slow.done
    assert other.n_events_dropped == 250
    got = [first]
    while not slow.done:
        got += [next(events) for _ in range(40)]
        while scheduler.run_batch():
            pass
    got += list(events)
    assert got == slow.result()
    assert slow.n_events_dropped == 0
