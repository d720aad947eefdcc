"""What ends early or is closed while others are at it: an interrupt, a closed engine, a vocabulary in use."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from fake_durable import Engine, engine_on
from fake_run import checked_sessions, faked_template
from tiny_models import write_model

from kvmem_llama import SamplingParams
from kvmem_llama.durable import Opened
from kvmem_llama.engine.model import Model
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.errors import Cancelled, EngineClosed, WorkspaceNotFound
from kvmem_llama.settings import Settings

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_on(tmp_path / "store") as it:
        yield it


def hold(engine: Engine) -> tuple[threading.Event, threading.Event]:
    """Decodes wait for the second event; the first says that one has begun."""
    begun, go = threading.Event(), threading.Event()

    def wait(batch: object) -> None:
        begun.set()
        go.wait(10)

    engine.model.before_decode = wait
    return begun, go


@contextmanager
def interrupted_once(ready: Callable[[], bool], then: Callable[[], object]) -> Iterator[None]:
    """Within, the main thread gets a Ctrl-C as soon as `ready`; `then` is called as it is raised."""
    stop = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        then()
        raise KeyboardInterrupt

    def watch() -> None:
        while not ready():
            if stop.wait(0.002):
                return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_while_the_loop_waits_cancels_the_step(engine: Engine) -> None:
    with engine.workspace() as ws:
        _, go = hold(engine)
        answer = ws.chat("why?", sampling=GREEDY, max_tokens=50)
        with interrupted_once(lambda: answer._task._events._reader is not None, go.set):
            for _event in answer:
                pass
        with pytest.raises(Cancelled):
            answer.result()
        assert ws.history().size == 0


def test_a_second_reader_is_refused_and_cancels_nothing(engine: Engine) -> None:
    with engine.workspace() as ws:
        answer = ws.chat("why?", sampling=GREEDY, max_tokens=5)
        events = iter(answer)
        next(events)
        with pytest.raises(RuntimeError, match="read already"):
            next(iter(answer))
        assert [*events] and answer.result().n_generated == 5


def test_a_close_that_is_interrupted_frees_everything(engine: Engine) -> None:
    ws = engine.workspace("notes")
    ws.add("abc").result()
    begun, go = hold(engine)
    step = ws.add("defg" * 50)  # several batches
    begun.wait()
    with interrupted_once(lambda: step.ends_soon, go.set):
        ws.close()
    with pytest.raises(Cancelled):
        step.result()
    ws.close()
    with engine.workspace("notes", create=False) as again:  # nobody holds it any more
        assert engine.detokenize(again.history()) == "abc"


def test_a_close_that_failed_is_finished_by_the_next(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ws = engine.workspace("notes")
    failures = [KeyboardInterrupt()]
    close = engine._close_one

    def interrupted(opened: Opened) -> None:
        if failures:
            raise failures.pop()
        close(opened)

    monkeypatch.setattr(engine, "_close_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ws.close()
    ws.close()
    assert not engine.shelf._open


def test_who_closes_second_waits_until_all_is_free(engine: Engine) -> None:
    ws = engine.workspace("notes")
    begun, go = hold(engine)
    step = ws.add("abc")
    begun.wait()
    first, second = threading.Thread(target=ws.close), threading.Thread(target=ws.close)
    first.start()
    while not step.ends_soon:
        pass
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go.set()
    second.join(10)
    assert step.done and not engine.shelf._open
    first.join(10)


def test_a_closed_engine_makes_nothing_and_answers_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with engine_on(folder) as engine:
        ws = engine.workspace("notes")
        ws.chat("why?", sampling=GREEDY, max_tokens=2).result()
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.workspace("new"), engine.workspace, lambda: engine.shelf, lambda: engine.tokenize("a"),
        lambda: engine.detokenize([1]), ws.history, ws.turns, ws.last_message, lambda: ws.has_read("a"),
        ws.verify, ws.stats, ws.tiers, lambda: ws.truncate(0), lambda: ws.chat([]), lambda: ws.add("x"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(EngineClosed, match="the engine is closed"):
            call()
    ws.close()
    with engine_on(folder) as engine:
        with pytest.raises(WorkspaceNotFound):
            engine.workspace("new", create=False)
        assert len(engine.workspace("notes").turns()) == 1


def test_a_model_is_freed_when_nobody_asks_its_vocabulary_any_more(tmp_path: Path) -> None:
    """llama.cpp reads a text without the interpreter's lock: who closes the model meanwhile has to wait."""
    model = Model.load(write_model(tmp_path / "model.gguf", "llama"), Settings())
    vocab, begun, go = model.vocab, threading.Event(), threading.Event()
    order: list[str] = []

    def read(pointer: int) -> None:
        begun.set()
        go.wait(10)
        order.append("read")

    reader = threading.Thread(target=lambda: vocab.using(read))
    reader.start()
    begun.wait()

    def close() -> None:
        model.close()
        order.append("freed")

    closer = threading.Thread(target=close)
    closer.start()
    closer.join(0.05)
    calls: tuple[Callable[[], object], ...] = (
        lambda: vocab.tokenize("a"), lambda: vocab.piece(70), lambda: vocab.is_eog(70),
        lambda: vocab.is_control(70), lambda: vocab.pointer,
    )  # fmt: skip
    for call in calls:
        with pytest.raises(EngineClosed):
            call()
    go.set()
    reader.join(10)
    closer.join(10)
    assert order == ["read", "freed"]


def test_a_text_is_tokenized_while_the_model_is_closed(tmp_path: Path) -> None:
    """Many times over: it has all its tokens, or is refused."""
    path = write_model(tmp_path / "model.gguf", "llama")
    text = "under the mat " * 3000
    for _ in range(6):
        model = Model.load(path, Settings())
        n, counts = len(model.vocab.tokenize(text)), list[int]()

        def work(vocab: Vocab = model.vocab, counts: list[int] = counts) -> None:
            with pytest.raises(EngineClosed):
                while True:
                    counts.append(len(vocab.tokenize(text)))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not counts:
            pass
        model.close()
        for thread in threads:
            thread.join(10)
        assert set(counts) == {n}
