"""Rankings: shares of several orders, neighbours, words of blocks, and what a search leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mean_k_data import Model

from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.memory.retrieval import SHARES, Query, Retriever, interleave, spread
from kvmem_llama.memory.scoring.reference import ReferenceScorer
from kvmem_llama.memory.selector import select
from kvmem_llama.memory.texts import BlockTexts

BLOCK = 32
WORDS = ["red", "green", "blue", "key", "door", "Élan", "parse_config", "HTTPServer2", "7"]


def text_of(tokens: np.ndarray) -> str:
    """Token t is the end of a word if it is odd, else a part of it."""
    return "".join(WORDS[int(t) // 2 % len(WORDS)] + (" " if t % 2 else "") for t in tokens)


class History:
    """What a retriever searches, of a model's blocks."""

    def __init__(self, n_blocks: int, seed: int = 0) -> None:
        self.model = Model([(4, 2, 64)], seed)
        self.index: MeanKIndex = self.model.index(n_blocks)
        self.texts = BlockTexts(text_of, BLOCK)
        self.n_complete = n_blocks
        self.ids = self.model.rng.integers(0, 2 * len(WORDS), n_blocks * BLOCK).astype(np.int32)

    def tokens(self, start: int = 0, end: int | None = None) -> np.ndarray:
        return self.ids[start:end]


@given(
    st.lists(st.permutations(range(12)), min_size=1, max_size=2),
    st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
    st.lists(st.integers(0, 12), min_size=3, max_size=3),
    st.integers(0, 15),
)
def test_every_order_has_its_share_of_every_beginning(
    orders: list[list[int]], weights: list[float], lengths: list[int], n: int
) -> None:
    cut = [np.array(order[:m], np.int64) for order, m in zip(orders, lengths, strict=False)]
    shares = [w / sum(weights[: len(cut)]) for w in weights[: len(cut)]]
    found = interleave(cut, shares, n).tolist()
    everything = set[int]().union(*(order.tolist() for order in cut))
    assert len(found) == len(set(found)) == min(n, len(everything)) and set(found) <= everything
    for length in range(len(found) + 1):
        for order, share in zip(cut, shares, strict=True):
            # The best of an order, as many as its share is, are there; or all of it.
            wanted = min(int(share * length), len(order))
            assert set(order[:wanted].tolist()) <= set(found[:length])
    assert interleave(cut, shares, n).tolist() == found


def test_one_channel_selects_what_its_scores_select() -> None:
    history = History(50)
    query = Query(history.model.query(7), "")
    candidates = np.arange(2, 48)
    scores = ReferenceScorer().score(query.rows, history.index, candidates)
    ranking = Retriever(ReferenceScorer(), SHARES["mean_k"]).rank(query, history, candidates, 9)
    np.testing.assert_array_equal(ranking.selected, select(scores, candidates, 9))
    np.testing.assert_array_equal(ranking.scores, scores[np.searchsorted(candidates, ranking.best)])
    assert [ranks["mean_k"] for ranks in ranking.ranks().values()] == list(range(1, 10))


def test_both_channels_are_heard() -> None:
    history = History(60)
    history.ids[40 * BLOCK + 3 : 40 * BLOCK + 5] = 6, 7  # "keykey "
    query = Query(history.model.query(7), "keykey")
    candidates = np.arange(60)
    ranking = Retriever(ReferenceScorer(), SHARES["fused"]).rank(query, history, candidates, 8)
    ranks = ranking.ranks()
    assert min(r.get("lexical", 99) for r in ranks.values()) == 1
    assert min(r.get("mean_k", 99) for r in ranks.values()) == 1
    assert ranking.scores.sum() <= 1 + 1e-9 and len(set(ranking.best.tolist())) == 8


@pytest.mark.parametrize("score", SHARES)
def test_what_nothing_speaks_for_is_filled_up_with_the_newest(score: str) -> None:
    history = History(20)
    query = Query(history.model.query(3), "nowhere")
    candidates = np.arange(3, 15)
    ranking = Retriever(ReferenceScorer(), SHARES[score]).rank(query, history, candidates, 5)
    assert len(ranking.best) == 5
    if score == "lexical":
        assert ranking.best.tolist() == [14, 13, 12, 11, 10]
    everything = Retriever(ReferenceScorer(), SHARES[score]).rank(query, history, candidates, 99)
    assert sorted(everything.best.tolist()) == candidates.tolist()


@pytest.mark.parametrize("score", SHARES)
def test_no_candidates_or_no_room_find_nothing(score: str) -> None:
    history, nothing = History(5), np.zeros(0, np.int64)
    query = Query(history.model.query(3), "red")
    retriever = Retriever(ReferenceScorer(), SHARES[score])
    assert not len(retriever.rank(query, history, nothing, 5).best)
    assert not len(retriever.rank(query, history, np.arange(5), 0).best)


def test_neighbours_get_half() -> None:
    np.testing.assert_array_equal(spread(np.array([0.0, 4, 0, 0, 2])), [2, 4, 2, 1, 2])
    np.testing.assert_array_equal(spread(np.zeros(0)), np.zeros(0))


@given(st.data())
def test_texts_after_any_life_are_those_made_at_once(data: st.DataObject) -> None:
    """Blocks come, are searched or not, are cut and come with other tokens; a fork goes its own way."""
    draw = data.draw
    lives = [(BlockTexts(text_of, BLOCK), np.zeros(0, np.int32))]
    for _ in range(draw(st.integers(1, 8))):
        i = draw(st.integers(0, len(lives) - 1))
        texts, ids = lives[i]
        act = draw(st.sampled_from(["grow", "cut", "search", "fork"]))
        if act == "grow":
            more = draw(st.lists(st.integers(0, 2 * len(WORDS) - 1), min_size=1, max_size=80))
            lives[i] = (texts, np.append(ids, np.array(more, np.int32)))
        elif act == "cut":
            n = draw(st.integers(0, len(ids)))
            texts.drop_from(n // BLOCK)
            lives[i] = (texts, ids[:n])
        elif act == "search":
            texts.scores("red", lambda a, b, ids=ids: ids[a:b], len(ids) // BLOCK)
        else:
            lives.append((texts.fork(), ids.copy()))
    for texts, ids in lives:
        for words in ("red", "parse config", "the 7 Elan"):
            got = texts.scores(words, lambda a, b, ids=ids: ids[a:b], len(ids) // BLOCK)
            fresh = BlockTexts(text_of, BLOCK)
            want = fresh.scores(words, lambda a, b, ids=ids: ids[a:b], len(ids) // BLOCK)
            np.testing.assert_array_equal(got, want)
            fresh.close()
        texts.close()
        texts.close()


def test_a_word_cut_by_the_edge_of_a_block_is_found_in_the_later_one() -> None:
    texts = BlockTexts(text_of, BLOCK)
    ids = np.full(3 * BLOCK, 1, np.int32)  # "red " over and over
    ids[2 * BLOCK - 1], ids[2 * BLOCK] = 2, 5  # "green" | "blue "
    scores = texts.scores("greenblue", lambda a, b: ids[a:b], 3)
    assert scores[2] > 0 and not scores[:2].any()
    texts.close()
