"""What the policies without recall have in common: token ids and cells, and nothing outside of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final, Self

import numpy as np

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.errors import Cancelled, EngineClosed, InvalidOption
from kvmem_llama.matching import Plan
from kvmem_llama.memory.answering import Answering, n_seen
from kvmem_llama.memory.budget import Budget
from kvmem_llama.memory.by_hand import answering
from kvmem_llama.memory.link import TaskLink
from kvmem_llama.memory.query import StepRequest
from kvmem_llama.memory.report import Finished, FinishReason, StepResult
from kvmem_llama.memory.stopwatch import Stopwatch
from kvmem_llama.native.layout import F32, I32

from .plain_cells import PlainCells
from .policy import MemoryStats


class PlainMemory(ABC):
    """A policy (see policy.Policy) whose view is a function of the history's length.

    Tokens of the view that are in no cell, because another workspace needed the cells or the history was
    truncated, are read again from their ids, over what the view then holds.
    """

    name: ClassVar[str]

    def __init__(self, core: EngineCore) -> None:
        self._core: Final = core
        self._link: Final = TaskLink(core)
        self._budget: Final = Budget.of(core.settings, core.n_view, core.model.n_ctx_train)
        self._cells: Final = PlainCells(core)
        self._tokens = array("i")
        self._n_committed = 0

    # -- what a policy decides

    @abstractmethod
    def _check(self, n_tokens: int) -> None:
        """Raises MandatoryTooLarge if a history cannot grow to `n_tokens`."""

    @abstractmethod
    def _view(self, t: int) -> I32:
        """Token positions in the view when the token at position `t` is evaluated, ascending, all below t."""

    @abstractmethod
    def _next_change(self, t: int) -> int:
        """The first token position after `t` whose view does not just continue that of `t`."""

    @property
    @abstractmethod
    def _is_full(self) -> bool:
        """The next token has no place in the view."""

    # -- Policy

    @property
    def n_view(self) -> int:
        return self._budget.n_view

    @property
    def n_tokens(self) -> int:
        return self._n_committed

    def tokens(self, start: int = 0, end: int | None = None) -> I32:
        return np.array(self._tokens[start:end], dtype=np.int32)

    def read(self, tokens: I32) -> TaskGenerator[StepResult]:
        watch = Stopwatch("read_s")
        start, end = self._n_committed, self._n_committed + len(tokens)
        self._check(end)
        with self._provisional(tokens):
            yield from self._evaluate(start, end, Phase.READ)
        watch.lap("read_s")
        return self._finish(watch, n_cached=start, n_read=len(tokens))

    def step(self, request: StepRequest) -> TaskGenerator[StepResult]:
        watch = Stopwatch("read_s", "query_s", "decode_s")
        start, end = self._n_committed, self._n_committed + len(request.tokens)
        query_start = min(start + request.query_start, end - 1)
        self._check(end + (request.max_tokens != 0))
        with self._provisional(request.tokens):
            yield from self._evaluate(start, query_start, Phase.READ)
            watch.lap("read_s")
            logits = yield from self._evaluate(query_start, end, Phase.QUERY)
            watch.lap("query_s")
            answer = answering(self._core.model.vocab, self._link, _Growth(self, end), request)
            seen = self.tokens(end - n_seen(request, end))
            finish_reason = yield from answer.run(seen, logits)
        watch.lap("decode_s")
        return self._finish(
            watch,
            answer,
            finish_reason=finish_reason,
            n_cached=start,
            n_read=query_start - start,
            n_query=end - query_start,
        )

    def rewrite(self, plan: Plan, request: StepRequest | I32) -> TaskGenerator[StepResult]:
        """Only the prefix is reused, and what comes after it is gone even where the step fails."""
        self.truncate(plan.prefix)
        step = self.step(request) if isinstance(request, StepRequest) else self.read(request)
        return (yield from step)

    def truncate(self, n_tokens: int) -> None:
        self._drop_from(n_tokens)
        self._n_committed = n_tokens

    def fork(self) -> Self:
        other = type(self)(self._core)
        other._tokens = self._tokens[:]
        other._n_committed = self._n_committed
        return other

    def pin(self, start: int, end: int) -> None:
        raise InvalidOption("pin", f"{start}..{end}", f"policy {self.name} has no pins", hint="Use kvmem.")

    def unpin(self, start: int, end: int) -> None:
        self.pin(start, end)

    def stats(self) -> MemoryStats:
        return MemoryStats(
            policy=self.name,
            n_tokens=self._n_committed,
            n_view=self._budget.n_view,
            n_resident=len(self._cells.held),
            n_hidden=0,
            n_cells_used=self._core.pool.n_used,
        )

    def evict(self) -> None:
        self._cells.clear()
        self._cells.seq = -1

    def close(self) -> None:
        self._tokens = array("i")
        self._n_committed = 0

    # -- a step

    @contextmanager
    def _provisional(self, tokens: I32) -> Iterator[None]:
        """Within: `tokens` follow the history. At the end all is committed; an exception undoes it."""
        self._cells.seq = self._core.seq
        self._tokens.extend(tokens.tolist())
        try:
            yield
            self._n_committed = len(self._tokens)
        except BaseException as error:
            try:
                if not isinstance(error, (Cancelled, EngineClosed, GeneratorExit)):
                    self._cells.clear()
            finally:
                self._drop_from(self._n_committed)
            raise

    def _evaluate(self, start: int, end: int, phase: Phase) -> TaskGenerator[F32 | None]:
        """Evaluates the tokens start .. end-1 -> logits of the last one, but for a READ."""
        progress = self._link.progress(phase, start, end)
        logits: F32 | None = None
        at = start
        while at < end:
            yield from self._align(at)
            stop = min(end, self._next_change(at))

            def done(n: int, first: int = at) -> None:
                if phase is not Phase.DECODE:
                    progress(first + n)
                    self._cancel_if_stopped()

            positions = np.arange(at, stop, dtype=np.int32)
            logits = yield from self._cells.feed(
                self.tokens(at, stop),
                positions,
                phase,
                logits=phase is not Phase.READ and stop == end,
                done=done,
            )
            at = stop
        return logits

    def _align(self, t: int) -> TaskGenerator[None]:
        """Makes the cells hold the view of the token at position `t`."""
        want, held = self._view(t), self._cells.held
        n_common = min(len(want), len(held))
        differs = np.flatnonzero(want[:n_common] != held[:n_common])
        n_same = int(differs[0]) if len(differs) else n_common
        n_after = len(want) - n_same
        if n_after and np.array_equal(held[n_same:][-n_after:], want[n_same:]):
            if len(held) > len(want):
                self._cells.slide(n_same, len(held) - n_after)
            return
        self._cells.drop_from(n_same)
        missing = want[len(self._cells.held) :]
        if len(missing):
            tokens = self.tokens()[missing]
            yield from self._cells.feed(tokens, missing, Phase.READ, done=lambda n: self._cancel_if_stopped())

    def _cancel_if_stopped(self) -> None:
        if self._link.stop_requested:
            raise Cancelled()

    def _drop_from(self, n_tokens: int) -> None:
        self._cells.drop_from(int(np.searchsorted(self._cells.held, n_tokens)))
        del self._tokens[n_tokens:]

    def _finish(
        self,
        watch: Stopwatch,
        answer: Answering | None = None,
        *,
        n_cached: int,
        n_read: int,
        n_query: int = 0,
        finish_reason: FinishReason = "stop",
    ) -> StepResult:
        tokens = tuple(answer.tokens) if answer else ()
        result = StepResult(
            text=answer.text if answer else "",
            tokens=tokens,
            finish_reason=finish_reason,
            n_read=n_read,
            n_query=n_query,
            n_generated=len(tokens),
            n_reused=0,
            n_cached=n_cached,
            timings=watch.timings,
            stop_type=answer.stop_type if answer else "none",
            stopping_word=answer.stopping_word if answer else "",
            probs=tuple(answer.probs) if answer else (),
            end_probs=answer.end_probs if answer else None,
        )
        self._link.emit(Finished(result))
        return result


class _Growth:
    """See memory.answering.Growth."""

    def __init__(self, memory: PlainMemory, start: int) -> None:
        self._memory = memory
        self._start = start  # token position of the answer's first token

    def make_room(self, logits: F32) -> TaskGenerator[F32 | None]:
        yield from ()  # a generator, as for policies that evaluate tokens here
        return None if self._memory._is_full else logits

    def feed(self, token: int, *, logits: bool) -> TaskGenerator[F32 | None]:
        memory = self._memory
        memory._tokens.append(token)
        n = len(memory._tokens)
        return (yield from memory._evaluate(n - 1, n, Phase.DECODE))

    def drop(self, n_kept: int) -> None:
        self._memory._drop_from(self._start + n_kept)
