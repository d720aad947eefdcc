"""One step: check, read, first pass of the query, recall, replay, answer, commit."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

import xxhash

from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.native.layout import F32, I32
from kvmem_llama.store.steps import StepFacts

from .answering import Answering, n_seen
from .by_hand import answering
from .earlier import look_back, newest_of
from .feeding import feed
from .frame import frame_of_query
from .growing import RecallingGrowth
from .guard import provisional
from .query import Query as TextQuery
from .query import StepRequest, query_of, runs
from .query_rows import QueryBuffer
from .reading import read_history
from .recall import recall
from .recompute import prepare, reach
from .report import RecallReport, StepResult
from .retrieval import Query
from .session import Session
from .stopwatch import Stopwatch

_LONG_GRAMMAR: Final = 2048  # characters
PHASES = ("read_s", "query_s", "score_s", "select_s", "apply_s", "refresh_s", "replay_s", "decode_s")


class Step:
    """One step of one session; `run` once."""

    def __init__(self, session: Session, request: StepRequest) -> None:
        self._session = session
        self._request = request
        settings = request.options(session.settings)
        query, is_parity = query_of(request, settings), settings.query_tokens == "all"
        self._settings = settings
        first = session.history.n_committed
        self._first = first
        self._query = (first + query.start, first + len(request.tokens))  # token positions [start, end)
        self._scored = query.scored
        self._earlier = first + query.earlier  # token positions of scored tokens before the query
        self._user = None if query.user is None else (first + query.user[0], first + query.user[1])
        # A step without a text of a user is scored with that of a step before, too.
        looks_back = query.user is None and settings.query_user and not is_parity
        self._past = session.history.steps.newest_with_user if looks_back else None
        self._query_text = self._text_of(query)
        self._query_rows = QueryBuffer(session.layers)
        self._watch = Stopwatch(*PHASES)

    def run(self) -> TaskGenerator[StepResult]:
        """Raises MandatoryTooLarge or InvalidOption before anything is evaluated. Whatever is raised later,
        the history is as the last step left it."""
        session, history, budget = self._session, self._session.history, self._session.budget
        start, end = self._query
        budget.check_read(session.canonical)
        budget.check_step(session.canonical, start, end - start)
        session.check_positions(end + budget.n_reserve)
        session.begin(self._settings)
        with provisional(session, keep_until=start):
            yield from prepare(session)
            history.extend(self._request.tokens)
            n_reused = history.adopt(start)
            n_carried = yield from read_history(session, self._first + n_reused, start)
            self._watch.lap("read_s")
            logits, recalls = yield from self._ask()
            growth = RecallingGrowth(session, self._query, self._query_rows, self._query_text, self._watch)
            answer = answering(session.core.model.vocab, session.link, growth, self._request)
            seen = history.tokens(end - n_seen(self._request, end))
            finish_reason = yield from answer.run(seen, logits)
            self._watch.lap("decode_s")
            history.commit(self._facts(answer))
            session.view.tidy()
        result = StepResult(
            text=answer.text,
            tokens=tuple(answer.tokens),
            finish_reason=finish_reason,
            n_read=start - self._first - n_reused - n_carried,
            n_query=end - start,
            n_generated=len(answer.tokens),
            n_reused=n_reused,
            n_cached=self._first,
            n_carried=n_carried,
            timings=self._watch.timings,
            stop_type=answer.stop_type,
            stopping_word=answer.stopping_word,
            probs=tuple(answer.probs),
            end_probs=answer.end_probs,
            recalls=(*recalls, *growth.recalls),
        )
        session.finish(result)
        return result

    def _text_of(self, query: TextQuery) -> str:
        """The text of the tokens that are scored, a line for each of the places they are taken from."""
        session, tokens, indices = self._session, self._request.tokens, query.indices
        lines = [
            session.text_of(tokens[indices[(indices >= start) & (indices < end)]])
            for start, end in runs(indices)
        ]
        if self._past is not None:
            span = newest_of(self._past, self._settings.query_user)
            lines.insert(0, session.text_of(session.history.tokens(*span)))
        return "\n".join(lines)

    def _facts(self, answer: Answering) -> StepFacts:
        sampling = self._request.sampling
        options = {
            "answer_start": self._query[1],
            "n_generated": len(answer.tokens),
            "max_tokens": self._request.max_tokens,
            "stop": list(self._request.stop),
            "sampling": _sampling_facts(sampling),
            "user": self._user,
            "is_whole": self._request.is_whole,
        }
        vocab, retriever = self._session.core.model.vocab, self._session.retriever
        closed = bool(answer.tokens) and vocab.is_eog(answer.tokens[-1])
        return StepFacts(
            self._request.kind, self._query[0], answer.text, closed, retriever.name, json.dumps(options)
        )

    def _ask(self) -> TaskGenerator[tuple[F32 | None, list[RecallReport]]]:
        """The first pass of the query, then recall and replay if the history does not fit the view."""
        session, budget, canonical = self._session, self._session.budget, self._session.canonical
        start, end = self._query
        end_of_view = max(
            canonical.epoch_end(start), end + budget.n_reserve
        )  # decides on the kind of positions
        everything_fits = canonical.keeps_all(start) and end + budget.n_reserve <= budget.n_view
        if not everything_fits:
            yield from look_back(session, self._past, self._earlier, self._query_rows)
        if session.settings.first_pass == "canonical" or everything_fits or session.view.end != start:
            tail_start = None if everything_fits else canonical.first_pass_start(start, end - start)
            parts = canonical.view(start, tail_start)
            yield from reach(session, session.target(parts, end_of_view), rebuild=True)
        else:
            parts = session.shrunk_view(end - start)
            yield from reach(session, session.target(parts, end_of_view), rebuild=False)
        logits = yield from feed(
            session,
            start,
            end,
            Phase.QUERY,
            logits=True,
            query=self._query_rows,
            scored=self._scored,
            done=session.link.progress(Phase.QUERY, start, end),
        )
        self._watch.lap("query_s")
        if everything_fits:
            return logits, []
        frame = frame_of_query(budget, canonical, start, end - start)
        query = Query(self._query_rows.rows(), self._query_text)
        report, logits = yield from recall(session, frame, query, end_of_view, logits, self._watch)
        return logits, [report]


def _sampling_facts(sampling: SamplingParams) -> dict[str, Any]:
    """What is remembered of how an answer was sampled; of a long grammar, such as one that was made of many
    tools, the hash only."""
    facts, grammar = dataclasses.asdict(sampling), sampling.grammar
    text = grammar if isinstance(grammar, str) else grammar.grammar
    if len(text) > _LONG_GRAMMAR:
        digest = xxhash.xxh3_128_hexdigest(text.encode())
        facts["grammar"] = {"xxh3_128": digest, "n_characters": len(text)}
    return facts


def read(session: Session, tokens: I32) -> TaskGenerator[StepResult]:
    """A step without a query: all tokens are read as history and committed."""
    history, watch = session.history, Stopwatch(*PHASES)
    first, end = history.n_committed, history.n_committed + len(tokens)
    session.budget.check_read(session.canonical)
    session.check_positions(end)
    session.begin()
    with provisional(session, keep_until=end):
        yield from prepare(session)
        history.extend(tokens)
        n_reused = history.adopt(end)
        n_carried = yield from read_history(session, first + n_reused, end)
        history.commit(StepFacts("read", end, closed=True))
        session.view.tidy()
    watch.lap("read_s")
    result = StepResult(
        text="",
        tokens=(),
        finish_reason="stop",
        n_read=len(tokens) - n_reused - n_carried,
        n_query=0,
        n_generated=0,
        n_reused=n_reused,
        n_cached=first,
        n_carried=n_carried,
        timings=watch.timings,
    )
    session.finish(result)
    return result
