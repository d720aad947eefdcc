"""Steps whose answers are written by their caller, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from ..engine.requests import Phase, TaskGenerator
from ..engine.sampler import SamplingParams
from ..engine.task import Task
from ..matching import match
from ..memory.query import StepRequest, token_ids, token_marks
from ..memory.report import StepResult
from ..native.layout import F32, I32
from ..policies import KVMem
from .running import Step
from .steps import Asking

OnLogits = Callable[[Phase, Sequence[F32]], None]


class _Mailbox:
    """The line between a step and the thread that chooses its tokens; see memory.query.Hand."""

    def __init__(self) -> None:
        self.offers: SimpleQueue[F32 | None] = SimpleQueue()  # None: there will be none any more
        self.chosen: SimpleQueue[int | None] = SimpleQueue()

    def offer(self, logits: F32) -> None:
        self.offers.put(logits.copy())

    def has_chosen(self) -> bool:
        return not self.chosen.empty()

    def take(self) -> int | None:
        return self.chosen.get_nowait()


class StepByHand(Step):
    """A step that asks its caller for every token of its answer. Of the methods that are its own, one call at
    a time."""

    def __init__(self, task: Task[StepResult], mailbox: _Mailbox) -> None:
        super().__init__(task)
        self._mailbox = mailbox
        task.when_done(lambda: mailbox.offers.put(None))

    def logits(self) -> F32 | None:
        """Waits until a token is wanted -> logits to choose it from, [n_vocab]; None: the view is full, and
        the policy has no way to go on. Once for every token; raises what the step raised."""
        logits = self._mailbox.offers.get()
        if logits is None:
            self._mailbox.offers.put(None)
            self.result()
        return logits

    def feed(self, token: int) -> None:
        """The next token of the answer, whatever it is: an end token does not end it."""
        self._mailbox.chosen.put(token)
        self._task.wake()

    def finish(self) -> StepResult:
        """Ends the answer: the step is committed. Raises what the step raised."""
        self._mailbox.chosen.put(None)
        self._task.wake()
        return self.result()


class AskingByHand(Asking):
    """Steps that answer; the caller may choose the tokens."""

    def step_by_hand(
        self,
        tokens: Sequence[int] | I32,
        query_start: int | None = None,
        scored: NDArray[np.bool_] | None = None,
        *,
        spans: bool = True,
        on_logits: OnLogits | None = None,
    ) -> StepByHand:
        """Makes the history these token ids, [n], and opens an answer to it whose tokens the caller chooses.

        What the history has in common with them is not evaluated again, but for the query: the newest of the
        tokens that are new, at least one; or what comes after `query_start`, whether it is new or not.
        scored: [n] which of them are text; None: all. spans: False: only a common beginning is kept,
            whatever --reuse says.
        on_logits: called on the owner thread with the logits of every token that is evaluated, [n_vocab]
            each, valid within the call.
        The tokens that are not among these are gone afterwards. A step that is too large, or is cancelled
        before it begins, changes nothing; a workspace without a name loses them also where it is cancelled or
        fails later.
        Raises InvalidOption for tokens that are not ids of the vocabulary, InputError for none.
        """
        with self._idle():
            ids = token_ids(tokens, self._n_vocab)
            marks = token_marks(scored, len(ids))
            last = max(len(ids) - 1, 0)
            query = last if query_start is None else min(max(query_start, 0), last)
            plan = match(self._policy.tokens(), ids[:query], spans=spans and self._reuses_spans)
            first, mailbox = plan.prefix, _Mailbox()
            request = StepRequest(
                tokens=ids[first:],
                query_start=0 if query_start is None else query - first,
                scored=marks[first:],
                sampling=SamplingParams(),
                hand=mailbox,
            )
            generator, edited = self._after(plan, request)
            if edited and isinstance(self._policy, KVMem) and not plan.spans and self._opened is None:
                generator = self._policy.step_after(first, request)
            step = self._began(self._told(generator, on_logits), lambda task: StepByHand(task, mailbox))
            self._edited = edited
            return step

    def _told(
        self, generator: TaskGenerator[StepResult], on_logits: OnLogits | None
    ) -> TaskGenerator[StepResult]:
        task = self._engine.core.current_task
        assert task is not None
        task.on_logits = on_logits
        return (yield from generator)
