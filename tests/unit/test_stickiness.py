"""A bonus for blocks that were selected before: how far it reaches, and what is said about it."""

from __future__ import annotations

import numpy as np
import pytest
from fake_run import asked, checked_sessions, request, text
from hypothesis import given
from hypothesis import strategies as st
from mean_k_data import Model

from kvmem_llama.engine.requests import Phase
from kvmem_llama.memory.channels import Channels
from kvmem_llama.memory.indexes import Indexes
from kvmem_llama.memory.retrieval import Query, Ranking, Retriever
from kvmem_llama.memory.scoring.reference import ReferenceScorer
from kvmem_llama.memory.texts import BlockTexts
from kvmem_llama.settings import Settings

checked = checked_sessions
N = 40
MODEL = Model([(4, 2, 32)])
CANDIDATES = np.arange(1, N)


class History:
    indexes = Indexes(MODEL.index(N))
    texts = BlockTexts(lambda tokens: " ".join(f"w{t}" for t in tokens), 32)
    n_complete = N
    ids = np.random.default_rng(2).integers(0, 60, N * 32).astype(np.int32)

    def tokens(self, start: int = 0, end: int | None = None) -> np.ndarray:
        return self.ids[start:end]


def rank(score: str, stickiness: float, in_view: set[int], n: int = 8) -> Ranking:
    retriever = Retriever(Channels.of(Settings(score=score), None), ReferenceScorer(), stickiness=stickiness)
    return retriever.rank(Query(QUERY, "w3 w17 w40"), History(), CANDIDATES, n, in_view)


QUERY = MODEL.query(5)


@given(st.sampled_from(["mean_k", "lexical", "fused"]), st.sets(st.integers(0, N - 1)), st.floats(0, 1))
def test_a_block_in_the_view_displaces_only_what_its_bonus_reaches(
    score: str, in_view: set[int], bonus: float
) -> None:
    without, sticky = rank(score, 0.0, in_view), rank(score, bonus, in_view)
    before, after = set(without.best.tolist()), set(sticky.best.tolist())
    assert sticky.held == {b for b in after - before if b in in_view}
    assert len(after) == len(before)
    plain = {name: dict(zip(CANDIDATES.tolist(), s, strict=True)) for name, s in _scores(score).items()}
    if score != "fused":
        (scores,) = plain.values()
        for lost in before - after:
            assert lost not in in_view
            for kept in sticky.held:
                assert scores[lost] <= scores[kept] * (1 + bonus) * (1 + 1e-9)
    if not bonus or not in_view:
        assert sticky.best.tolist() == without.best.tolist() and not sticky.held


def _scores(score: str) -> dict[str, np.ndarray]:
    """By channel, what a block's rank follows from without a bonus."""
    ranking = rank(score, 0.0, set(), N)
    out = {}
    for name in ranking.orders:
        alone = Retriever(Channels.of(Settings(score=name), None), ReferenceScorer())
        found = alone.rank(Query(QUERY, "w3 w17 w40"), History(), CANDIDATES, N)
        scores = np.zeros(N)
        scores[found.best] = found.scores
        out[name] = scores[CANDIDATES]
    return out


def test_a_large_bonus_keeps_what_was_there_where_scores_are_close() -> None:
    scores = _scores("mean_k")["mean_k"]
    low = CANDIDATES[np.argsort(scores)[len(scores) // 2 :]][:8]  # the middle
    ranking = rank("mean_k", 1.0, set(low.tolist()))
    assert ranking.held and ranking.held <= set(low.tolist())


@pytest.mark.usefixtures("checked")
def test_a_report_counts_the_blocks_that_only_stay() -> None:
    run, session = asked(stickiness=1.0, score="mean_k")
    twin, other = asked(score="mean_k")
    first = run.step(session, request(text(20, 1), 0)).recalls[0]
    assert first.n_held == 0
    twin.step(other, request(text(20, 1), 0))
    sticky = run.step(session, request(text(20, 3), 0)).recalls[0]
    plain = twin.step(other, request(text(20, 3), 0)).recalls[0]
    more = {b.start for b in sticky.blocks if b.why == "selected"} - {b.start for b in plain.blocks}
    held = {b.start for b in sticky.blocks if b.held}
    assert held and held == more and sticky.n_held == len(held)
    assert all(b.why == "selected" for b in sticky.blocks if b.held)


@pytest.mark.usefixtures("checked")
def test_a_step_that_is_undone_leaves_no_bonus() -> None:
    run, session = asked(stickiness=1.0)
    run.step(session, request(text(20, 1), 0))
    assert session.selected
    task = run.start_step(session, request(text(20, 2), 50))
    while run.scheduler.run_batch() and run.scheduler._running[0].request.phase is not Phase.DECODE:  # type: ignore[union-attr]
        pass
    task.cancel()
    run.drive(task)
    assert not session.selected
