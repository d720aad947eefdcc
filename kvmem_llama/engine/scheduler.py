"""Runs all active tasks over one context: one batch at a time, a fair share for each.

Owner thread only. The scheduler knows tokens and cells, nothing of memory: a task decides where its tokens
lie and what a failure means for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Cancelled, CaptureMismatch, DecodeFailed, EngineClosed
from .batching import Candidate, compose
from .core import EngineCore
from .requests import I32, Batch, BatchHooks, Decode, Decoded, Phase
from .running import Run
from .task import Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PieceReport:
    """One task's part of a batch."""

    task: Task[Any]
    seq: int
    phase: Phase
    n: int  # tokens


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One llama_decode call as observers see it: after the call, before the tasks go on."""

    number: int  # 0, 1, 2, ...
    pieces: tuple[PieceReport, ...]
    n_tokens: int
    seconds: float  # of llama_decode alone
    rc: int
    capture_q: bool


Observer = Callable[[BatchReport], None]


@dataclass(frozen=True, slots=True)
class _Piece:
    run: Run
    request: Decode
    n: int
    first: int  # index of its first token in the batch


class Scheduler:
    """Batches the requests of running tasks. `on_end` is called once with every task that ends."""

    def __init__(self, core: EngineCore, on_end: Callable[[Task[Any]], None] = lambda task: None) -> None:
        self._core = core
        self._decoder = core.decoder
        self._hooks: BatchHooks | None = core.hooks
        self._on_end = on_end
        self._batch = Batch(core.decoder.n_batch)
        self._running: list[Run] = []
        self._observers: list[Observer] = []
        self.n_batches = 0

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """There is a task to advance or to cancel; the others wait for the readers of their events."""
        return any(run.ready or run.has_waited or run.task.cancel_requested for run in self._running)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer` after every batch, on the owner thread -> a function that ends this.

        An observer that raises is logged and removed: watching must not disturb what is watched.
        """
        self._observers.append(observer)

        def forget() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return forget

    def add(self, task: Task[Any], seq: int) -> None:
        """Starts `task` on sequence `seq` and runs its generator to its first request."""
        run = Run(self._core, task, seq, self._ended)
        self._running.append(run)
        run.start()

    def run_batch(self) -> bool:
        """Cancels who asked for it, then evaluates one batch -> False if there was nothing to evaluate."""
        for run in [run for run in self._running if run.task.cancel_requested]:
            run.throw_out(Cancelled())
        for run in [run for run in self._running if run.has_waited]:
            run.send(Decoded(0, np.empty(0, dtype=np.int32), None))
        pieces = self._compose()
        if not pieces:
            return False
        results: list[Decoded] = []
        try:
            error = self._evaluate(pieces)
            if error is None:
                results = [self._decoded(piece) for piece in pieces]
        except Exception as raised:  # a hook refused, or there are no logits
            error = raised
        if error is not None:
            for piece in pieces:
                piece.run.throw(error)
        for piece, decoded in zip(pieces, results, strict=False):
            piece.run.send(decoded)
        return True

    def close(self, error: EngineClosed) -> None:
        """Throws `error` into every running task; all have ended when this returns."""
        for run in list(self._running):
            run.throw_out(error)

    def _ended(self, run: Run) -> None:
        self._running.remove(run)
        self._on_end(run.task)

    def _compose(self) -> list[_Piece]:
        ready = [(run, run.request) for run in self._running if run.ready and isinstance(run.request, Decode)]
        candidates = [
            Candidate(len(request.tokens), request.phase is Phase.DECODE, run.last_served)
            for run, request in ready
        ]
        self._batch.clear()
        pieces = []
        for index, n in compose(candidates, self._batch.capacity):
            run, request = ready[index]
            first = self._batch.add(request, n, every=run.task.on_logits is not None)
            pieces.append(_Piece(run, request, n, first))
        return pieces

    def _evaluate(self, pieces: Sequence[_Piece]) -> Exception | None:
        """One llama_decode call over `self._batch` -> the error to throw into its tasks."""
        number, self.n_batches = self.n_batches, self.n_batches + 1
        for piece in pieces:
            piece.run.last_served = number
        capture_q = any(piece.request.capture_q for piece in pieces)
        if self._hooks is not None:
            self._hooks.capture(k=True, q=capture_q)  # also forgets the rows of the last batch
            self._hooks.place(self._batch.cells)
        start = time.perf_counter()
        rc = self._decoder.decode(self._batch)
        seconds = time.perf_counter() - start
        error: Exception | None = None
        if rc != 0:
            error = DecodeFailed(rc)
        elif self._hooks is not None:
            error = _check_captured(self._batch, *self._hooks.captured())
        if error is not None:
            self._forget_batch()
        if self._observers:
            parts = tuple(PieceReport(p.run.task, p.request.seq, p.request.phase, p.n) for p in pieces)
            self._report(BatchReport(number, parts, self._batch.n, seconds, rc, capture_q))
        return error

    def _report(self, report: BatchReport) -> None:
        for observer in list(self._observers):
            try:
                observer(report)
            except Exception:
                log.exception("an observer of batches failed and was removed")
                self._observers.remove(observer)

    def _decoded(self, piece: _Piece) -> Decoded:
        request, n = piece.request, piece.n
        if piece.run.task.on_logits is not None:
            rows_of = [self._decoder.logits(piece.first + i) for i in range(n)]
            piece.run.task.on_logits(request.phase, rows_of)
        n_rows = n if self._hooks is not None else 0
        rows = np.arange(piece.first, piece.first + n_rows, dtype=np.int32)
        if not request.logits or n < len(request.tokens):
            return Decoded(n, rows, None)
        return Decoded(n, rows, self._decoder.logits(piece.first + n - 1))

    def _forget_batch(self) -> None:
        """After a failure no token of the batch may stay visible, whatever llama.cpp undid itself.

        llama.cpp removes the failed batch by position, which may take later cells of the sequence along:
        a task that gets the error compares what it holds with `hooks.cells()`.
        """
        batch = self._batch
        if self._hooks is None:
            for seq in np.unique(batch.seqs).tolist():
                self._decoder.remove(seq, int(batch.positions[batch.seqs == seq].min()))
            return
        try:
            positions, _ = self._hooks.cells()
            self._hooks.free(batch.cells[positions[batch.cells] >= 0])
        except Exception:
            log.exception("the cells of a failed batch could not be freed")


def _check_captured(batch: Batch, seqs: I32, positions: I32) -> CaptureMismatch | None:
    """Row i of the capture must be token i of the batch: a row too few, or of another token, is worthless."""
    if seqs.tobytes() == batch.seqs.tobytes() and positions.tobytes() == batch.positions.tobytes():
        return None
    return CaptureMismatch(_rows(batch.seqs, batch.positions), _rows(seqs, positions))


def _rows(seqs: I32, positions: I32) -> str:
    pairs = [f"{s}:{p}" for s, p in zip(seqs[:4].tolist(), positions[:4].tolist(), strict=False)]
    more = ", ..." if len(positions) > 4 else ""
    return f"{len(positions)} rows (sequence:position {', '.join(pairs)}{more})"
