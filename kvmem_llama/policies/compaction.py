"""The oldest part of a history that outgrows the view becomes a summary, written by the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import numpy as np

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.errors import Cancelled
from kvmem_llama.memory.answering import n_seen
from kvmem_llama.memory.by_hand import answering
from kvmem_llama.memory.query import StepRequest, query_of
from kvmem_llama.memory.report import Finished, RecallReport, StepResult
from kvmem_llama.memory.stopwatch import Stopwatch
from kvmem_llama.native.layout import F32, I32

from .compacted import Compacted, Range, Shares
from .plain import PlainMemory
from .summary import Summarizer
from .text_cells import TextCells

_NOTHING: Final = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Asked:
    """The question of the running step."""

    span: Range  # its tokens outside of the sink
    passages: I32  # texts put before it for this step alone, token ids


class Compaction(PlainMemory):
    """The view: sink, summary, newest tokens as they are. Nothing is kept outside the cells but token ids, so
    `tokens` and `truncate` know the text that a summary stands for.

    When the view is full, all but the newest `n_recent` tokens of it are summarized together with the summary
    before; a question whose answer grows is left out of that. The same happens before a question that finds
    no room for itself and the reserve.
    """

    name: ClassVar[str] = "compaction"

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._shown: Final = TextCells(self._cells)
        self._summarizer: Final = Summarizer(core, self._budget)
        self._shares: Final = Shares.of(self._budget, self._summarizer.n_framed, self._summarizer.n_least)
        self._compactions: list[Compacted] = []  # every state since the history began, oldest first
        self._asked: Asked | None = None
        self._is_answering = False
        self._watch = Stopwatch()

    @property
    def summary(self) -> str:
        """The summary as it stands now; empty without one."""
        return self._core.model.vocab.detokenize(self._now.summary).decode("utf-8", "replace")

    # -- Policy

    def read(self, tokens: I32) -> TaskGenerator[StepResult]:
        watch = self._watch = Stopwatch("read_s", "summary_s")
        start, end = self._n_committed, self._n_committed + len(tokens)
        self._check(end)
        with self._provisional(tokens):
            yield from self._evaluate(start, end, Phase.READ)
        watch.lap("read_s")
        return self._finish(watch, n_cached=start, n_read=len(tokens))

    def step(self, request: StepRequest) -> TaskGenerator[StepResult]:
        watch = self._watch = Stopwatch("read_s", "summary_s", "score_s", "query_s", "decode_s")
        query = query_of(request, request.options(self._core.settings))
        first = self._n_committed
        start, end = first + query.start, first + len(request.tokens)
        self._check(end)
        self._shares.check_question((start, end))
        with self._provisional(request.tokens):
            yield from self._evaluate(first, start, Phase.READ)
            span = self._shares.outside_sink((start, end))
            yield from self._make_room(start, span)
            watch.lap("read_s")
            asked = request.tokens[query.indices]
            self._asked = Asked(span, self._find(asked, self._room_for_passages(span)))
            watch.lap("score_s")
            logits = yield from self._evaluate(start, end, Phase.QUERY)
            watch.lap("query_s")
            recalls = self._report(end)
            growth = _Growth(self, end)
            answer = answering(self._core.model.vocab, self._link, growth, request)
            seen = self.tokens(end - n_seen(request, end), end)
            finish_reason = yield from answer.run(seen, logits)
        watch.lap("decode_s")
        result = StepResult(
            text=answer.text,
            tokens=tuple(answer.tokens),
            finish_reason="truncated" if growth.stopped else finish_reason,
            n_read=start - first,
            n_query=end - start,
            n_generated=len(answer.tokens),
            n_reused=0,
            n_cached=first,
            timings=watch.timings,
            stop_type="none" if growth.stopped else answer.stop_type,
            stopping_word=answer.stopping_word,
            probs=tuple(answer.probs),
            end_probs=answer.end_probs,
            recalls=recalls,
        )
        self._link.emit(Finished(result))
        return result

    def fork(self) -> Self:
        other = super().fork()
        other._compactions = list(self._compactions)
        return other

    def close(self) -> None:
        super().close()
        self._compactions.clear()

    # -- what a policy with passages adds

    def _n_passages(self, n_free: int) -> int:
        """Most tokens of passages where `n_free` tokens are neither mandatory nor recent."""
        return 0

    def _find(self, question: I32, n_most: int) -> I32:
        """Passages of the replaced text for a question, [at most n_most] tokens as they stand in the view."""
        return _NOTHING

    def _report(self, end: int) -> tuple[RecallReport, ...]:
        """What was found, once the question that ends at token `end` has been evaluated."""
        return ()

    # -- sizes

    @property
    def _now(self) -> Compacted:
        n_sink = self._budget.n_sink
        return self._compactions[-1] if self._compactions else Compacted(0, n_sink, None, _NOTHING)

    def _check(self, n_tokens: int) -> None:
        self._shares.check()

    def _room_for_passages(self, span: Range) -> int:
        """Recent tokens come first, and there is nothing to find before something was replaced."""
        if not self._compactions:
            return 0
        return self._n_passages(self._shares.n_free(span) - self._shares.n_recent_beside(span))

    def _n_in_view(self, t: int) -> int:
        """Tokens of `_view_tokens(t)`."""
        now, n_sink = self._now, self._budget.n_sink
        if t <= n_sink:
            return t
        n_passages = len(self._asked.passages) if self._asked else 0
        return n_sink + len(self._summarizer.framed(now.summary)) + now.n_verbatim(t) + n_passages

    # -- the view

    def _view(self, t: int) -> I32:
        ranges = [(0, min(self._budget.n_sink, t)), *self._now.ranges(t)]
        return np.concatenate([np.arange(*r, dtype=np.int32) for r in ranges])

    def _next_change(self, t: int) -> int:
        return t + max(self._budget.n_view - self._n_in_view(t), 1)

    @property
    def _is_full(self) -> bool:
        return False

    def _view_tokens(self, t: int) -> I32:
        """Token ids of the view when the token at position `t` is evaluated."""
        now, asked = self._now, self._asked
        parts = [self.tokens(0, min(self._budget.n_sink, t)), self._summarizer.framed(now.summary)]
        for start, end in now.ranges(t):
            if asked and start <= asked.span[0] <= end:
                parts += [self.tokens(start, asked.span[0]), asked.passages]
                start, asked = asked.span[0], None
            parts.append(self.tokens(start, end))
        return np.concatenate(parts)

    def _align(self, t: int) -> TaskGenerator[None]:
        yield from self._show(t, logits=False)

    def _show(self, t: int, *, logits: bool) -> TaskGenerator[F32 | None]:
        """Makes the cells hold the view of the token at position `t` -> logits of the token before it."""

        def done(n: int, total: int) -> None:
            self._link.progress(Phase.REPLAY, 0, total)(n)
            self._cancel_if_stopped()

        return (yield from self._shown.show(self._view_tokens(t), logits=logits, done=done))

    def _evaluate(self, start: int, end: int, phase: Phase) -> TaskGenerator[F32 | None]:
        progress = self._link.progress(phase, start, end)
        logits: F32 | None = None
        at = start
        while at < end:
            if self._n_in_view(at) >= self._budget.n_view:
                yield from self._compact(at, self._shares.n_recent_of_reading)
            yield from self._align(at)
            stop = min(end, self._next_change(at))

            def done(n: int, first: int = at) -> None:
                progress(first + n)
                self._cancel_if_stopped()

            last = phase is Phase.QUERY and stop == end
            logits = yield from self._shown.append(self.tokens(at, stop), phase, logits=last, done=done)
            at = stop
        return logits

    # -- compaction

    def _make_room(self, start: int, span: Range) -> TaskGenerator[None]:
        """Compacts before a question at token `start` that would not fit the view with the answer's room."""
        n_more = self._room_for_passages(span) + (span[1] - span[0]) + self._shares.n_reserve
        if self._n_in_view(max(start, self._budget.n_sink)) + n_more > self._budget.n_view:
            yield from self._compact(start, self._shares.n_recent_beside(span))

    def _compact(self, t: int, n_recent: int, asked: Range | None = None) -> TaskGenerator[None]:
        """Replaces all but the newest `n_recent` of the tokens before `t`, and the question."""
        now = self._now
        cut, kept = now.plan(t, n_recent, asked)
        replaced = [self.tokens(*r) for r in now.replaced(cut, kept)]
        text = np.concatenate(replaced) if replaced else _NOTHING
        self._watch.lap("read_s" if asked is None else "decode_s")
        summary = yield from self._summarizer.run(self._shown, now.summary, text, self._cancel_if_stopped)
        self._compactions.append(Compacted(t, cut, kept, summary))
        self._watch.lap("summary_s")

    def _compact_in_answer(self, t: int) -> TaskGenerator[F32 | None]:
        """The same when an answer finds no room for a token -> the logits to go on with; None if it was
        stopped meanwhile."""
        assert self._asked is not None
        span, n_passages = self._asked.span, len(self._asked.passages)
        self._is_answering = True
        try:
            yield from self._compact(t, self._shares.n_recent_of_answer(span, n_passages), span)
            return (yield from self._show(t, logits=True))
        except _AnswerStopped:
            return None
        finally:
            self._is_answering = False

    def _cancel_if_stopped(self) -> None:
        """Before there is an answer to keep, being stopped is being cancelled."""
        if self._link.stop_requested:
            raise _AnswerStopped if self._is_answering else Cancelled

    # -- undoing

    @contextmanager
    def _provisional(self, tokens: I32) -> Iterator[None]:
        try:
            with super()._provisional(tokens):
                yield
        finally:
            self._asked = None

    def _drop_from(self, n_tokens: int) -> None:
        """Summaries made at that point or later go too. The cells stay: the next view says what of them
        is of use."""
        del self._tokens[n_tokens:]
        while self._compactions and self._compactions[-1].at >= n_tokens:
            self._compactions.pop()


class _AnswerStopped(Exception):
    """The task was asked to stop while its answer waited for room."""


class _Growth:
    """See memory.answering.Growth."""

    def __init__(self, memory: Compaction, start: int) -> None:
        self.stopped = False
        self._memory = memory
        self._start = start  # token position of the answer's first token

    def make_room(self, logits: F32) -> TaskGenerator[F32 | None]:
        memory = self._memory
        t = len(memory._tokens)
        if memory._n_in_view(t) < memory._budget.n_view:
            return logits
        again = yield from memory._compact_in_answer(t)
        self.stopped = again is None
        return again

    def feed(self, token: int, *, logits: bool) -> TaskGenerator[F32 | None]:
        memory = self._memory
        memory._tokens.append(token)
        one = np.array([token], dtype=np.int32)
        return (yield from memory._shown.append(one, Phase.DECODE, logits=logits))

    def drop(self, n_kept: int) -> None:
        self._memory._drop_from(self._start + n_kept)
