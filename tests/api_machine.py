"""Random calls of the public API in random order, cancelled at random points, against a list of tokens for
each workspace (fake model, real engine, store and files).

A step is either in the history as a whole or not at all. After every call each workspace holds the tokens
that it should, its view is bounded, its counts add up; what is stored is sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import fake_model
import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_run import FakeTemplate
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmem_llama import RecallParams, SamplingParams, TextPiece, aio
from kvmem_llama.engine import core
from kvmem_llama.errors import (
    Cancelled,
    InvalidOption,
    MandatoryTooLarge,
    StoreLocked,
    WorkspaceBusy,
    WorkspaceClosed,
)
from kvmem_llama.memory import answering
from kvmem_llama.memory.invariants import check
from kvmem_llama.memory.session import Session
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.workspace import Answer, Step, Workspace

N_MOST = 4  # workspaces that are open at once
BLOCK = 8
GREEDY = SamplingParams(temp=0)
WAYS = ("result", "events", "cancel", "break", "with", "stop", "busy", "asyncio", "asyncio break", "close")
OWN = ("Workspace", "Session", "History", "View", "Step", "Answer", "Task", "TieredStore", "Opened", "KVMem")


@contextlib.contextmanager
def faked() -> Iterator[None]:
    """Greedy answers and a short template, without llama.cpp; every finished step checks its session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "Sampler", fake_model.FakeSampler)
        patch.setattr(core, "ChatTemplate", FakeTemplate)
        patch.setattr(Session, "after_step", staticmethod(check))
        yield


@contextlib.contextmanager
def folder_in_ram() -> Iterator[Path]:
    shm = Path("/dev/shm")
    name = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None, prefix="kvmem-machine-"))
    try:
        yield name
    finally:
        shutil.rmtree(name)


@dataclass
class Own:
    """A workspace, and what it must hold."""

    ws: Workspace
    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)  # (end of the turn, text)
    pins: list[tuple[int, int]] = field(default_factory=list)

    def cut(self, n: int) -> None:
        """Only the first `n` tokens stay."""
        self.tokens = self.tokens[:n]
        self.answers = [answer for answer in self.answers if answer[0] <= n]


@dataclass
class Memory:
    """What an engine holds when every workspace is closed and gone."""

    n_cells: int
    n_record_bytes: int
    objects: Counter[str]

    @classmethod
    def of(cls, engine: Engine) -> Memory:
        gc.collect()
        kinds = Counter(type(it).__name__ for it in gc.get_objects() if type(it).__name__ in OWN)
        shared = engine.shelf._shared
        n_bytes = 0 if shared is None else shared.pool.n_bytes
        return cls(engine.call(lambda core: core.pool.n_used), n_bytes, kinds)


def text_of(seed: int, n: int) -> str:
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z"), n)
    return "".join(map(chr, letters))


class ApiMachine(RuleBasedStateMachine):
    """All examples share one engine: `engine`, which the test sets."""

    engine: ClassVar[Engine]
    n_calls: ClassVar[int] = 0
    ends: ClassVar[Counter[str]] = Counter()  # of steps: how they were watched, and what became of them
    names: ClassVar[Iterator[int]] = count()
    taken: ClassVar[list[Memory]] = []  # after every example

    def __init__(self) -> None:
        super().__init__()
        self.own: list[Own] = []
        self.closed: list[tuple[Own, str]] = []  # durable ones, with their names

    # -- helpers

    def pick(self, number: int) -> Own | None:
        if not self.own:
            return None
        type(self).n_calls += 1
        return self.own[number % len(self.own)]

    def spot(self, own: Own, number: int) -> int:
        return number % (len(own.tokens) + 1)

    def run_step(self, own: Own, start: Callable[[], Step], way: str, at: int) -> Any:
        """Watches a step to its end -> its result; None if it was cancelled or refused. at: where it is
        left."""
        model, n_decodes = self.engine.model, count()
        try:
            if way.startswith("asyncio"):
                return asyncio.run(self.run_async(start, at if way == "asyncio break" else 10**6))
            step: Step | None = None

            def before_decode(_batch: Any) -> None:
                if step is not None and next(n_decodes) == at:
                    if way == "cancel":
                        step.cancel()
                    elif way == "stop":
                        step.stop()

            model.before_decode = before_decode
            step = start()
            match way:
                case "events":
                    text = "".join(event.text for event in step if isinstance(event, TextPiece))
                    assert text == step.result().text
                case "break":
                    for i, _event in enumerate(step):
                        if i == at:
                            break
                case "with":
                    with step:
                        for _event, _ in zip(step, range(at), strict=False):
                            pass
                    assert step.done
                case "busy":
                    for call in (own.ws.history, lambda: own.ws.add("x"), own.ws.fork):
                        with contextlib.suppress(WorkspaceBusy):
                            if call is own.ws.history:
                                call()
                            elif not step.done:
                                raise WorkspaceBusy
                    assert own.ws.stats().n_view == own.ws.n_view
                case "close":
                    own.ws.close()
                    with pytest.raises(WorkspaceClosed):
                        own.ws.add("x")
            self.settle(step, way)
            return step.result()
        except (Cancelled, MandatoryTooLarge) as error:
            self.ends[f"{way}: {type(error).__name__}"] += 1
            return None
        finally:
            model.before_decode = lambda batch: None

    def settle(self, step: Step, way: str) -> None:
        with contextlib.suppress(Cancelled, MandatoryTooLarge):
            step.result(60)
            self.ends[f"{way}: finished"] += 1

    async def run_async(self, start: Callable[[], Step], at: int) -> Any:
        step = start()
        twin: aio.Step[Any] = aio.Answer(step) if isinstance(step, Answer) else aio.Step(step)
        i = 0
        async for _event in twin:
            if i == at:
                break
            i += 1
        self.ends[f"asyncio: {'left' if i == at else 'finished'}"] += 1
        return await twin.result()

    def added(self, own: Own, result: Any, before: int, wanted: str) -> None:
        """The step has added exactly the text that was wanted, and its answer."""
        history = own.ws.history().tolist()
        assert history[:before] == own.tokens[:before]
        answer = list(result.tokens)
        assert len(history) == result.usage.total and history[len(history) - len(answer) :] == answer
        between = history[before : len(history) - len(answer)]
        said = self.engine.detokenize(between)
        assert said.endswith(wanted) and len(between) <= len(wanted) + 2, (said, wanted)
        own.tokens = history

    def left(self, own: Own, way: str) -> None:
        """A durable workspace that was closed in the midst of a step is opened again."""
        if way != "close" or own not in self.own:
            return
        name = own.ws.name
        if name is None:
            self.own.remove(own)
        else:
            own.ws = self.engine.workspace(name, create=False)

    # -- rules

    @initialize(durable=st.booleans(), n=st.sampled_from((0, 300, 900)))
    def begin(self, durable: bool, n: int) -> None:
        self.open(durable)
        self.own[0].ws.add(text_of(n, n)).result()
        self.own[0].tokens = self.own[0].ws.history().tolist()

    @rule(durable=st.booleans())
    def open(self, durable: bool) -> None:
        if len(self.own) >= N_MOST:
            return
        type(self).n_calls += 1
        self.own.append(Own(self.engine.workspace(f"own-{next(self.names)}" if durable else None)))

    @rule(number=st.integers(0, 99))
    def close(self, number: int) -> None:
        own = self.pick(number)
        if own is None:
            return
        self.own.remove(own)
        name = own.ws.name
        for _again in range(2):
            own.ws.close()
        with pytest.raises(WorkspaceClosed):
            own.ws.history()
        if name is not None:
            self.closed.append((own, name))

    @rule(number=st.integers(0, 99))
    def reopen(self, number: int) -> None:
        if not self.closed or len(self.own) >= N_MOST:
            return
        type(self).n_calls += 1
        own, name = self.closed.pop(number % len(self.closed))
        own.ws = self.engine.workspace(name, create=False)
        with pytest.raises(StoreLocked):
            self.engine.workspace(name)
        self.own.append(own)

    @rule(
        number=st.integers(0, 99),
        n=st.sampled_from((0, 3, 20, 100, 400)),
        seed=st.integers(0, 3),
        way=st.sampled_from(WAYS),
        at=st.integers(0, 20),
        as_tokens=st.booleans(),
    )
    def add(self, number: int, n: int, seed: int, way: str, at: int, as_tokens: bool) -> None:
        own = self.pick(number)
        if own is None:
            return
        before, text = len(own.tokens), text_of(seed, n)
        what = self.engine.tokenize(text) if as_tokens else text
        result = self.run_step(own, lambda: own.ws.add(what), way, at)
        self.left(own, way)
        if result is not None and own in self.own:
            assert result.usage.generated == 0
            self.added(own, result, before, text)

    @rule(
        number=st.integers(0, 99),
        n=st.sampled_from((1, 5, 5, 40, 40, 300)),
        n_answer=st.sampled_from((0, 1, 5, 12, 70)),
        way=st.sampled_from(WAYS),
        at=st.integers(0, 20),
        in_template=st.booleans(),
        recall=st.sampled_from((None, RecallParams(refresh=16), RecallParams(stickiness=0.5, query_ends=8))),
    )
    def say(
        self, number: int, n: int, n_answer: int, way: str, at: int, in_template: bool, recall: Any
    ) -> None:
        own = self.pick(number)
        if own is None:
            return
        before, text = len(own.tokens), text_of(n, n)
        ask = own.ws.chat if in_template else own.ws.complete
        result = self.run_step(
            own, lambda: ask(text, sampling=GREEDY, max_tokens=n_answer, recall=recall), way, at
        )
        self.left(own, way)
        if result is not None and own in self.own:
            assert len(result.tokens) <= n_answer
            self.added(own, result, before, f"[{text}]:" if in_template else text)
            if in_template:
                own.answers.append((len(own.tokens), result.text))

    @rule(
        number=st.integers(0, 99),
        cut=st.integers(0, 10**4),
        n_out=st.integers(0, 100),
        n_in=st.integers(0, 100),
        n_answer=st.integers(0, 6),
        way=st.sampled_from(WAYS),
        at=st.integers(0, 20),
        answered=st.booleans(),
    )
    def edit(
        self, number: int, cut: int, n_out: int, n_in: int, n_answer: int, way: str, at: int, answered: bool
    ) -> None:
        """A whole history that differs somewhere from the one there is."""
        own = self.pick(number)
        if own is None:
            return
        start = self.spot(own, cut)
        wanted = [
            *own.tokens[:start],
            *self.engine.tokenize(text_of(cut, n_in)).tolist(),
            *own.tokens[start + n_out :],
        ]
        if not wanted:
            return
        if answered:
            result = self.run_step(
                own, lambda: own.ws.prompt(wanted, sampling=GREEDY, max_tokens=n_answer), way, at
            )
        else:
            result = self.run_step(own, lambda: own.ws.rewrite(wanted), way, at)
        self.left(own, way)
        if result is not None and own in self.own:
            same = next((i for i, (a, b) in enumerate(zip(own.tokens, wanted, strict=False)) if a != b), None)
            kept = min(len(own.tokens), len(wanted)) if same is None else same
            kept = kept if len(own.tokens) > kept or not answered else min(kept, result.usage.cached)
            own.pins = [(a, min(b, kept)) for a, b in own.pins if a < kept]
            own.cut(kept)
            own.tokens = [*wanted, *result.tokens]
            own.pins = list(own.ws.stats().pins)  # which of them stay is for the rewrite to say

    @rule(number=st.integers(0, 99), n=st.integers(1, 20), k=st.integers(1, 30))
    def search(self, number: int, n: int, k: int) -> None:
        own = self.pick(number)
        if own is None:
            return
        with contextlib.suppress(MandatoryTooLarge):
            found = own.ws.search(text_of(n, n), k).blocks
            assert len(found) <= k and len({block.start for block in found}) == len(found)
            for block in found:
                tokens = own.tokens[block.start : block.start + block.count]
                assert block.start % BLOCK == 0 and self.engine.detokenize(tokens) == block.text

    @rule(number=st.integers(0, 99), start=st.integers(0, 10**4), n=st.integers(0, 30))
    def pin(self, number: int, start: int, n: int) -> None:
        own = self.pick(number)
        if own is None:
            return
        start = self.spot(own, start)
        try:
            own.ws.pin(range(start, start + n))
            own.pins.append((start, start + n))
            assert 0 < n <= len(own.tokens) - start
        except InvalidOption:
            assert n == 0 or start + n > len(own.tokens)
        except MandatoryTooLarge:
            pass

    @rule(number=st.integers(0, 99), which=st.integers(0, 99))
    def unpin(self, number: int, which: int) -> None:
        own = self.pick(number)
        if own is None:
            return
        if not own.pins:
            with pytest.raises(InvalidOption):
                own.ws.unpin(0, 1)
            return
        own.ws.unpin(own.pins.pop(which % len(own.pins)))

    @rule(number=st.integers(0, 99))
    def fork(self, number: int) -> None:
        own = self.pick(number)
        if own is None or len(self.own) >= N_MOST:
            return
        name = None if own.ws.name is None else f"own-{next(self.names)}"
        other = Own(own.ws.fork(name), own.tokens[:], own.answers[:], own.pins[:])
        self.own.append(other)

    @rule(number=st.integers(0, 99), n=st.integers(1, 30))
    def twins_answer_alike(self, number: int, n: int) -> None:
        """A fork answers as the workspace that it was forked from, and neither is seen by the other."""
        own = self.pick(number)
        if own is None:
            return
        name = None if own.ws.name is None else f"own-{next(self.names)}"
        with own.ws.fork(name) as twin, contextlib.suppress(MandatoryTooLarge):
            theirs = twin.chat(text_of(n, n), sampling=GREEDY, max_tokens=5).result()
            mine = own.ws.chat(text_of(n, n), sampling=GREEDY, max_tokens=5).result()
            assert theirs.tokens == mine.tokens
            self.added(own, mine, len(own.tokens), f"[{text_of(n, n)}]:")
            own.answers.append((len(own.tokens), mine.text))
            assert np.array_equal(twin.history(), own.tokens)

    @rule(number=st.integers(0, 99), n=st.integers(0, 10**4))
    def truncate(self, number: int, n: int) -> None:
        own = self.pick(number)
        if own is None:
            return
        n = self.spot(own, n)
        with pytest.raises(InvalidOption):
            own.ws.truncate(len(own.tokens) + 1)
        own.ws.truncate(n)
        own.cut(n)
        own.pins = list(own.ws.stats().pins)
        assert all(start < n for start, _ in own.pins)

    @rule(number=st.integers(0, 99))
    def verify(self, number: int) -> None:
        own = self.pick(number)
        if own is None:
            return
        if own.ws.name is None:
            with pytest.raises(InvalidOption):
                own.ws.verify()
            return
        report = own.ws.verify()
        assert report.is_sound, report.findings

    # -- what holds after every call

    @invariant()
    def histories_are_as_they_should_be(self) -> None:
        for own in self.own:
            n = len(own.tokens)
            assert own.ws.n_tokens == n and own.ws.history().tolist() == own.tokens
            stats = own.ws.stats()
            assert stats.n_tokens == n and stats.n_resident <= stats.n_view == own.ws.n_view
            assert stats.n_blocks == -(-n // BLOCK) and sorted(stats.pins) == sorted(own.pins)
            assert all(0 <= start < end <= n for start, end in stats.pins)
            answers = [(turn.end, turn.answer) for turn in own.ws.turns()]
            assert [answer for answer in answers if answer in own.answers] == own.answers
            assert all(end <= n for end, _ in answers)

    def teardown(self) -> None:
        while self.own:
            self.own.pop().ws.close()
        self.closed.clear()
        root = self.engine.shelf.root
        for item in root.list():
            assert item.row is not None
            delete_workspace(root, item.place)
        assert self.engine.call(lambda core: core.pool.n_used) == 0
        shared = self.engine.shelf._shared
        assert shared is None or shared.pool.n_bytes == 0
        self.engine.model.batches.clear()  # the fake model's own notes
        self.engine.model.writes.clear()
        self.engine.call(lambda core: core.chat_template().seen.clear())
        self.taken.append(Memory.of(self.engine))


@contextlib.contextmanager
def machine() -> Iterator[type[ApiMachine]]:
    """The machine on an engine of its own."""
    with faked(), folder_in_ram() as folder, engine_on(folder) as engine:
        fresh = {"engine": engine, "ends": Counter(), "n_calls": 0, "taken": []}
        yield type("Machine", (ApiMachine,), fresh)
