"""A stand-in for kvmem_llama.workspace: scripted answers, no model and no native library.

The command line is tested against it. It keeps what it was asked, and obeys stop and cancel as the real one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kvmem_llama.conversation import Turn, document_text
from kvmem_llama.engine.answer_parser import MessageDelta, ParsedMessage
from kvmem_llama.errors import Cancelled, InputError, InvalidOption
from kvmem_llama.memory.attending import AttendedBlock
from kvmem_llama.memory.positions import TokenPos, ViewPos
from kvmem_llama.memory.report import (
    Event,
    Finished,
    MessagePiece,
    Progress,
    Recalled,
    RecalledBlock,
    RecallReport,
    RecallTimings,
    StepResult,
    TextPiece,
)
from kvmem_llama.memory.retrieval import Ranking
from kvmem_llama.memory.search import FoundBlock, SearchResult
from kvmem_llama.policies.policy import MemoryStats
from kvmem_llama.settings import Settings


@dataclass
class Script:
    """What the fake does and what it saw."""

    answer: str = "The key is under the mat."  # reasoning stands before it: <think>...</think>
    read_pause: float = 0.0  # seconds before each report of progress
    reports: list[RecallReport] = field(default_factory=list)
    error: BaseException | None = None  # raised by the next question, once
    open_error: BaseException | None = None
    finish_reason: str = "stop"
    before_read: Callable[[int], None] = lambda _i: None
    before_piece: Callable[[int], None] = lambda _i: None
    # seen
    settings: Settings | None = None
    model: Path | None = None
    name: str | None = None
    create: bool = True
    read_only: bool = False
    policy: str | None = None
    system: str | None = None
    asked: list[tuple[str, list[tuple[str, str]], Any, int]] = field(default_factory=list)
    thinking: list[bool] = field(default_factory=list)  # of every question: the model may reason
    committed: list[str] = field(default_factory=list)  # "stop", "truncated" ... of every committed answer
    read: list[tuple[str, str]] = field(default_factory=list)  # (source, text)
    searched: list[tuple[str, int]] = field(default_factory=list)
    n_reused: int = 0  # tokens that an interrupted step had read
    n_cancelled: int = 0
    n_closed: int = 0
    told: threading.Event = field(default_factory=threading.Event)  # to stop or to cancel

    def module(self) -> ModuleType:
        """To stand in sys.modules for kvmem_llama.workspace."""
        module = ModuleType("kvmem_llama.workspace")
        module.open_engine = self._open  # type: ignore[attr-defined]
        return module

    def _open(self, model_path: Path, settings: Settings) -> FakeEngine:
        if self.open_error is not None:
            raise self.open_error
        self.model, self.settings = model_path, settings
        return FakeEngine(self)


class _Closing:
    def __init__(self, script: Script) -> None:
        self.script = script

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.script.n_closed += 1


class FakeEngine(_Closing):
    plan = None

    def workspace(
        self,
        name: str | None = None,
        *,
        create: bool = True,
        policy: str | None = None,
        system: str | None = None,
        read_only: bool = False,
    ) -> FakeWorkspace:
        self.script.name, self.script.policy, self.script.system = name, policy, system
        self.script.create, self.script.read_only = create, read_only
        return FakeWorkspace(self.script, name, system)


class FakeWorkspace(_Closing):
    """Every word is a token; what is asked and read becomes its history when the stream has ended."""

    n_view = 512
    read_only = False

    def __init__(self, script: Script, name: str | None = None, system: str | None = None) -> None:
        super().__init__(script)
        self.name = name
        self.system = system
        self.n_tokens = 0
        self.pins: list[tuple[int, int]] = []
        self._turns: list[Turn] = []

    def close(self) -> None:
        self.script.n_closed += 1

    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def last_message(self) -> ParsedMessage | None:
        return ParsedMessage(self._turns[-1].answer, "", ()) if self._turns else None

    def attended(self) -> tuple[AttendedBlock, ...]:
        if not self._turns:
            raise InputError("the attention of the last answer", "something was read since")
        blocks = ((320, 0.5, "the key is\nunder"), (0, 0.25, "You are"))
        return tuple(AttendedBlock(TokenPos(start), 32, mass, text) for start, mass, text in blocks)

    def truncate(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self._turns = [turn for turn in self._turns if turn.end <= n_tokens]

    def fork(self, name: str | None = None) -> FakeWorkspace:
        other = FakeWorkspace(self.script, name, self.system)
        other.n_tokens, other._turns = self.n_tokens, list(self._turns)
        return other

    def pin(self, start: int, end: int) -> None:
        if not 0 <= start < end <= self.n_tokens:
            raise InvalidOption("pin", f"{start}..{end}", f"the history holds {self.n_tokens} tokens")
        self.pins.append((start, end))

    def unpin(self, start: int, end: int) -> None:
        if (start, end) not in self.pins:
            raise InvalidOption("unpin", f"{start}..{end}", "no such pin")
        self.pins.remove((start, end))

    def stats(self) -> MemoryStats:
        n = self.n_tokens or 261
        return MemoryStats(
            "kvmem", n, 512, n_resident=n, n_hidden=0, n_cells_used=n, n_blocks=8, n_records=8,
            store_bytes=8 << 20, pins=tuple(self.pins),
        )  # fmt: skip

    def read(self, text: str, source: str = "") -> FakeStream:
        self.script.read.append((source, text))

        def committed(_result: StepResult) -> None:
            self.n_tokens += len(text.split())

        return FakeStream(replace(self.script, answer="", committed=[]), committed)

    def has_read(self, text: str, source: str = "") -> bool:
        return (source, text) in self.script.read

    def search(self, text: str, n_blocks: int = 10) -> SearchResult:
        self.script.searched.append((text, n_blocks))
        if self.script.error is not None:
            raise self.script.error
        ranking = Ranking(np.arange(1, 8), np.array([4, 2]), np.array([0.5, 0.25]))
        blocks = (
            FoundBlock(
                start=TokenPos(128),
                count=32,
                ranks={"mean_k": 1, "lexical": 3},
                text="the key\nis under",
                own={"mean_k": 1},
                score=0.5,
                tier="disk",
                age=4,
            ),
            FoundBlock(TokenPos(64), 32, {}, "the mat"),
        )
        return SearchResult(blocks[:n_blocks], ranking)

    def ask(
        self,
        question: str,
        context: Sequence[tuple[str, str]] = (),
        *,
        sampling: Any,
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        options: Any = None,
    ) -> FakeStream:
        self.script.asked.append((question, list(context), sampling, max_tokens))
        self.script.thinking.append(options is None or options.enable_thinking)
        error, self.script.error = self.script.error, None
        if error is not None:
            raise error

        def committed(result: StepResult) -> None:
            start = self.n_tokens
            answer_start = start + sum(len(text.split()) for text in (question, *(c[1] for c in context)))
            self.n_tokens = answer_start + result.n_generated
            texts = "".join(document_text(*document) for document in context)
            self._turns.append(Turn(start, answer_start, self.n_tokens, texts, question, result.text))

        return FakeStream(self.script, committed)


class FakeStream:
    def __init__(self, script: Script, committed: Callable[[StepResult], None] = lambda _: None) -> None:
        self._script = script
        self._committed = committed
        self._stop = threading.Event()
        self._cancel = threading.Event()
        self._result: StepResult | None = None
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def stop(self) -> None:
        self._stop.set()
        self._script.told.set()

    def cancel(self) -> None:
        if self._result is None and not self._cancel.is_set():
            self._script.n_cancelled += 1
            self._cancel.set()
        self._script.told.set()

    def result(self) -> StepResult:
        for _event in self._events:
            pass
        if self._result is None:
            raise Cancelled
        return self._result

    def _run(self) -> Iterator[Event]:
        script = self._script
        for done in (0, 128, 256):
            script.before_read(done)
            time.sleep(script.read_pause)
            self._check()
            yield Progress("read", done, 256)
        for report in script.reports:
            if not report.mid_answer:
                yield Recalled(report)
        reasoning, answer = _split(script.answer)
        if reasoning:
            yield TextPiece(f"<think>{reasoning}</think>", 0)
            yield MessagePiece(MessageDelta(reasoning_content=reasoning))
        pieces = answer.split(" ")
        said: list[str] = []
        for i, piece in enumerate(pieces):
            script.before_piece(i)
            self._check()
            if self._stop.is_set():
                break
            if i == 1:
                yield from (Recalled(report) for report in script.reports if report.mid_answer)
            said.append(piece if i == 0 else " " + piece)
            yield TextPiece(said[-1], i)
            yield MessagePiece(MessageDelta(content=said[-1]))
        reason: Any = "truncated" if self._stop.is_set() else script.finish_reason
        script.committed.append(reason)
        timings = {"read_s": 0.5, "decode_s": float("nan"), "total_s": 1.0}
        self._result = StepResult(
            "".join(said),
            tuple(range(len(said))),
            reason,
            256,
            5,
            len(said),
            script.n_reused,
            timings,
            tuple(script.reports),
        )
        self._committed(self._result)
        yield Finished(self._result)

    def _check(self) -> None:
        if self._cancel.is_set():
            raise Cancelled


def _split(answer: str) -> tuple[str, str]:
    """(reasoning, the rest)."""
    found = re.match(r"<think>(.*?)</think>", answer, re.DOTALL)
    return (found[1], answer[found.end() :]) if found else ("", answer)


def recall_report(*, mid_answer: bool = False) -> RecallReport:
    """A small report with a block of every kind."""
    blocks = (
        RecalledBlock(
            TokenPos(0), 32, None, None, "sink", ViewPos(0), True, "You are\na helpful \x1b[31massistant"
        ),
        RecalledBlock(
            TokenPos(320), 32, 1, 4.25, "selected", ViewPos(32), False, "the key is under " + "x" * 300
        ),
        RecalledBlock(TokenPos(960), 7, None, None, "recent", ViewPos(64), True, "and then"),
    )
    timings = RecallTimings(0.001, 0.0001, 0.002, 0.03)
    return RecallReport(blocks, 512, 28, 1, timings, False, mid_answer)
