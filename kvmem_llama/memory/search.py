"""What a query would recall, without an answer to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.native.layout import I32

from .explain import tier_of
from .feeding import feed
from .frame import frame_of_query
from .guard import provisional, undo
from .positions import TokenPos
from .query_rows import QueryBuffer
from .recompute import prepare, reach
from .report import Tier
from .retrieval import Query, Ranking
from .session import Session


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that a search has found."""

    start: TokenPos
    count: int  # tokens
    ranks: dict[str, int]  # by channel, 1 is the best
    text: str  # characters cut at its edges are replaced
    own: dict[str, int] = field(default_factory=dict)  # as `ranks`, without what its neighbours gave it
    score: float = 0.0  # of several channels: the part that it has of all scores
    tier: Tier = "device"  # where its rows are
    age: int = 1  # steps since the one that appended its first token, 1: the newest one


@dataclass(frozen=True, slots=True)
class SearchResult:
    blocks: tuple[FoundBlock, ...]  # from the best on
    ranking: Ranking  # of all candidates: complete blocks that are not in every view anyway


def search(session: Session, tokens: I32, n: int) -> TaskGenerator[SearchResult]:
    """The `n` best blocks for a query, [n_tokens], all of it text.

    The query is evaluated as that of a step would be, over the canonical view; then the history is as it was.
    Raises MandatoryTooLarge, InvalidOption.
    """
    history, budget, canonical = session.history, session.budget, session.canonical
    start, end = history.n_committed, history.n_committed + len(tokens)
    budget.check_step(canonical, start, end - start)
    session.check_positions(end)
    session.begin()
    rows = QueryBuffer(session.layers)
    with provisional(session, keep_until=0):
        yield from prepare(session)
        history.extend(tokens)
        parts = canonical.view(start, canonical.first_pass_start(start, end - start))
        yield from reach(session, session.target(parts, canonical.epoch_end(start)), rebuild=True)
        done = session.link.progress(Phase.QUERY, start, end)
        yield from feed(session, start, end, Phase.QUERY, query=rows, done=done)
        query = Query(rows.rows(), session.text_of(tokens))
        candidates = frame_of_query(budget, canonical, start, end - start).candidates()
        ranking = session.retriever.rank(query, history, candidates, n, session.selected)
        undo(session, keep_until=0)
    ranks, own = ranking.ranks(), ranking.own_ranks()
    blocks = []
    for number, score in zip(ranking.best.tolist(), ranking.scores.tolist(), strict=True):
        at = number * budget.block
        blocks.append(
            FoundBlock(
                start=TokenPos(at),
                count=budget.block,
                ranks=ranks[number],
                text=session.text_of(history.tokens(at, at + budget.block)),
                own=own[number],
                score=score,
                tier=tier_of(session, at),
                age=history.steps.age(at),
            )
        )
    return SearchResult(tuple(blocks), ranking)
