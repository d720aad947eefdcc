"""One prompt answered: in which history, sampled how, and what is told while it goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..engine.answer_parser import ParsedMessage
from ..errors import Cancelled, MandatoryTooLarge, StoreFull
from ..matching import match
from ..memory.report import Recalled, StepResult
from ..native.layout import I32
from ..workspace import Answer
from .asked import Constraints, MemoryRequest, Prompt, Whole
from .auth import split_name
from .choosing import n_equal
from .errors import context_exceeded
from .formats.answer import AnswerState, Ended, Head
from .generation_settings import DETAILS
from .history import Lease
from .recalls import report_object
from .schema import Generation
from .slots import Slot, SlotPool
from .state import ServerState
from .telling import Teller, Told, View
from .timing import Clock

_SHARE_OF_VIEW: Final = 8  # the least part of the view for an answer without a limit
_SHARE_OF_QUERY: Final = 4  # the most of a small view that a query may take; the rest of it is history
_ANY_LENGTH: Final = 2**20  # tokens; a request for more means that there is no limit


Tell = Callable[[Told], None]


class PromptAnswers:
    """All answers to one prompt, one after the other in one history. `run` on a thread of its own."""

    def __init__(
        self,
        state: ServerState,
        pool: SlotPool,
        head: Head,
        prompt: Prompt,
        constraints: Constraints,
        memory: MemoryRequest,
        *,
        first_index: int,
        tell: Tell,
    ) -> None:
        """first_index: of the first answer. tell: called on the thread that runs."""
        self._state: Final = state
        self._pool: Final = pool
        self._head: Final = head
        self._prompt: Final = prompt
        self._constraints: Final = constraints
        self._memory: Final = memory
        self._first: Final = first_index
        self._tell: Final = tell
        self._lock: Final = threading.Lock()
        self._answer: Answer | None = None
        self._lease: Lease | None = None
        self._is_ended = False
        self._number: Final = next(pool.numbers)
        self._view: Final = View(head.generation, len(prompt.wanted))

    # -- from any thread

    def end(self) -> None:
        """Nobody wants it any more: what is read is kept, and what there is of an answer."""
        with self._lock:
            self._is_ended = True
            answer = self._answer
        if answer is not None:
            if self._view.n_decoded:
                answer.stop()
            else:
                answer.cancel()
                if self._lease is not None:  # a client that asks again waits for what is read
                    self._lease.history.will_hold(self._view.tokens)

    def failed(self, error: BaseException) -> Told:
        """What is told of an error."""
        return Told(AnswerState(self._first), error=error)

    def describe(self) -> dict[str, Any]:
        generation, view = self._head.generation, self._view
        settings = self._constraints.settings(generation, self._prompt)
        if self._memory.owner:  # GET /slots tells it to every key
            settings["generation_prompt"] = ""
        n_max = generation.n_max
        return {
            "id_task": self._number,
            "n_prompt_tokens": view.n_prompt + view.n_decoded,
            "n_prompt_tokens_processed": view.n_evaluated,
            "n_prompt_tokens_cache": view.n_cached,
            "params": {name: value for name, value in settings.items() if name not in DETAILS},
            "next_token": [
                {
                    "has_next_token": self._answer is not None and not self._answer.done,
                    "has_new_line": view.has_new_line,
                    "n_remain": -1 if n_max < 0 else n_max - view.n_decoded,
                    "n_decoded": view.n_decoded,
                }
            ],
        }

    # -- on a thread of its own

    def run(self, slot: Slot) -> None:
        """Answers, and tells; raises nothing. The slot is free afterwards."""
        lease: Lease | None = None
        last: list[Told] = []
        try:
            if not len(self._prompt.wanted):
                last = self._nothing(slot)
            else:
                self._refuse_if_ended()
                lease = self._lease = self._take()
                # The first one comes last: a client that goes on does so with it.
                for number in reversed(range(self._head.generation.n_cmpl)):
                    self._refuse_if_ended()
                    last.append(self._answer_one(slot, lease, number))
        except BaseException as error:
            last = [self.failed(self._told(error, lease))]
        finally:
            try:
                if lease is not None:
                    self._pool.histories.give_back(
                        lease, n_prompt=self._view.n_committed, unfinished=self._view.unfinished
                    )
            finally:
                self._pool.release(slot, None if lease is None else lease.history)
                # Only now: whoever has read the end may ask again at once.
                for told in last:
                    self._tell(told)
            if lease is not None:
                self._pool.histories.keep_to_budget()

    def _take(self) -> Lease:
        generation, memory = self._head.generation, self._memory
        return self._pool.histories.take(
            memory.owner,
            self._prompt.wanted,
            name=memory.name,
            only=self._pool.history_of(generation.id_slot),
            fresh=not generation.cache_prompt and memory.name is None,
            timeout=self._state.options.timeout,
            is_wanted=lambda: not self._is_ended,
            slack=self._prompt.n_after,
            may_edit=self._prompt.tells_past,
            joined_at=self._prompt.joined_at,
        )

    def _refuse_if_ended(self) -> None:
        if self._is_ended:
            raise Cancelled()

    def _answer_one(self, slot: Slot, lease: Lease, number: int) -> Told:
        """Tells of an answer while it comes -> what is told at its end."""
        generation, workspace = self._head.generation, lease.workspace
        stored = workspace.history()
        whole = self._whole(lease, stored)
        n_view = workspace.n_view
        n = len(whole.tokens)
        limit, is_cut = _limit(generation, n, n_view)
        lease.history.n_head = whole.n_head or lease.history.n_head
        n_known = n_equal(_known(stored, lease), whole.tokens)
        plan = match(stored, whole.tokens, spans=self._state.engine.core.settings.reuse == "spans")
        n_old = max(n_known, plan.spans[-1].new_end if plan.spans else 0)
        query_start = self._query_start(whole, n_old, n_view)
        n_kept = min(n_known, query_start)
        if n_kept < len(stored) and not plan.n_carried:
            # The end of the history, mostly an answer, is taken back where the prompt goes on in another way
            # and nothing after that can be taken over: what is before it stays in its cells.
            workspace.truncate(n_kept)
        self._view.begin(whole.tokens, n_kept)
        clock = Clock()
        answer = workspace.prompt(
            whole.tokens,
            sampling=self._constraints.seeded(number),
            recall=self._memory.recall,
            max_tokens=limit,
            stop=self._constraints.stop,
            query_start=query_start,
            scored=whole.scored,
            user=whole.user,
            preserved=self._constraints.preserved,
            applied=self._prompt.applied,
            every_token=True,
        )
        with self._lock:
            self._answer = answer
            is_ended = self._is_ended
        if is_ended:
            answer.cancel()
        state = AnswerState(self._first + number)
        teller = Teller(self._state, self._head, state, self._view, clock, self._tell, answer.stop)
        for event in answer:
            if isinstance(event, Recalled):
                self._recalled(event, lease)
            teller.take(event)
        result = answer.result()
        self._view.done(result)
        self._state.metrics.finished(result, clock.prompt_s, clock.predicted_s)
        return Told(teller.state, final=self._final(result, teller, clock, slot, lease, is_cut=is_cut))

    def _whole(self, lease: Lease, stored: I32) -> Whole:
        """The prompt's tokens; in a workspace that it does not belong to, after all that is there."""
        if lease.source is not None and not len(stored):  # a new history, whose beginning an older one has
            source, older = lease.source.tokens, lease.source.workspace
            whole = self._prompt.over(source)
            if older is not None:
                lease.workspace.take_over(older, n_equal(source, whole.tokens))
            return whole
        if lease.append:
            turns, n = lease.workspace.turns(), len(stored)
            whole = self._prompt.appended(stored, turns[-1].answer if turns else "")
        elif lease.start:
            n = lease.start
            whole = self._prompt.joined(stored[n:])
        else:
            return self._prompt.over(stored)
        blank = np.zeros(n, np.bool_)
        return Whole(
            np.concatenate([stored[:n], whole.tokens]),
            None if whole.question is None else n + whole.question,
            None if whole.scored is None else np.concatenate([blank, whole.scored]),
            None if whole.user is None else np.concatenate([blank, whole.user]),
        )

    def _query_start(self, whole: Whole, n_old: int, n_view: int) -> int:
        """Index of the first token that may belong to the query: of the newest message. While everything fits
        the view nothing is recalled, and only what is new need be evaluated: n_old tokens end with one that
        is stored."""
        settings, n = self._state.engine.core.settings, len(whole.tokens)
        n_new = min(n_old, n - 1)
        reserve = n_view // _SHARE_OF_VIEW if settings.n_reserve < 0 else settings.n_reserve
        if n + reserve <= n_view:
            return n_new
        question = n_new if whole.question is None else min(whole.question, n - 1)
        return max(question, n - n_view // _SHARE_OF_QUERY)

    def _final(
        self, result: StepResult, teller: Teller, clock: Clock, slot: Slot, lease: Lease, *, is_cut: bool
    ) -> Ended:
        view, generation = self._view, self._head.generation
        stop_type, text, probs = result.stop_type, result.text, list(result.probs)
        if stop_type == "none":
            stop_type = "limit"
        if stop_type == "eos" and result.end_probs is not None:
            probs.append(result.end_probs)
        if teller.cut is not None:
            text = text[: teller.cut]
        message = ParsedMessage(text, "", ())
        if self._head.parses and result.message is not None:
            said = result.message
            message = replace(
                said,
                content=teller.whole(said.content),
                reasoning_content=teller.whole(said.reasoning_content),
            )
        return Ended(
            index=teller.state.index,
            content=text,
            tokens=tuple(teller.tokens),
            n_prompt=view.n_prompt,
            n_cached=view.n_cached,
            n_decoded=len(teller.tokens),
            stop_type=stop_type,
            stopping_word=result.stopping_word,
            has_new_line="\n" in text,
            truncated=is_cut and stop_type == "limit",
            id_slot=slot.id,
            timings=clock.timings(
                n_cached=view.n_cached,
                n_evaluated=view.n_evaluated,
                n_decoded=len(teller.tokens),
                recalls=result.recalls,
            ),
            message=message,
            probs=probs if generation.sampling.n_probs else (),
            prompt=self._prompt.text,
            settings=lambda: self._constraints.settings(generation, self._prompt),
            extra=self._extra(result, lease),
        )

    def _extra(self, result: StepResult, lease: Lease) -> dict[str, Any]:
        """What is told of memory, to whoever asks."""
        memory = self._memory
        if memory.name is None and not memory.report:
            return {}
        usage = result.usage
        found: dict[str, Any] = {
            "n_history": usage.total,
            "n_pinned": lease.history.n_pinned,
            "n_cached": usage.cached + usage.reused,
            "n_carried": usage.carried,
            "n_evaluated": usage.evaluated,
            "n_recalled": usage.recalled,
            "n_replayed": usage.replayed,
        }
        if lease.history.name is not None:
            found["workspace"] = split_name(lease.history.name)[1]
        if memory.report:
            found["recalls"] = [report_object(report) for report in result.recalls]
        return {"kvmem": found}

    def _recalled(self, event: Recalled, lease: Lease) -> None:
        core, report = self._state.engine.core, event.report
        n_bytes = 0 if core.hooks is None else core.hooks.layout.nbytes
        self._state.metrics.recalled(report, n_bytes, report.n_replayed)
        if lease.history.name is not None:
            self._state.recalls.add(lease.history.name, report)

    def _nothing(self, slot: Slot) -> list[Told]:
        """llama-server answers a prompt without tokens with nothing."""
        clock = Clock()
        return [
            Told(
                AnswerState(self._first + number),
                final=Ended(
                    index=self._first + number, content="", tokens=(), n_prompt=0, n_cached=0, n_decoded=0,
                    stop_type="none", stopping_word="", has_new_line=False, truncated=False, id_slot=slot.id,
                    timings=clock.timings(n_cached=0, n_evaluated=0, n_decoded=0),
                    message=ParsedMessage("", "", ()), probs=(), prompt=lambda: "",
                    settings=lambda: self._constraints.settings(self._head.generation, self._prompt),
                ),
            )
            for number in range(self._head.generation.n_cmpl)
        ]  # fmt: skip

    def _told(self, error: BaseException, lease: Lease | None) -> BaseException:
        """The error as a client is told it."""
        n_view = self._state.facts.n_ctx
        n_workspace = 0 if lease is None else lease.workspace.n_tokens
        n = self._view.n_prompt or len(self._prompt.wanted)
        if isinstance(error, MandatoryTooLarge):
            self._view.unfinished = None
            return context_exceeded(
                f"{error.what}. {error.hint}", n_prompt_tokens=n, n_ctx=n_view, n_workspace=n_workspace
            )
        if isinstance(error, StoreFull):
            return context_exceeded(
                f"the workspace is full: {_needed(error)}. {error.hint}",
                n_prompt_tokens=n, n_ctx=n_view, n_workspace=n_workspace,
            )  # fmt: skip
        if isinstance(error, Cancelled):
            self._view.unfinished = self._view.tokens
        return error


def _needed(error: StoreFull) -> str:
    """Without its path, which is nobody's business."""
    left = f", {error.free:,} are left" if error.free >= 0 else ""
    return f"there is no room for {error.needed:,} bytes{left}"


def _known(stored: I32, lease: Lease) -> I32:
    """The tokens whose rows need not be evaluated, if the prompt begins with them."""
    return stored if lease.source is None or len(stored) else lease.source.tokens


def _limit(generation: Generation, n_prompt: int, n_view: int) -> tuple[int, bool]:
    """Most tokens of an answer, and whether the limit is the server's own.

    Where a request has none, llama-server's is the end of the context. A history here may be longer than
    that, so it is the rest of the view, or all of it where little is left.
    """
    rest = n_view - n_prompt
    own = rest if rest >= n_view // _SHARE_OF_VIEW else n_view
    n_max = generation.n_max
    return (own, True) if n_max < 0 or n_max > _ANY_LENGTH else (n_max, False)
