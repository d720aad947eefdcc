"""What models are calibrated on and how heads are chosen, without a model."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvmem_llama.calibrating import ranking, texts
from kvmem_llama.calibrating.cases import facts_case, words_case
from kvmem_llama.calibrating.choosing import Trial, best_of, choose, figures, head_scores, values
from kvmem_llama.calibrating.facts import FACTS, LOCKERS
from kvmem_llama.calibrating.ranking import best_heads, block_shares, index_bytes, rank_on, reciprocal_ranks
from kvmem_llama.calibrating.reading import Asked, Read
from kvmem_llama.errors import InputError
from kvmem_llama.lexical import words
from kvmem_llama.memory.scoring import QueryRows
from kvmem_llama.native.layout import I32, LayerInfo

BLOCK = 32
SOURCES = texts.RANKING + texts.CHOOSING
STOP = set(
    words(
        """a an and are as at be been before behind but by did do does else every for from get given had has
        have he her his how if in into is it its lie many must no not now of off on one only or other out over
        she so than that the their them there these they this those time to under up was way what when where
        which while who whom whose why will with would"""
    )
)


def tokens_of(text: str) -> I32:
    """A token for each byte."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def text_of(tokens: I32) -> str:
    return tokens.astype(np.uint8).tobytes().decode("utf-8", "replace")


# -- texts and questions


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.names[0])
def test_every_text_is_there_and_long_enough(source: texts.Source) -> None:
    for name in source.names:
        assert len(texts.text_of(texts.Source(source.kind, (name,)), 1 << 30)) > 3000, name
    text = texts.text_of(source, 20_000)
    assert 15_000 < len(text) <= 20_000 + 8


def test_no_text_is_used_twice() -> None:
    names = [name for source in SOURCES for name in source.names]
    assert len(names) == len(set(names))
    for pair in (texts.RANKING, texts.CHOOSING):
        assert [source.kind for source in pair] == ["prose", "code"]


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_a_text_that_python_lacks_is_named(kind: texts.Kind) -> None:
    with pytest.raises(InputError, match="nonesuch"):
        texts.text_of(texts.Source(kind, ("nonesuch",)), 100)


def content(text: str) -> set[str]:
    return {re.sub(r"(ies|es|s|ed|ing)$", "", word) for word in words(text) if word not in STOP}


def test_reworded_questions_share_no_content_word_with_their_passage_and_plain_ones_do() -> None:
    for fact in FACTS:
        assert not content(fact.reworded) & content(fact.passage), fact.reworded
        assert len(content(fact.plain) & content(fact.passage)) >= 2, fact.plain
    assert len({name for name, _ in LOCKERS}) == len({code for _, code in LOCKERS}) == len(LOCKERS)


@pytest.mark.parametrize("source", texts.CHOOSING, ids=lambda source: source.kind)
def test_passages_lie_where_the_answers_are_said_to_be(source: texts.Source) -> None:
    case = facts_case(source, tokens_of, 20_000, 5, 1)
    assert abs(len(case.tokens) - 20_000) < 500
    assert [q.about for q in case.questions].count("alike") == 4
    plain = {fact.plain: fact.passage for fact in FACTS}
    starts = []
    for question in case.questions:
        assert question.answer is not None
        passage = text_of(case.tokens[slice(*question.answer)])
        starts.append(question.answer[0])
        if question.about == "plain":
            assert passage.strip("# \n") == plain[question.text]
        if question.about == "alike":
            (name,) = [name for name, _ in LOCKERS if name in question.text]
            assert f"The {name} locker" in passage
    assert starts == sorted(starts) and starts[0] > 1000 and starts[-1] < 19_500
    assert {name for name, _ in LOCKERS if f"The {name} locker" in text_of(case.tokens)} == {
        name for name, _ in LOCKERS[4:]
    }


def test_questions_are_made_of_words_of_the_text_from_all_over_it() -> None:
    case = words_case(texts.RANKING[0], tokens_of, 20_000, 12)
    text = text_of(case.tokens)
    assert len({q.text for q in case.questions}) == 12
    for question in case.questions:
        assert 2 <= len(question.text.split()) <= 6
        assert all(word in text for word in question.text.split())
    again = words_case(texts.RANKING[0], tokens_of, 20_000, 12)
    assert again.questions == case.questions and (again.tokens == case.tokens).all()


# -- heads


def layer(il: int, n_head: int, n_head_kv: int, d: int = 64) -> LayerInfo:
    return LayerInfo(
        il=il, cache=0, rope=True, n_head=n_head, n_head_kv=n_head_kv, d_k=d, d_v=d,
        raw_k_row=n_head_kv * d * 2, k_row=n_head_kv * d * 2, v_row=n_head_kv * d * 2, scale=d**-0.5,
        type_k=1, type_v=1, k_rotated=False, rope_params=(), rope_factors=False, k_base=0, v_base=0,
    )  # fmt: skip


def test_the_share_of_a_block_is_that_of_its_tokens() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((4 * BLOCK, 64)).astype(np.float32)
    q = rng.standard_normal((3, 2, 64)).astype(np.float32)
    found = block_shares(keys, q, 0.5, BLOCK)
    for head in range(2):
        weights = np.exp(0.5 * q[:, head].astype(np.float64) @ keys.T.astype(np.float64))
        weights /= weights.sum(axis=1, keepdims=True)
        assert np.allclose(found[head], weights.reshape(3, 4, BLOCK).sum(axis=2).mean(axis=0), rtol=1e-4)


def test_a_neighbour_of_the_target_counts_as_it() -> None:
    shares = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], np.float32)
    assert reciprocal_ranks(shares, 0).tolist() == [1 / 3, 1.0]
    assert reciprocal_ranks(shares, 2).tolist() == [1.0, 0.5]


@pytest.fixture
def read() -> tuple[Read, list[np.ndarray]]:
    """A history of 20 blocks where query head 2 of layer 7 finds the blocks that the words say, others do
    not; and the scores by words of six questions."""
    rng = np.random.default_rng(1)
    layers = (layer(3, 4, 2), layer(7, 4, 2))
    keys = [rng.standard_normal((20 * BLOCK, 2, 64)).astype(np.float16) for _ in layers]
    asked, scores = [], []
    for i in range(6):
        target = 2 + 3 * i
        rows = [rng.standard_normal((5, 4, 64)).astype(np.float32) for _ in layers]
        rows[1][:, 2] = 6 * keys[1][target * BLOCK : target * BLOCK + 5, 1]
        asked.append(Asked(QueryRows(tuple(rows), (0.125, 0.125), (3, 7)), np.zeros(18)))
        scores.append(np.eye(20)[target])
    return Read(layers, tuple(keys), np.arange(1, 19), tuple(asked)), scores


def test_the_head_that_finds_what_the_words_find_is_the_best(read: tuple[Read, list[np.ndarray]]) -> None:
    steps: list[int] = []
    ranked = rank_on(*read, BLOCK, steps.append)
    assert len(ranked.agreement) == 8 and sum(steps) == ranking.COST * 6
    assert ranked.agreement[7, 2] == 1.0
    assert max(value for head, value in ranked.agreement.items() if head != (7, 2)) < 0.6
    assert best_heads(ranked.agreement, read[0].layers, BLOCK)[0] == (7, 2)
    assert ranked.n_q == 30
    mean = read[0].asked[0].rows.layers[1][:, 2].sum(axis=0)
    for asked in read[0].asked[1:]:
        mean += asked.rows.layers[1][:, 2].sum(axis=0)
    assert np.allclose(ranked.sum_q[7, 2], mean, rtol=1e-4)


def test_questions_whose_words_are_nowhere_do_not_count(read: tuple[Read, list[np.ndarray]]) -> None:
    history, scores = read
    ranked = rank_on(history, [np.zeros(20), *scores[1:]], BLOCK, lambda n: None)
    assert ranked.agreement[7, 2] == 1.0
    assert set(rank_on(history, [np.zeros(20)] * 6, BLOCK, lambda n: None).agreement.values()) == {0.0}


def test_heads_are_taken_while_their_keys_fit_the_budget() -> None:
    many = [layer(il, 9, 3) for il in range(30)]  # half of Mean-K is 180 bytes: 5 KV heads of 36
    agreement = {(il, h): 0.9 - 0.01 * il - 0.001 * h for il in range(30) for h in range(0, 9, 3)}
    chosen = best_heads(agreement, many, BLOCK)
    assert len(chosen) == 5 and index_bytes(chosen, many) == 180
    assert index_bytes([(0, 0), (0, 1), (0, 2), (0, 3)], many) == 72
    shared = {(0, h): 0.9 for h in range(9)}
    assert len(best_heads(shared, many, BLOCK)) == ranking.N_HEADS
    few = [layer(il, 4, 1, 256) for il in (5, 11, 17)]  # half of Mean-K holds no head: two are allowed
    chosen = best_heads({(5, 1): 0.9, (11, 2): 0.8, (17, 0): 0.7, (5, 2): 0.6, (11, 0): 0.1}, few, BLOCK)
    assert chosen == [(5, 1), (11, 2), (5, 2)] and index_bytes(chosen, few) == 288


def test_heads_that_no_index_can_hold_are_left_out() -> None:
    layers = [layer(0, 2, 2, 48), layer(1, 2, 2, 64)]
    assert best_heads({(0, 0): 0.9, (1, 1): 0.8}, layers, BLOCK) == [(1, 1)]
    assert best_heads({(0, 0): 0.9}, layers[:1], BLOCK) == []


# -- how they are used


def test_scores_of_the_chosen_heads_are_those_of_the_exact_ones_but_for_rounding(
    read: tuple[Read, list[np.ndarray]],
) -> None:
    heads, zero = [(7, 2), (3, 1)], {(7, 2): np.zeros(64), (3, 1): np.zeros(64)}
    found = head_scores(read[0], heads, zero, BLOCK)
    for i, scores in enumerate(found):
        assert np.array_equal(scores[False], scores[True])  # nothing to subtract
        assert scores[False].sum() == pytest.approx(1, abs=1e-5)
        assert int(scores[False].argmax()) + 1 == 2 + 3 * i
    moved = head_scores(read[0], heads, {**zero, (7, 2): np.full(64, 9.0)}, BLOCK)
    assert not np.allclose(moved[0][False], moved[0][True])


def trial(target: int, by_heads: list[int], by_words: list[int]) -> Trial:
    """A passage in block `target` of 40; the blocks that each channel finds, the best first."""

    def scores(found: list[int]) -> np.ndarray:
        out = np.zeros(40)
        out[found] = np.arange(len(found), 0, -1)
        return out

    return Trial("plain", np.arange(40), np.full(20, target), scores(by_words), scores([]), {
        False: scores(by_heads), True: scores(by_heads)
    })  # fmt: skip


def test_a_choice_changes_only_for_a_clear_gain() -> None:
    flat = np.array([0.5, 0.5, 0.5, 0.5])
    assert best_of({"default": flat, "same": flat}) == "default"
    assert best_of({"default": flat, "lucky once": flat + np.array([0, 0, 0, 0.4])}) == "default"
    assert best_of({"default": flat, "better": flat + np.array([0.1, 0.2, 0.1, 0.2])}) == "better"


def test_neighbours_get_a_part_only_where_that_does_no_harm() -> None:
    beside = [trial(i, [i + 1, 38, 36, 34, 32], [i + 1, 38, 36, 34, 32]) for i in (2, 7, 12)]
    assert choose(beside, BLOCK).spread == {"heads": 0.5, "lexical": 0.5}
    apart = [trial(12, [0, 3, 6, 9, 12], [0, 3, 6, 9, 12]) for _ in range(5)]
    assert choose(apart, BLOCK).spread == {"heads": 0.25, "lexical": 0.25}


def test_figures_are_shares_of_the_passages() -> None:
    trials = [trial(3, [3], []), trial(5, [], [5])]
    chosen = choose(trials, BLOCK)
    shown = figures(trials, chosen, BLOCK)
    assert shown["coverage_512_heads"] == shown["coverage_512_lexical"] == 0.5
    assert shown["coverage_512_fused"] == 1.0 and shown["coverage_512_mean_k"] == 0.0
    assert shown["coverage_512_random"] == 0.4
    assert values(trials, {"heads": 1.0}, False, {}, BLOCK).tolist() == [1.0, 0.0]
