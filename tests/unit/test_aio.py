"""The twin for asyncio, over the fake model: the same names, cancelled cleanly, and no thread for a token."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import wraps
from pathlib import Path

import fake_durable
import pytest
from fake_durable import engine_on
from fake_model import END, FakeVocab
from fake_run import checked_sessions, faked_template, text
from tiny_models import write_model

from kvmem_llama import Finished, Progress, SamplingParams, TextPiece, aio, workspace
from kvmem_llama.engine.events import EventQueue
from kvmem_llama.errors import Cancelled, EngineClosed, InvalidOption, WorkspaceBusy, WorkspaceClosed
from kvmem_llama.native.layout import I32

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)
LONG = "".join(FakeVocab().detokenize(text(1500)).decode())
Body = Callable[[aio.Engine, fake_durable.Engine], Awaitable[None]]


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[aio.Engine, fake_durable.Engine]]:
    with engine_on(folder) as engine:
        async with aio.Engine.over(engine) as it:
            yield it, engine


def on_loop(body: Body) -> Callable[[Path], None]:
    """A test that runs on an event loop."""

    @wraps(body)
    def test(tmp_path: Path) -> None:
        async def run() -> None:
            async with opened(tmp_path / "store") as engines:
                await asyncio.wait_for(body(*engines), 60)

        asyncio.run(run())

    del test.__wrapped__  # type: ignore[attr-defined]  # pytest looks at its arguments
    return test


def hold(engine: fake_durable.Engine) -> threading.Event:
    go = threading.Event()
    engine.model.before_decode = lambda batch: go.wait(10) and None
    return go


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_names_are_the_same() -> None:
    by_hand = {
        "step_by_hand",
        "take_over",
    }  # for what samples itself, and for what keeps many histories: the server
    own = {"watch", "unwatch", "take", "when_done", "ends_soon"}  # for a reader that must not wait
    assert public(aio.Step) == public(workspace.Step) - own
    assert public(aio.Answer) == public(workspace.Answer) - own
    assert public(workspace.Workspace) - public(aio.Workspace) == by_hand
    assert public(aio.Workspace) <= public(workspace.Workspace)
    for name in ("add", "chat", "complete", "search", "pin", "truncate", "verify"):
        one, other = getattr(workspace.Workspace, name), getattr(aio.Workspace, name)
        assert inspect.signature(one).parameters == inspect.signature(other).parameters, name
        assert inspect.iscoroutinefunction(inspect.unwrap(other, stop=inspect.iscoroutinefunction))


@on_loop
async def test_an_answer_is_streamed(engine: aio.Engine, below: fake_durable.Engine) -> None:
    async with await engine.workspace(system="be brief") as ws:
        await (await ws.add("abc")).result()
        below.model.forced = [40, 41, END]
        answer = await ws.chat("why?", sampling=GREEDY)
        events = [event async for event in answer]
        assert [event.text for event in events if isinstance(event, TextPiece)] == ["H", "I"]
        assert isinstance(events[-1], Finished)
        assert await answer.text == "HI" and await answer.tokens == (40, 41, END)
        assert await answer.finish_reason == "stop" and (await answer.usage).generated == 3
        assert (await answer.timings).decode > 0 and await answer.recall == ()
        assert len(await ws.turns()) == 1 and (await ws.history()).shape == (ws.n_tokens,)
        assert (await ws.stats()).n_tokens == ws.n_tokens
        await (await ws.add(LONG, source="log")).result()
        answer = await ws.chat("and?", sampling=GREEDY, max_tokens=2)
        assert any([isinstance(event, Progress) async for event in answer]) and len(await answer.recall) == 1
        assert len((await ws.search("why?", 2)).blocks) == 2
        await ws.pin(8, 16)
        await ws.unpin(range(8, 16))
        async with await ws.fork() as other:
            assert (await (await other.complete("b", sampling=GREEDY, max_tokens=2)).usage).generated == 2
        await ws.truncate(10)
        assert ws.n_tokens == 10 and engine.detokenize(engine.tokenize("abc")) == "abc"


@on_loop
async def test_leaving_the_loop_cancels(engine: aio.Engine, below: fake_durable.Engine) -> None:
    async with await engine.workspace() as ws:
        for kind in (TextPiece, Progress):
            answer = await ws.chat("why?", sampling=GREEDY)
            async for event in answer:
                if isinstance(event, kind):
                    break
            assert (await (await ws.add("")).usage).prompt == 0
            with pytest.raises(Cancelled):
                await answer.text
        answer = await ws.chat("why?", sampling=GREEDY)
        with pytest.raises(ZeroDivisionError):
            async for _event in answer:
                _ = 1 / 0
        assert (await ws.history()).size == 0
        async with await ws.chat("why?", sampling=GREEDY) as answer:
            pass
        assert answer.done and ws.n_tokens == 0
        assert (await (await ws.chat("why?", sampling=GREEDY, max_tokens=2)).usage).generated == 2


@on_loop
async def test_a_cancelled_task_cancels_its_step(engine: aio.Engine, below: fake_durable.Engine) -> None:
    async def read(answer: aio.Answer, started: asyncio.Event) -> None:
        async for _event in answer:
            started.set()

    async def wait(answer: aio.Answer, started: asyncio.Event) -> None:
        started.set()
        await answer.result()

    async with await engine.workspace() as ws:
        for body in (read, wait):
            answer, started = await ws.chat("why?", sampling=GREEDY), asyncio.Event()
            task = asyncio.create_task(body(answer, started))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await ws.history()).size == 0
            with pytest.raises(Cancelled):
                await answer.text
        with pytest.raises(TimeoutError):  # of somebody else's: the step ends with the task that waits
            await asyncio.wait_for((await ws.chat("why?", sampling=GREEDY)).result(), 0.01)
        assert (await ws.history()).size == 0


@on_loop
async def test_a_step_ends_with_a_task_that_is_kept(engine: aio.Engine, below: fake_durable.Engine) -> None:
    """Who was cancelled is not dropped here, and goes on with what it had begun to read."""
    async with await engine.workspace() as ws:
        answer, started = await ws.chat("why?", sampling=GREEDY), asyncio.Event()
        events = aiter(answer)

        async def read() -> None:
            async for _event in events:
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        await asyncio.wait([task])
        assert answer._step.ends_soon and (await ws.history()).size == 0
        with pytest.raises(Cancelled):
            async for _event in events:
                pass


@on_loop
async def test_the_end_is_waited_for_whatever_a_reader_does(
    engine: aio.Engine, below: fake_durable.Engine
) -> None:
    """A reader that reads no further holds a step back, but not from who waits for its end; and it loses
    nothing by that."""
    async with await engine.workspace() as ws:
        for reads_first in (True, False):
            go = hold(below)
            answer = await ws.chat("why?", sampling=GREEDY, max_tokens=60)
            answer._step._task._events._capacity = 8
            waiting = None if reads_first else asyncio.create_task(answer.result())
            await asyncio.sleep(0)
            events = aiter(answer)
            go.set()
            await anext(events)
            result = await asyncio.wait_for(waiting or answer.result(), 20)
            seen = [event async for event in events]
            assert sum(isinstance(event, TextPiece) for event in seen) > 40 and result.n_generated == 60
            assert isinstance(seen[-1], Finished)


@on_loop
async def test_the_next_call_waits_for_one_that_was_cancelled(
    engine: aio.Engine, below: fake_durable.Engine
) -> None:
    """Its thread cannot be stopped, and holds the workspace for as long as it takes."""
    begun, go = threading.Event(), threading.Event()
    vocab = below.core.model.vocab
    tokenize = vocab.tokenize

    def slowly(text: str | bytes, **options: bool) -> I32:
        begun.set()
        go.wait(10)
        return tokenize(text, **options)

    async with await engine.workspace() as ws:
        vocab.tokenize = slowly  # type: ignore[method-assign]
        task = asyncio.create_task(ws.add("abc"))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait([task])
        vocab.tokenize = tokenize  # type: ignore[method-assign]
        asyncio.get_running_loop().call_later(0.05, go.set)
        await (await ws.add("de")).result()
        assert task.cancelled() and engine.detokenize(await ws.history()) == "de"


@on_loop
async def test_a_timeout_of_the_result_leaves_the_step_running(
    engine: aio.Engine, below: fake_durable.Engine
) -> None:
    async with await engine.workspace() as ws:
        go = hold(below)
        answer = await ws.chat("why?", sampling=GREEDY, max_tokens=2)
        with pytest.raises(TimeoutError):
            await answer.result(0.01)
        with pytest.raises(WorkspaceBusy):
            await ws.add("x")
        go.set()
        assert (await answer.usage).generated == 2


@on_loop
async def test_a_call_that_is_cancelled_midway_leaves_nothing(
    engine: aio.Engine, below: fake_durable.Engine
) -> None:
    """What the call had made by then is taken back: a step is cancelled, a workspace closed."""
    async with await engine.workspace() as ws:
        for n in range(12):
            task = asyncio.create_task(ws.chat("why?", sampling=GREEDY))
            for _ in range(n):
                await asyncio.sleep(0)
            if not task.cancel():
                (await task).cancel()
            await asyncio.wait([task])
            assert (await ws.history()).size == 0
        for n in range(6):
            task = asyncio.create_task(engine.workspace("notes"))
            for _ in range(n):
                await asyncio.sleep(0)
            if not task.cancel():
                await (await task).close()
            for _ in range(1000):  # it is in use until it is closed again
                await asyncio.sleep(0.001)
                if not below.shelf._open:
                    break
            else:
                raise AssertionError("a workspace stays open")
            with pytest.raises(asyncio.CancelledError):
                await task


@on_loop
async def test_many_steps_are_watched_by_one_thread(engine: aio.Engine, below: fake_durable.Engine) -> None:
    """While answers are streamed, there is the loop's thread and the engine's, however many answers."""
    seen = set[int]()

    async def ask(number: int) -> str:
        async with await engine.workspace() as ws:
            answer = await ws.chat(f"why {number}?", sampling=GREEDY, max_tokens=40)
            n = before = threading.active_count()
            said = ""
            async for event in answer:
                if isinstance(event, TextPiece):
                    said += event.text
                    n = max(n, threading.active_count())
                    seen.add(threading.get_ident())
            assert said == await answer.text and n <= max(before, n_threads + 2)
            return said

    n_threads = threading.active_count()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    answers = await asyncio.gather(*(ask(i % 3) for i in range(9)))
    assert answers[:3] == answers[3:6] == answers[6:] and seen == {threading.get_ident()}


@on_loop
async def test_use_after_close_is_an_error_that_names_what_is_closed(
    engine: aio.Engine, below: fake_durable.Engine
) -> None:
    ws = await engine.workspace("notes")
    await ws.close()
    await ws.close()
    with pytest.raises(WorkspaceClosed, match="'notes'"):
        await ws.chat("x")
    with pytest.raises(EngineClosed, match="not open"):
        await aio.Engine("model.gguf").workspace()
    with pytest.raises(InvalidOption, match="no such option"):
        await aio.Engine("model.gguf", n_cxt=1).open()
    await engine.close()
    await engine.workspace()  # it was not this one's to close


def test_a_reader_that_does_not_wait_is_told_once_for_what_it_has_not_taken() -> None:
    queue, told = EventQueue(lambda: None, capacity=4), []
    queue.put(1)
    queue.watch(lambda: told.append(True))
    with pytest.raises(RuntimeError):
        queue.watch(lambda: None)
    assert queue.take() == ([1], False) and not told
    queue.put(2)
    queue.put(3)
    assert len(told) == 1 and queue.take() == ([2, 3], False)
    queue.close()
    assert len(told) == 2 and queue.take() == ([], True)
    queue.unwatch()
    for i in range(6):
        queue.put(i)
    assert len(told) == 2 and queue.n_dropped == 2


def test_a_reader_that_does_not_wait_holds_its_task_back() -> None:
    woken: list[bool] = []
    queue = EventQueue(lambda: woken.append(True), capacity=2)
    queue.watch(lambda: None)
    for i in range(3):
        queue.put(i)
    assert queue.behind and not woken and queue.take()[0] == [0, 1, 2]
    assert not queue.behind and woken


def test_an_engine_is_opened_once_however_many_ask(tmp_path: Path) -> None:
    made: list[fake_durable.Engine] = []

    async def run() -> None:
        with ExitStack() as stack:
            engine = aio.Engine()

            def make() -> fake_durable.Engine:
                made.append(stack.enter_context(engine_on(tmp_path / "store")))
                return made[-1]

            engine._make = make
            opening = asyncio.create_task(engine.open())
            await asyncio.sleep(0)
            assert await asyncio.gather(engine.open(), engine.open(), opening) == [engine] * 3
            other = aio.Engine()
            other._make = make
            opening = asyncio.create_task(other.open())
            await asyncio.sleep(0)
            await other.close()  # of what is being opened
            assert opening.done() and len(made) == 2
            assert made[1].closed and not made[0].closed

    asyncio.run(run())


def test_an_engine_is_opened_and_closed_by_async_with(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", "llama")

    async def run() -> None:
        async with aio.Engine(model, n_ctx=256, data_dir=str(tmp_path)) as engine:
            ws = await engine.workspace()
            answer = await ws.complete("Once upon a time", max_tokens=3)
            assert (await answer.usage).generated <= 3
            await engine.open()
        with pytest.raises(EngineClosed):
            await engine.workspace()
        await engine.close()

    asyncio.run(run())
