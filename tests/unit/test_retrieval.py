"""Rankings: shares of several orders, neighbours, words of blocks, and what a search leaves behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mean_k_data import Model
from numpy.random import default_rng

from kvmem_llama.calibration import CalibratedHead, Calibration
from kvmem_llama.memory.channels import SHARES, STRANGE_SHARES, UNCALIBRATED, Channels, shares_for
from kvmem_llama.memory.indexes import Indexes
from kvmem_llama.memory.query_rows import ScoredLayers
from kvmem_llama.memory.retrieval import Query, Retriever, fuse, interleave, spread
from kvmem_llama.memory.scoring import QueryRows
from kvmem_llama.memory.scoring.reference import ReferenceScorer
from kvmem_llama.memory.scoring.tokens import TokenScorer
from kvmem_llama.memory.selector import select
from kvmem_llama.memory.texts import BlockTexts
from kvmem_llama.native import kernels
from kvmem_llama.settings import Settings

BLOCK = 32
SCORES = ("mean_k", "lexical", "fused")
WORDS = ["red", "green", "blue", "key", "door", "Élan", "parse_config", "HTTPServer2", "7"]


def text_of(tokens: np.ndarray) -> str:
    """Token t is the end of a word if it is odd, else a part of it."""
    return "".join(WORDS[int(t) // 2 % len(WORDS)] + (" " if t % 2 else "") for t in tokens)


class History:
    """What a retriever searches, of a model's blocks."""

    def __init__(self, n_blocks: int, seed: int = 0) -> None:
        self.model = Model([(4, 2, 64)], seed)
        self.indexes = Indexes(self.model.index(n_blocks))
        self.texts = BlockTexts(text_of, BLOCK)
        self.n_complete = n_blocks
        self.ids = self.model.rng.integers(0, 2 * len(WORDS), n_blocks * BLOCK).astype(np.int32)

    def tokens(self, start: int = 0, end: int | None = None) -> np.ndarray:
        return self.ids[start:end]


def retriever(score: str) -> Retriever:
    return Retriever(Channels.of(Settings(score=score), None), ReferenceScorer())


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
    scores = ReferenceScorer().score(query.rows, history.indexes.mean_k, candidates)
    ranking = retriever("mean_k").rank(query, history, candidates, 9)
    np.testing.assert_array_equal(ranking.selected, select(scores, candidates, 9))
    np.testing.assert_array_equal(ranking.scores, scores[np.searchsorted(candidates, ranking.best)])
    assert [ranks["mean_k"] for ranks in ranking.ranks().values()] == list(range(1, 10))


def test_both_channels_are_heard() -> None:
    history = History(60)
    history.ids[40 * BLOCK + 3 : 40 * BLOCK + 5] = 6, 7  # "keykey "
    query = Query(history.model.query(7), "keykey")
    candidates = np.arange(60)
    ranking = retriever("fused").rank(query, history, candidates, 24)
    ranks = ranking.ranks()
    assert min(r.get("lexical", 99) for r in ranks.values()) == 1
    assert min(r.get("mean_k", 99) for r in ranks.values()) == 1
    assert ranking.scores.sum() <= 1 + 1e-9 and len(set(ranking.best.tolist())) == 24


@pytest.mark.parametrize("score", SCORES)
def test_what_nothing_speaks_for_is_filled_up_with_the_newest(score: str) -> None:
    history = History(20)
    query = Query(history.model.query(3), "nowhere")
    candidates = np.arange(3, 15)
    ranking = retriever(score).rank(query, history, candidates, 5)
    assert len(ranking.best) == 5
    if score == "lexical":
        assert ranking.best.tolist() == [14, 13, 12, 11, 10]
    everything = retriever(score).rank(query, history, candidates, 99)
    assert sorted(everything.best.tolist()) == candidates.tolist()


@pytest.mark.parametrize("score", SCORES)
def test_no_candidates_or_no_room_find_nothing(score: str) -> None:
    history, nothing = History(5), np.zeros(0, np.int64)
    query = Query(history.model.query(3), "red")
    assert not len(retriever(score).rank(query, history, nothing, 5).best)
    assert not len(retriever(score).rank(query, history, np.arange(5), 0).best)


def heads_of(centred: bool) -> Calibration:
    """Three query heads of one KV head, one of another, one of another layer."""
    rng = np.random.default_rng(4)
    heads = tuple(
        CalibratedHead(il, head, 0.5, tuple(rng.normal(size=64).tolist()) if centred else None)
        for il, head in ((1, 5), (0, 2), (0, 3), (1, 1), (0, 4))
    )
    halves = {"heads": 0.5, "lexical": 0.5}
    return Calibration("", "", heads, centred, "q8_0", {"heads": 0.25, "lexical": 0.5}, halves, halves, {})


@pytest.mark.parametrize("centred", [False, True])
def test_heads_find_what_their_tokens_attend_to(centred: bool) -> None:
    """Against the formula in float64, head by head; a block without a row has no score."""
    history, calibration = History(1), heads_of(centred)
    model = history.model = Model([(6, 2, 64)] * 2, 3)
    channels = Channels.of(Settings(score="heads"), calibration)
    history.indexes = Indexes.of(channels, Settings(), model.layers, model.layout)
    records = [model.record() for _ in range(30)]
    for record in records:
        history.indexes.append(record, BLOCK)
    index = history.indexes.tokens
    assert index is not None and [(h.il, h.head_kv) for h in index.heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    index._counts[7] = 0
    query = model.query(6)
    rows = QueryRows(query.layers, query.scales, (0, 1))
    candidates = np.array([2, 3, 6, 7, 8, 9, 20])
    found = Retriever(channels, ReferenceScorer(), TokenScorer(kernels.load()), model.layers)
    ranking = found.rank(Query(rows, ""), history, candidates, 7)
    known = candidates[candidates != 7]
    expected = np.zeros(30)
    for head in calibration.heads:
        q = rows.layers[head.layer][:, head.head].astype(np.float64) - (head.mean_q or 0.0)
        at = [(h.il, h.head_kv) for h in index.heads].index((head.layer, head.head // 3))
        keys = np.stack([index.tokens(at, int(number)) for number in known])  # [blocks, tokens, d]
        weights = np.exp(64**-0.5 * np.einsum("md,btd->mbt", q, keys))
        expected[known] += (weights.sum(2) / weights.sum((1, 2))[:, None]).sum(0) / len(calibration.heads)
    expected = spread(expected, 0.25)[candidates]
    got = dict(zip(ranking.best.tolist(), ranking.scores, strict=True))
    np.testing.assert_allclose([got[int(number)] for number in candidates], expected, rtol=1e-4)
    assert len(ranking.ranks()) == 7 and ranking.ranks()[int(candidates[np.argmax(expected)])] == {"heads": 1}


def test_each_channel_takes_its_layers_out_of_the_query() -> None:
    """All three at once; each ranks as it does alone."""
    calibration = heads_of(True)
    model = Model([(6, 2, 64)] * 3, 3)
    found = {}
    for names in (("mean_k",), ("heads",), ("lexical",), ("heads", "lexical", "mean_k")):
        with_heads = calibration if "heads" in names else None
        channels = Channels({name: 1 / len(names) for name in names}, calibration=with_heads)
        settings = Settings(layers_scored="1,2")
        wanted = ScoredLayers.of(channels, settings, model.layers)
        history = History(1)
        history.indexes = Indexes.of(channels, settings, model.layers, model.layout)
        model.rng = default_rng(8)
        for _ in range(30):
            history.indexes.append(model.record(), BLOCK)
        history.n_complete, history.ids = 30, np.arange(30 * BLOCK, dtype=np.int32) % 18
        query = model.query(6)
        rows = QueryRows(tuple(query.layers[i] for i in wanted.indices), wanted.scales, wanted.numbers)
        retriever = Retriever(channels, ReferenceScorer(), TokenScorer(kernels.load()), model.layers)
        orders = retriever.rank(Query(rows, "red"), history, np.arange(30), 30).orders
        found[names] = orders
    for name, order in found["heads", "lexical", "mean_k"].items():
        np.testing.assert_array_equal(order, found[name,][name])
    assert ScoredLayers.of(channels, settings, model.layers).numbers == (0, 1, 2)


def test_channels_are_those_of_the_score_and_the_calibration() -> None:
    calibration = heads_of(False)
    both = Channels.of(Settings(score="fused"), calibration)
    assert both.shares == calibration.shares and both.calibration is calibration and not both.hint
    only = {"heads": 0.0, "lexical": 1.0}
    words = Channels.of(Settings(score="fused"), replace(calibration, shares=only, weights=only))
    assert set(words.shares) == {"lexical"} and words.calibration is None
    without = Channels.of(Settings(score="fused"), None)
    assert set(without.shares) == {"lexical", "mean_k"} and "kvmem calibrate" in without.hint
    ids = {Channels.of(Settings(score="heads"), c).calibration_id for c in (calibration, heads_of(True))}
    assert len(ids) == 2 and all(len(id) == 8 for id in ids) and not without.calibration_id


def test_a_fusion_keeps_a_part_for_each_channel_and_puts_first_what_both_find() -> None:
    heads, words = np.array([9.0, 8, 5, 0, 0, 0, 7, 0]), np.array([0.0, 0, 5, 9, 8, 7, 0, 0])
    scores = {"heads": heads, "lexical": words}
    orders = {name: np.argsort(-one, kind="stable")[: np.count_nonzero(one)] for name, one in scores.items()}
    equal = {"heads": 0.5, "lexical": 0.5}
    joint = fuse(scores, orders, {"heads": 0.0, "lexical": 0.0}, equal, 3)
    assert joint.tolist() == [2, 3, 0]  # block 2 is the third or fourth of either, and the only one of both
    quarters = {"heads": 0.25, "lexical": 0.25}
    for weights in (equal, {"heads": 0.0, "lexical": 1.0}):
        best = fuse(scores, orders, quarters, weights, 8).tolist()
        assert {0, 1} <= set(best) and {3, 4} <= set(best) and 7 not in best  # block 7 has no score
    assert fuse(scores, orders, equal, {}, 4).tolist() == [0, 3, 1, 4]  # no joint part
    assert fuse({"heads": heads * 0}, {"heads": orders["heads"][:0]}, {"heads": 0.5}, equal, 4).tolist() == []


def test_a_question_of_strange_words_goes_to_the_heads() -> None:
    assert shares_for(SHARES, 0.5) == SHARES and shares_for(SHARES, 0.05) == STRANGE_SHARES
    assert shares_for(UNCALIBRATED, 0.0) == UNCALIBRATED
    texts, ids = BlockTexts(text_of, BLOCK), np.full(3 * BLOCK, 1, np.int32)  # "red " over and over
    ids[BLOCK] = 3  # "green "
    for words, least, most in (("green", 0.3, 1), ("green zebra quagga okapi", 0, 0.2), ("zebra", 0, 0)):
        scores, whole = texts.search(words, lambda a, b: ids[a:b], 3)
        assert least <= scores.max() / whole <= most
    assert texts.search("", lambda a, b: ids[a:b], 3)[1] == 0
    texts.close()


def test_neighbours_get_half() -> None:
    np.testing.assert_array_equal(spread(np.array([0.0, 4, 0, 0, 2]), 0.5), [2, 4, 2, 1, 2])
    np.testing.assert_array_equal(spread(np.zeros(0), 0.5), np.zeros(0))


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
