"""How an answer grows past its view: memory is recalled in mid-answer, as often as it takes."""

from __future__ import annotations

from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.native.layout import F32

from .feeding import feed
from .frame import frame_of_answer
from .query_rows import QueryBuffer
from .recall import recall
from .report import RecallReport
from .retrieval import Query
from .session import Session
from .stopwatch import Stopwatch


class RecallingGrowth:
    """Growth (see answering) of one answer. A full view is never the end of it: the query's blocks and the
    answer's newest tokens stay, older ones are blocks like any other, and are selected or not. The end of
    the trained window is, where original positions were asked for."""

    def __init__(
        self,
        session: Session,
        query: tuple[int, int],
        query_rows: QueryBuffer,
        query_text: str,
        watch: Stopwatch,
    ) -> None:
        """query: its token positions [start, end); the answer begins at `end`."""
        self.recalls: list[RecallReport] = []
        self._session = session
        self._query = query
        self._query_rows = query_rows
        self._query_text = query_text
        self._tail_rows = QueryBuffer(session.layers, session.budget.n_query_tail)
        self._watch = watch

    @property
    def _room(self) -> int:
        session = self._session
        return session.room(session.history.n_tokens, session.budget.n_view)

    def make_room(self, logits: F32) -> TaskGenerator[F32 | None]:
        if self._room > 0:
            return logits
        session, history = self._session, self._session.history
        if session.is_at_end(history.n_tokens):
            return None
        self._watch.lap("decode_s")
        frame = frame_of_answer(session.budget, session.canonical, self._query, history.n_tokens)
        history.complete(frame.replay_start)
        first = max(self._query[1], history.n_tokens - session.budget.n_query_tail)
        newest = session.text_of(history.tokens(first, history.n_tokens))
        report, new_logits = yield from recall(
            session,
            frame,
            Query(self._query_rows.rows(self._tail_rows), f"{self._query_text}\n{newest}"),
            history.n_tokens + session.budget.n_reserve,
            logits,
            self._watch,
            tail=self._tail_rows,
        )
        self.recalls.append(report)
        assert self._room > 0, "a recall left no room for the answer"
        return new_logits

    def feed(self, token: int, *, logits: bool) -> TaskGenerator[F32 | None]:
        session = self._session
        at = session.history.n_tokens
        # The next recall comes when the room is used up: only the Q of the last tokens before it is wanted.
        query = self._tail_rows if self._room <= session.budget.n_query_tail else None
        session.history.extend([token])
        return (yield from feed(session, at, at + 1, Phase.DECODE, logits=logits, query=query))

    def drop(self, n_kept: int) -> None:
        self._session.drop_from(self._query[1] + n_kept)
