"""Tasks that wait for something outside of the engine, and tasks that want the logits of every token."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from fake_context import Answer, FakeContext, expected_answer, expected_logits, fake_core

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import Decode, Decoded, Phase, Wait
from kvmem_llama.engine.scheduler import Scheduler
from kvmem_llama.engine.task import Task
from kvmem_llama.errors import Cancelled, EngineClosed


class Waiting:
    """A task that evaluates a token, waits, and evaluates another."""

    def __init__(self) -> None:
        self.came = False
        self.log: list[str] = []

    def __call__(self, core: EngineCore) -> Generator[Decode | Wait, Decoded, str]:
        cells = core.pool.alloc(2)
        try:
            yield self._one(core.seq, 0, cells)
            nothing = yield Wait(lambda: self.came)
            assert nothing.n == 0 and nothing.logits is None
            if core.current_task is not None and core.current_task.stop_requested:
                return "stopped"
            yield self._one(core.seq, 1, cells)
            return "done"
        except (Cancelled, EngineClosed) as error:
            self.log.append(type(error).__name__)
            raise
        finally:
            core.decoder.remove(core.seq)
            core.pool.free(cells)

    def _one(self, seq: int, at: int, cells: Any) -> Decode:
        place = np.array([at], dtype=np.int32)
        return Decode(seq, place + 5, place, cells[at : at + 1], Phase.DECODE)


def started(*makers: Any) -> tuple[Scheduler, list[Task[Any]]]:
    scheduler = Scheduler(fake_core(FakeContext(n_batch=16)))
    tasks = [Task(make) for make in makers]
    for seq, task in enumerate(tasks):
        scheduler.add(task, seq)
    while scheduler.run_batch():
        pass
    return scheduler, tasks


def test_a_task_waits_without_work_and_goes_on_when_it_has_what_it_waits_for() -> None:
    waiting = Waiting()
    scheduler, [task] = started(waiting)
    assert not scheduler.has_work and not task.done
    waiting.came = True
    assert scheduler.has_work
    while scheduler.run_batch():
        pass
    assert task.result() == "done"


def test_others_go_on_while_one_waits() -> None:
    waiting, other = Waiting(), Answer([1, 2, 3], 5)
    scheduler, tasks = started(waiting, other)
    assert tasks[1].result() == expected_answer([1, 2, 3], 5) and not tasks[0].done
    tasks[0].cancel()
    scheduler.run_batch()
    assert waiting.log == ["Cancelled"]


def test_a_task_that_is_stopped_waits_no_longer() -> None:
    scheduler, [task] = started(Waiting())
    task.stop()
    assert scheduler.has_work
    scheduler.run_batch()
    assert task.result() == "stopped"


def test_a_waiting_task_is_cancelled_and_closed_as_any_other() -> None:
    waiting = Waiting()
    scheduler, [task] = started(waiting)
    scheduler.close(EngineClosed())
    assert waiting.log == ["EngineClosed"]
    with pytest.raises(EngineClosed):
        task.result()


def test_a_task_gets_the_logits_of_every_token_if_it_asks_for_them() -> None:
    prompt, seen = list(range(1, 24)), []
    inner = Answer(prompt, 2)

    def every(core: EngineCore) -> Generator[Decode, Decoded, list[int]]:
        assert core.current_task is not None
        core.current_task.on_logits = lambda phase, rows: seen.extend((phase, row.copy()) for row in rows)
        return (yield from inner(core))

    core = fake_core(FakeContext(n_batch=16))
    scheduler, plain = Scheduler(core), Answer([9, 8, 7])
    tasks = [Task(every), Task(plain)]
    for seq, task in enumerate(tasks):
        scheduler.add(task, seq)
    while scheduler.run_batch():
        pass
    answer = tasks[0].result()
    assert answer == expected_answer(prompt, 2)
    tokens = [*prompt, *answer]
    assert [phase for phase, _ in seen] == [Phase.READ] * 23 + [Phase.DECODE] * 2
    for i, (_, row) in enumerate(seen):
        assert np.array_equal(row, expected_logits(list(enumerate(tokens[: i + 1]))))
    assert plain.decoded[-1].logits is not None
