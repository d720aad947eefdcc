from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest
from fake_context import Answer, FakeContext, expected_answer, fake_resources

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.engine import Engine
from kvmem_llama.engine.requests import Decode, Decoded, Phase
from kvmem_llama.engine.resources import Resources
from kvmem_llama.engine.scheduler import BatchReport
from kvmem_llama.errors import Cancelled, EngineClosed, ModelNotFound

WAIT = 20.0  # seconds; only a test that fails waits as long


@pytest.fixture
def context() -> FakeContext:
    return FakeContext(n_cells=512)


@pytest.fixture
def engine(context: FakeContext) -> Iterator[Engine]:
    with Engine(lambda: fake_resources(context, n_parallel=2)) as engine:
        yield engine


class Keeper:
    """A resident: keeps the cells of its tasks until it is evicted."""

    def __init__(self, name: str = "", evicted: list[str] | None = None) -> None:
        self.name, self.evicted = name, [] if evicted is None else evicted
        self.cells = np.empty(0, dtype=np.int32)
        self.core: EngineCore | None = None
        self.seqs: list[int] = []
        self.refuse: Exception | None = None

    def evict(self) -> None:
        if self.refuse is not None:
            raise self.refuse
        assert self.core is not None and self.core.hooks is not None
        self.evicted.append(self.name)
        self.core.hooks.free(self.cells)
        self.core.pool.free(self.cells)
        self.cells = np.empty(0, dtype=np.int32)

    def add(self, tokens: list[int], gate: threading.Event | None = None) -> Any:
        """A task that appends tokens to what is kept -> the likeliest next token."""

        def task(core: EngineCore) -> Generator[Decode, Decoded, int]:
            self.core = core
            self.seqs.append(core.seq)
            while gate is not None and not gate.is_set():
                yield from self._append(core, [0])
            return (yield from self._append(core, tokens))

        return task

    def _append(self, core: EngineCore, tokens: list[int]) -> Generator[Decode, Decoded, int]:
        first, n = len(self.cells), len(tokens)
        cells = core.pool.alloc(n)
        self.cells = np.concatenate([self.cells, cells])
        decoded = yield Decode(
            core.seq,
            np.array(tokens, dtype=np.int32),
            np.arange(first, first + n, dtype=np.int32),
            cells,
            Phase.READ,
            logits=True,
        )
        assert decoded.n == n and decoded.logits is not None
        return int(decoded.logits.argmax())


def test_work_from_many_threads_comes_out_right(engine: Engine) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    tasks: dict[int, Any] = {}

    def work(i: int) -> None:
        tasks[i] = engine.submit(Answer(prompts[i], 5)).result(WAIT)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert [tasks[i] for i in range(12)] == [expected_answer(p, 5) for p in prompts]


def test_no_more_tasks_run_at_once_than_there_are_sequences_and_the_rest_queue(engine: Engine) -> None:
    sizes: list[int] = []
    engine.observe(lambda report: sizes.append(len(report.pieces)))
    tasks = [engine.submit(Answer([i], 10)) for i in range(7)]
    assert [task.result(WAIT) for task in tasks] == [expected_answer([i], 10) for i in range(7)]
    assert max(sizes) == 2


def test_a_resident_keeps_its_cells_and_its_sequence_between_tasks(engine: Engine) -> None:
    keeper = Keeper()
    engine.submit(keeper.add([1, 2, 3]), resident=keeper).result(WAIT)
    answer = engine.submit(keeper.add([4]), resident=keeper).result(WAIT)
    assert answer == expected_answer([1, 2, 3, 4], 1)[0]
    assert keeper.seqs == [0, 0] and not keeper.evicted


def test_the_least_recently_used_idle_resident_makes_room(engine: Engine) -> None:
    evicted: list[str] = []
    a, b, c = (Keeper(name, evicted) for name in "abc")
    for keeper in (a, b, a, c):
        engine.submit(keeper.add([1]), resident=keeper).result(WAIT)
    assert evicted == ["b"]
    assert c.seqs == b.seqs
    engine.submit(b.add([5]), resident=b).result(WAIT)
    assert evicted == ["b", "a"]


def test_a_busy_resident_is_not_evicted_and_its_tasks_run_one_after_the_other(engine: Engine) -> None:
    gate = threading.Event()
    a, b = Keeper("a"), Keeper("b")
    first = engine.submit(a.add([1], gate), resident=a)
    second = engine.submit(a.add([2]), resident=a)
    other = engine.submit(b.add([3]), resident=b)
    assert other.result(WAIT) == expected_answer([3], 1)[0]
    assert not first.done and not second.done
    third = engine.submit(Answer([7], 2))
    assert third.result(WAIT) == expected_answer([7], 2)
    assert not first.done and not a.evicted and b.evicted == ["b"]
    gate.set()
    first.result(WAIT)
    second.result(WAIT)
    assert len(set(a.seqs)) == 1


def test_a_resident_that_cannot_be_evicted_fails_the_newcomer_only(engine: Engine) -> None:
    keepers = [Keeper(), Keeper()]
    for keeper in keepers:
        engine.submit(keeper.add([1]), resident=keeper).result(WAIT)
        keeper.refuse = OSError("no")
    with pytest.raises(OSError, match="no"):
        engine.submit(Answer([1], 1)).result(WAIT)
    keepers[0].refuse = None
    assert engine.submit(Answer([1], 1)).result(WAIT) == expected_answer([1], 1)
    assert engine.submit(keepers[1].add([2]), resident=keepers[1]).result(WAIT) is not None


def test_releasing_a_resident_frees_its_cells_but_not_while_its_task_runs(engine: Engine) -> None:
    keeper, gate = Keeper("k"), threading.Event()
    task = engine.submit(keeper.add([1], gate), resident=keeper)
    while not keeper.seqs:
        time.sleep(0.001)
    assert not engine.release(keeper)
    gate.set()
    task.result(WAIT)
    assert engine.release(keeper)
    assert keeper.evicted == ["k"]
    assert not engine.release(keeper)
    assert engine.call(lambda core: core.pool.n_used) == 0


def test_leftovers_of_a_task_are_gone_before_the_next_one_gets_its_sequence(
    engine: Engine, context: FakeContext
) -> None:
    def messy(core: EngineCore) -> Generator[Decode, Decoded, None]:
        cells = core.pool.alloc(2)
        tokens = np.array([8, 9], dtype=np.int32)
        yield Decode(core.seq, tokens, np.arange(2, dtype=np.int32), cells, Phase.READ)

    engine.submit(messy).result(WAIT)
    assert engine.submit(Answer([1], 3)).result(WAIT) == expected_answer([1], 3)


# Waiting, cancelling


@pytest.mark.parametrize("end", ["cancel", "stop"])
def test_a_queued_task_can_be_cancelled(engine: Engine, end: str) -> None:
    gate = threading.Event()
    keepers = [Keeper(), Keeper()]
    running = [engine.submit(k.add([1], gate), resident=k) for k in keepers]
    answer = Answer([1], 1)
    queued = engine.submit(answer)
    getattr(queued, end)()
    with pytest.raises(Cancelled):
        queued.result(WAIT)
    assert answer.log == []
    gate.set()
    for task in running:
        task.result(WAIT)


def test_cancel_stops_a_running_task_and_the_engine_goes_on(engine: Engine) -> None:
    task_is_known = threading.Event()
    answer = Answer([1], 50)
    task = engine.submit(answer, on_event=lambda event: task_is_known.wait(WAIT) and task.cancel())
    task_is_known.set()
    with pytest.raises(Cancelled):
        task.result(WAIT)
    assert answer.log == ["Cancelled", "freed"]
    assert engine.submit(Answer([2], 3)).result(WAIT) == expected_answer([2], 3)
    task.cancel()  # of a task that has ended: nothing


def test_result_gives_up_after_its_timeout_and_the_task_goes_on(engine: Engine) -> None:
    keeper, gate = Keeper(), threading.Event()
    task = engine.submit(keeper.add([1], gate), resident=keeper)
    with pytest.raises(TimeoutError, match=r"running after 0\.05 s"):
        task.result(0.05)
    gate.set()
    assert isinstance(task.result(WAIT), int)


def test_stop_is_a_wish_that_the_task_reads(engine: Engine) -> None:
    answer = Answer([1], 400)

    def task(core: EngineCore) -> Generator[Decode, Decoded, int]:
        me = core.current_task
        assert me is not None
        started.set()
        n = 0
        steps = answer(core)
        request = next(steps)
        while not me.stop_requested:
            request = steps.send((yield request))
            n += 1
            if n == 300:
                stopped.wait(WAIT)
        steps.close()
        return n

    started, stopped = threading.Event(), threading.Event()
    handle = engine.submit(task)
    assert started.wait(WAIT)
    handle.stop()
    stopped.set()
    assert handle.result(WAIT) <= 300
    assert not handle.cancel_requested


def test_stop_wakes_a_task_that_is_paused_for_its_reader(engine: Engine, context: FakeContext) -> None:
    context.seconds = 0.002  # the reader comes before the task could end

    def task(core: EngineCore) -> Generator[Decode, Decoded, int]:
        me = core.current_task
        assert me is not None
        steps = Answer([1], 400)(core)
        request, n = next(steps), 0
        while not me.stop_requested:
            request = steps.send((yield request))
            n += 1
        steps.close()
        return n

    handle = engine.submit(task)
    handle._events._capacity = 4
    events = handle.events()
    next(events)
    wait_until(lambda: handle.behind and not engine._owner.scheduler.has_work)
    handle.stop()
    results: list[int] = []
    other = threading.Thread(target=lambda: results.append(handle.result(WAIT)))  # the reader reads no more
    other.start()
    other.join(WAIT)
    assert results and results[0] < 400


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_owner_thread_is_not_allowed_to_wait_for_its_own_task(engine: Engine) -> None:
    def task(core: EngineCore) -> Generator[Decode, Decoded, None]:
        assert core.current_task is not None
        core.current_task.result()
        yield

    with pytest.raises(RuntimeError, match="cannot wait"):
        engine.submit(task).result(WAIT)


# Events


def test_events_are_read_while_the_task_runs(engine: Engine) -> None:
    seen: list[object] = []
    task = engine.submit(Answer([1, 2], 30), on_event=seen.append)
    assert list(task.events()) == expected_answer([1, 2], 30) == seen
    assert task.done
    assert list(task.events()) == []


def test_only_one_reader_may_read_events(engine: Engine) -> None:
    task = engine.submit(Answer([1], 30))
    events = task.events()
    next(events)
    with pytest.raises(RuntimeError, match="read already"):
        next(task.events())
    events.close()  # type: ignore[attr-defined]
    assert len(list(task.events())) <= 29


def test_a_reader_that_stops_reading_and_waits_for_the_result_gets_it(engine: Engine) -> None:
    from kvmem_llama.engine import events as events_module

    n = events_module.CAPACITY
    assert n > 400
    task = engine.submit(Answer([1], 400))
    events = task.events()
    next(events)
    assert task.result(WAIT) == expected_answer([1], 400)


def test_an_error_of_on_event_is_the_tasks(engine: Engine) -> None:
    def refuse(event: object) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        engine.submit(Answer([1], 3), on_event=refuse).result(WAIT)


# Calls, closing, dying


def test_calls_run_on_the_owner_thread_and_bring_their_errors_back(engine: Engine) -> None:
    assert engine.call(lambda core: threading.current_thread().name) == "kvmem-engine"
    assert engine.call(lambda core: engine.call(lambda same: same is core))
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda core: 1 // 0)


def test_an_error_while_opening_comes_out_of_the_constructor() -> None:
    def fail() -> Resources:
        raise ModelNotFound("nowhere.gguf")

    with pytest.raises(ModelNotFound):
        Engine(fail)


def test_closing_ends_running_and_queued_tasks_and_frees_once(context: FakeContext) -> None:
    engine = Engine(lambda: fake_resources(context, n_parallel=1))
    gate = threading.Event()
    keeper = Keeper()
    running = engine.submit(keeper.add([1], gate), resident=keeper)
    queued = engine.submit(Answer([2], 2))
    reader = threading.Thread(target=lambda: list(running.events()))
    reader.start()
    engine.close()
    engine.close()
    for task in (running, queued):
        with pytest.raises(EngineClosed):
            task.result(WAIT)
    reader.join(WAIT)
    assert not reader.is_alive()
    assert context.n_closed == 1
    assert engine.closed
    with pytest.raises(EngineClosed):
        engine.submit(Answer([1], 1))
    with pytest.raises(EngineClosed):
        engine.call(lambda core: 0)


def test_closing_from_the_owner_thread_does_not_wait_for_itself(engine: Engine) -> None:
    task = engine.submit(Answer([1], 50), on_event=lambda event: engine.close())
    with pytest.raises(EngineClosed):
        task.result(WAIT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_owner_thread_dies_every_waiter_is_told(context: FakeContext) -> None:
    engine = Engine(lambda: fake_resources(context, n_parallel=1))
    all_submitted = threading.Event()

    def crash(core: EngineCore, i: int) -> None:
        all_submitted.wait(WAIT)
        context.crash = SystemExit("boom")

    answer = Answer([1], 50)
    answer.before_token = crash
    running = engine.submit(answer)
    queued = engine.submit(Answer([2], 2))
    all_submitted.set()
    for task in (running, queued):
        with pytest.raises(EngineClosed, match="died of SystemExit: boom"):
            task.result(WAIT)
    with pytest.raises(EngineClosed, match="boom"):
        engine.submit(Answer([3], 1))
    with pytest.raises(EngineClosed, match="boom"):
        engine.call(lambda core: 0)
    assert context.n_closed == 1
    engine.close()


def test_a_call_that_waits_when_the_thread_dies_is_told_too(context: FakeContext) -> None:
    engine = Engine(lambda: fake_resources(context))
    entered, go = threading.Event(), threading.Event()

    def block(core: EngineCore) -> None:
        entered.set()
        go.wait(WAIT)

    threading.Thread(target=lambda: engine.call(block)).start()
    entered.wait(WAIT)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            engine.call(lambda core: 0)
        except EngineClosed as error:
            errors.append(error)

    def stop_then_call() -> None:
        engine._inbox.put(engine._owner.stop)  # the thread ends with the call below unread
        call()

    waiter = threading.Thread(target=stop_then_call)
    waiter.start()
    time.sleep(0.05)
    go.set()
    waiter.join(WAIT)
    assert not waiter.is_alive()
    engine.close()


def test_observers_serve_as_failpoints(engine: Engine) -> None:
    answer = Answer(list(range(40)), 50)
    tokens: list[int] = []

    def at_third_token(report: BatchReport) -> None:
        [piece] = report.pieces
        if piece.phase is Phase.DECODE:
            tokens.append(report.number)
            if len(tokens) == 3:
                piece.task.cancel()

    engine.observe(at_third_token)
    with pytest.raises(Cancelled):
        engine.submit(answer).result(WAIT)
    assert len(tokens) == 3
