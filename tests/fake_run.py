"""Runs steps of sessions on the fake model through the real scheduler, in this thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import fake_model
import numpy as np
import pytest

from kvmem_llama.engine import core
from kvmem_llama.engine.chat_template import Message, Turn
from kvmem_llama.engine.requests import TaskGenerator
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.engine.scheduler import Scheduler
from kvmem_llama.engine.task import Task
from kvmem_llama.engine.templates import AppliedTemplate
from kvmem_llama.memory import answering
from kvmem_llama.memory.invariants import check
from kvmem_llama.memory.query import StepRequest
from kvmem_llama.memory.report import StepResult
from kvmem_llama.memory.session import Session
from kvmem_llama.memory.step import Step, read
from kvmem_llama.settings import Settings

T = TypeVar("T")

BASE = 1500  # tokens; the view of most tests holds 256


def text(n: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """`n` tokens that are not the end token, nor halves of a character."""
    return np.random.default_rng(seed).integers(10, 90, n).astype(np.int32)


def request(
    tokens: Sequence[int] | np.ndarray[Any, Any],
    n: int = 0,
    *,
    query_start: int = 0,
    stop: Sequence[str] = (),
) -> StepRequest:
    """A step of text tokens with an answer of at most `n` tokens."""
    ids = np.asarray(tokens, dtype=np.int32)
    return StepRequest(ids, query_start, np.ones(len(ids), np.bool_), SamplingParams(temp=0), n, tuple(stop))


class FakeTemplate:
    """`(system)[question]:answer|[question]:`; the bar ends an answer that did not end by itself."""

    applied = AppliedTemplate("", additional_stops=("STOP",))

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[Message], bool | None]] = []

    @classmethod
    def open(cls, model: Any, settings: Any) -> Any:
        return cls()

    def close(self) -> None: ...

    def without_preamble(self, turn: Turn) -> Turn:
        return turn

    def around(self) -> tuple[str, str]:
        return "[", "]:"

    def apply(self, messages: Sequence[Message], options: Any = None) -> AppliedTemplate:
        return replace(self.applied, prompt=self.turn("", messages).text)

    def turn(
        self, history: str, messages: Sequence[Message], *, closed: bool | None = None, options: Any = None
    ) -> Turn:
        self.seen.append((history, list(messages), closed))
        system = "".join(f"({m.content})" for m in messages if m.role == "system")
        going_on = any(m.role == "assistant" for m in messages)
        front = ("" if closed else "|") + "[" if going_on else system + "["
        content = messages[-1].content.strip()
        return Turn(f"{front}{content}]:", ((len(front), len(front) + len(content)),), applied=self.applied)


class Run:
    """A fake model with sessions on it. Every decode and every finished step is checked."""

    def __init__(self, n_train: int = 10_000, *, hooks: bool = True, **options: Any) -> None:
        options = {"n_ctx": 256, "block_size": 8, "n_ubatch": 16, "scorer": "reference", **options}
        self.settings = Settings(**options)
        self.model = fake_model.make_model(self.settings, n_train)
        self.core = fake_model.fake_core(self.model, self.settings, n_train, hooks=hooks)
        self.scheduler = Scheduler(self.core)
        self.sessions: list[Session] = []
        self.seqs: dict[int, int] = {}
        fake_model.check_before_decode(self.model, self.sessions)

    def session(self, seq: int = 0) -> Session:
        return self.adopt(Session(self.core), seq)

    def adopt(self, session: Session, seq: int) -> Session:
        """A session made elsewhere (a fork) runs on sequence `seq` from now on."""
        self.sessions.append(session)
        self.seqs[id(session)] = seq
        return session

    def start(self, make: Callable[[], TaskGenerator[T]], seq: int) -> Task[T]:
        task: Task[T] = Task(lambda core: make())
        self.scheduler.add(task, seq)
        return task

    def start_step(self, session: Session, req: StepRequest) -> Task[StepResult]:
        return self.start(lambda: Step(session, req).run(), self.seqs[id(session)])

    def drive(self, *tasks: Task[Any], batches: int = 1_000_000) -> None:
        """Runs batches until the tasks are done, or as many as given."""
        while batches and not all(task.done for task in tasks) and self.scheduler.run_batch():
            batches -= 1

    def step(self, session: Session, req: StepRequest) -> StepResult:
        task = self.start_step(session, req)
        self.drive(task)
        return task.result(0)

    def read(self, session: Session, tokens: np.ndarray[Any, Any]) -> StepResult:
        task = self.start(lambda: read(session, np.asarray(tokens, np.int32)), self.seqs[id(session)])
        self.drive(task)
        return task.result(0)


def asked(n: int = BASE, *, seed: int = 0, **options: Any) -> tuple[Run, Session]:
    """A session that has read `n` tokens."""
    run = Run(**options)
    session = run.session()
    run.read(session, text(n, seed))
    return run, session


def records(run: Run, session: Session) -> list[tuple[list[int], list[int]]]:
    """Tokens and fingerprints of every block."""
    out = []
    for block in session.history.table:
        record = session.history.store.get(block.ref)
        out.append((run.model.tokens_of(record, block.count), run.model.fingerprints_of(record, block.count)))
    return out


def same(one: StepResult, other: StepResult) -> bool:
    """The same answer from the same recalls."""

    def blocks(result: StepResult) -> list[Any]:
        return [[(b.start, b.count, b.rank, b.why, b.position) for b in r.blocks] for r in result.recalls]

    return one.tokens == other.tokens and one.text == other.text and blocks(one) == blocks(other)


def truncate(session: Session, n: int) -> None:
    """Drops all but the first `n` tokens."""
    session.view.drop_from(n)
    session.view.slack.forget(n)
    session.history.truncate(n)


@pytest.fixture
def faked_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces render with FakeTemplate. In a test file: `template = faked_template`."""
    monkeypatch.setattr(core, "ChatTemplate", FakeTemplate)


@pytest.fixture
def checked_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every finished step checks the books of its session; answers are greedy, without llama.cpp."""
    monkeypatch.setattr(answering, "Sampler", fake_model.FakeSampler)
    monkeypatch.setattr(Session, "after_step", staticmethod(check))
