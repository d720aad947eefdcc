"""Runs steps of the policies with summaries on the fake model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_model import END, FakeVocab
from fake_run import Run, request

from kvmem_llama.policies import summary
from kvmem_llama.policies.compaction import Compaction
from kvmem_llama.policies.full_context import FullContext

VOCAB = FakeVocab()
VIEW, SINK, MOST = 1024, 8, 128  # tokens: the view, the sink, a summary


class Writer:
    """Sees what a summary is made of, and says what the model writes, as long as it has something to say."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int]]] = []  # summary so far, piece of the text
        self.says: list[list[int]] = []

    def write(self, summarizer: Any, cells: Any, before: Any, piece: Any, done: Any) -> Any:
        self.seen.append((VOCAB.detokenize(before).decode(), piece.tolist()))
        if self.says:
            summarizer._link._core.decoder.forced = list(self.says.pop(0))
        return (yield from _write(summarizer, cells, before, piece, done))


_write = summary.Summarizer._write


@pytest.fixture
def summary_writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    writer = Writer()
    monkeypatch.setattr(summary.Summarizer, "_write", lambda *given: writer.write(*given))
    return writer


def words(said: str) -> list[int]:
    return [*VOCAB.tokenize(said).tolist(), END]


class CompactionRun(Run):
    """Runs steps of the policy on sequence 0."""

    def __init__(self, make: Any = Compaction, *, hooks: bool = True, **options: Any) -> None:
        super().__init__(hooks=hooks, **{"n_ctx": VIEW, "n_ubatch": 64, **options})
        self.model.before_decode = lambda batch: None
        self.model.auto_place = not hooks
        self.policy: Any = make(self.core)
        self.events: list[Any] = []

    def task(self, generator: Any, seq: int = 0) -> Any:
        """Started, and its events are kept."""
        task = self.start(lambda: generator, seq)
        task._on_event = self.events.append
        return task

    def result(self, generator: Any, seq: int = 0) -> Any:
        task = self.task(generator, seq)
        self.drive(task)
        return task.result(0)

    def read(self, tokens: Any) -> Any:  # type: ignore[override]
        return self.result(self.policy.read(np.asarray(tokens, np.int32)))

    def ask(self, tokens: Any, n: int = 5, **more: Any) -> Any:
        return self.result(self.policy.step(request(tokens, n, **more)))

    def check_cells(self, seq: int = 0) -> None:
        """The cells hold the view as a plain prefill of its tokens gives it."""
        policy = self.policy
        want = policy._view_tokens(policy.n_tokens)
        held = policy._cells.held
        assert len(want) <= VIEW and np.array_equal(held, want)
        assert [token for _, token in self.model.visible(seq)] == want.tolist()
        assert self.core.pool.n_used == len(held)
        plain = CompactionRun(FullContext)
        plain.read(want)
        assert fingerprints(self, seq) == fingerprints(plain)


def fingerprints(run: Run, seq: int = 0) -> list[int]:
    cells = np.flatnonzero(run.model.seq == seq)
    return run.model.k[0, cells[np.argsort(run.model.position[cells])], 7].astype(int).tolist()
