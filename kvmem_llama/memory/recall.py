"""One recall: score the candidates, select, go to the new view, replay over it, and say what was done."""

from __future__ import annotations

from collections.abc import Mapping, Set

from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.native.layout import F32

from .explain import tier_of
from .feeding import feed
from .frame import Frame
from .query_rows import QueryBuffer
from .recompute import reach
from .refresh import refresh, spans_to_refresh
from .report import Recalled, RecalledBlock, RecallReport, RecallTimings, Tier
from .retrieval import Query, Ranking
from .session import Session
from .stopwatch import Stopwatch


def recall(
    session: Session,
    frame: Frame,
    query: Query,
    end: int,
    logits: F32 | None,
    watch: Stopwatch,
    tail: QueryBuffer | None = None,
) -> TaskGenerator[tuple[RecallReport, F32 | None]]:
    """Recalls with `query`, then evaluates the tokens from the frame's replay start on again
    -> the report, and the logits of the newest token.

    end: token position that the new view is to reach.
    logits: those of the newest token; returned as they are if nothing is replayed. A recall that does not
        change the view (no-op) need not be followed by a replay: these rows were made over that view.
    tail: of a recall in mid-answer; takes the raw Q of the replayed tokens when the room that follows is
        too short for new tokens to fill it.
    """
    history, view = session.history, session.view
    candidates = frame.candidates()
    ranking = session.retriever.rank(
        query, history, candidates, frame.n_select, session.selected, options=session.options
    )
    score_s = watch.lap("score_s")
    selected = ranking.selected
    tiers = {start: tier_of(session, start) for start in {*frame.why, *(selected * frame.block).tolist()}}
    session.selected = frozenset(selected.tolist())
    history.recalled(int(number) for number in selected)
    select_s = watch.lap("select_s")

    target = session.target(frame.parts(selected), end)
    stayed = {placed.part.start for placed in target.placed}
    here = [(r.part.start, r.position) for r in view if r.part.start < frame.replay_start]
    spans = spans_to_refresh(ranking.best, session.options.refresh // frame.block)
    noop = not spans and here == [(placed.part.start, placed.position) for placed in target.placed]
    recomputed: frozenset[int] = frozenset()
    skip_replay = noop and session.settings.replay_shortcut
    if not skip_replay:
        view.drop_from(frame.replay_start)
        todo = view.plan(target, rebuild=False)
        stayed -= {placed.part.start for placed in todo.write}
        if logits is not None:
            logits = logits.copy()  # what is computed again overwrites them
        recomputed = yield from reach(session, target, rebuild=False, may_stop=tail is None)
        if recomputed:
            stayed.clear()
    apply_s, refresh_s = watch.lap("apply_s"), 0.0
    if spans:
        yield from refresh(session, target, spans, may_stop=tail is None)
        refresh_s = watch.lap("refresh_s")

    n_replay = history.n_tokens - frame.replay_start
    if n_replay and not skip_replay:
        n_free = session.room(frame.replay_start, session.budget.n_view) - n_replay
        kept = tail if n_free < session.budget.n_query_tail else None
        if kept is not None:
            kept.clear()
        logits = yield from feed(
            session,
            frame.replay_start,
            history.n_tokens,
            Phase.REPLAY,
            logits=True,
            query=kept,
            done=session.link.progress(Phase.REPLAY, frame.replay_start, history.n_tokens),
        )
    replay_s = watch.lap("replay_s")

    report = RecallReport(
        blocks=_blocks(session, frame, stayed, recomputed, ranking, tiers),
        n_view=view.n_tokens,
        n_candidates=len(candidates),
        n_selected=len(selected),
        n_held=len(ranking.held),
        timings=RecallTimings(score_s, select_s, apply_s, replay_s, refresh_s),
        noop=noop,
        mid_answer=tail is not None,
        n_replayed=0 if skip_replay else n_replay,
    )
    session.link.emit(Recalled(report))
    return report, logits


def _blocks(
    session: Session,
    frame: Frame,
    stayed: Set[int],
    recomputed: Set[int],
    ranking: Ranking,
    tiers: Mapping[int, Tier],
) -> tuple[RecalledBlock, ...]:
    """The view as it is after the replay."""
    place = {number * frame.block: i for i, number in enumerate(ranking.best.tolist())}
    channels = {number * frame.block: ranks for number, ranks in ranking.ranks().items()}
    own = {number * frame.block: ranks for number, ranks in ranking.own_ranks().items()}
    vocab = session.core.model.vocab
    blocks = []
    for resident in session.view:
        part = resident.part
        tokens = session.history.tokens(part.start, part.end)
        at = place.get(part.start)
        blocks.append(
            RecalledBlock(
                start=part.start,
                count=part.count,
                rank=None if at is None else at + 1,
                score=None if at is None else float(ranking.scores[at]),
                channels=channels.get(part.start, {}),
                own=own.get(part.start, {}),
                tier=tiers.get(part.start, "device"),
                age=session.history.steps.age(part.start),
                why=frame.why.get(part.start, "query" if part.start >= frame.replay_start else "selected"),
                position=resident.position,
                resident=part.start in stayed and not resident.refreshed,
                text=vocab.detokenize(tokens).decode("utf-8", "replace"),
                recomputed=part.start in recomputed,
                carried=session.history.is_carried(part.start),
                held=part.start // frame.block in ranking.held,
                refreshed=resident.refreshed,
            )
        )
    return tuple(blocks)
