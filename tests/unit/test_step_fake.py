"""Whole steps on the fake model. Every decode call checks that each visible cell holds the right token at
the right view position (fake_model.check_before_decode), every finished step that the books agree."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import fake_model
import numpy as np
import pytest
from fake_run import BASE, Run, asked, checked_sessions, records, request, same, text, truncate
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmem_llama.engine.grammar import AnswerGrammar
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InvalidOption, MandatoryTooLarge

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions

# -- reading and asking


def test_a_history_that_fits_the_view_is_the_identity() -> None:
    run = Run()
    session = run.session()
    result = run.step(session, request(text(100), 20))
    assert result.finish_reason == "length" and result.n_generated == 20 and not result.recalls
    assert [p for b in run.model.batches for _, p, _ in b] == list(range(120))
    assert not run.model.writes and session.history.n_committed == 120


@pytest.mark.parametrize("mode", ["compact", "original"])
@pytest.mark.parametrize("block_size", [1, 7, 32, 64])
def test_a_long_history_is_read_asked_and_answered(block_size: int, mode: str) -> None:
    run, session = asked(block_size=block_size, position_mode=mode, n_recent=0)
    result = run.step(session, request(text(20, 1), 40))
    report = result.recalls[0]
    assert report.n_selected > 0 and not report.mid_answer
    starts = [b.start for b in report.blocks]
    assert starts == sorted(starts)
    positions = [b.position for b in report.blocks]
    packed = np.cumsum([0, *(b.count for b in report.blocks)])[:-1].tolist()
    assert positions == (packed if mode == "compact" else starts)
    assert result.n_read == 0 and result.n_query == 20 and result.n_generated == 40


@pytest.mark.parametrize("exact", [False, True])
def test_views_of_four_blocks_work(exact: bool) -> None:
    run, session = asked(400, n_ctx=32, exact=exact)
    result = run.step(session, request(text(8, 1), 200))
    assert result.finish_reason == "length" and result.n_generated == 200


def test_an_empty_read_and_one_token_inputs_work() -> None:
    run = Run()
    session = run.session()
    assert run.read(session, text(0)).n_read == 0
    run.read(session, text(1))
    result = run.step(session, request([20], 1))
    assert result.n_generated == 1 and session.history.n_committed == 3


def test_an_answer_of_many_views_is_never_cut() -> None:
    run, session = asked()
    result = run.step(session, request(text(20, 1), 3000))
    assert result.n_generated == 3000 and result.finish_reason == "length"
    mid = [r for r in result.recalls if r.mid_answer]
    assert 3000 // session.budget.n_view <= len(mid) <= 3000 // session.budget.n_reserve
    for report in mid:
        whys = {b.why for b in report.blocks}
        assert {"sink", "query", "recent", "selected"} == whys
        assert report.n_view + session.budget.n_reserve <= session.budget.n_view


def test_recalls_in_mid_answer_are_at_least_a_reserve_apart() -> None:
    run, session = asked()
    result = run.step(session, request(text(20, 1), 1000))
    views = [r.n_view for r in result.recalls]
    assert all(session.budget.n_view - n >= session.budget.n_reserve for n in views)


def test_the_rows_of_the_replay_are_the_record_not_those_of_the_first_pass() -> None:
    run, session = asked()
    run.step(session, request(text(20, 1), 0))
    replayed = [f for tokens, f in records(run, session) for f in f][BASE:]
    twin, other = asked(replay_shortcut=False)
    twin.step(other, request(text(20, 1), 0))
    assert replayed == [f for tokens, f in records(twin, other) for f in f][BASE:]
    # Rows that are in cells at the end are those in the records.
    for resident in session.view:
        record = session.history.rows(resident.part.start)
        prints = run.model.k[0, resident.cells, 7].astype(int).tolist()
        assert prints == run.model.fingerprints_of(record, resident.part.count)


@settings(max_examples=15)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 40))
def test_nothing_depends_on_the_size_of_batches(ubatch: int, other_ubatch: int, more: int) -> None:
    results = []
    for n_ubatch in (ubatch, other_ubatch):
        run, session = asked(700 + more, n_ubatch=n_ubatch)
        results.append((run.step(session, request(text(20, 1), 30)), records(run, session)))
    assert same(results[0][0], results[1][0]) and results[0][1] == results[1][1]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_nothing_depends_on_how_a_text_was_split_into_reads(pieces: list[int]) -> None:
    tokens = text(sum(pieces), 3)
    run, session = Run(), None
    session = run.session()
    at = 0
    for n in pieces:
        run.read(session, tokens[at : at + n])
        at += n
    whole = Run()
    other = whole.session()
    whole.read(other, tokens)
    assert records(run, session) == records(whole, other)


def test_room_is_made_at_the_view_size_and_then_at_multiples_of_a_quarter() -> None:
    run = Run(n_ubatch=13)
    session = run.session()
    made: list[int] = []
    go_to = session.go_to

    def spy(target: Any, *, rebuild: bool) -> None:
        if not session.view.plan(target, rebuild=rebuild).is_noop:
            made.append(int(session.view.end))
        go_to(target, rebuild=rebuild)

    session.go_to = spy  # type: ignore[method-assign]
    run.read(session, text(600))
    assert made == [256, 320, 384, 448, 512, 576]


# -- the hard set


def test_a_hard_set_that_is_too_large_is_refused_before_anything_is_evaluated() -> None:
    run, session = asked(n_reserve=32)
    calls = run.model.n_calls
    # sink 8, query, 4 tokens of the open block, reserve 32
    with pytest.raises(MandatoryTooLarge) as raised:
        run.step(session, request(text(256 - 8 - 32 - 4 + 1), 0))
    assert (raised.value.n_needed, raised.value.n_view) == (257, 256)
    assert run.model.n_calls == calls and session.history.n_committed == BASE
    result = run.step(session, request(text(256 - 8 - 32 - 4), 100))
    assert result.n_generated == 100 and result.recalls[0].n_selected == 0


def test_a_view_one_block_above_the_hard_set_works() -> None:
    run, session = asked(n_reserve=32)
    result = run.step(session, request(text(256 - 8 - 32 - 4 - 8), 300))
    assert result.n_generated == 300


def test_recent_shrinks_before_a_step_is_refused() -> None:
    run, session = asked(n_reserve=32, n_recent=128)
    result = run.step(session, request(text(150), 10))
    n_recent = sum(b.count for b in result.recalls[0].blocks if b.why == "recent")
    assert 0 < n_recent < 128


def test_zero_budget_selects_zero_blocks() -> None:
    run, session = asked(n_reserve=32, n_recent=200)
    report = run.step(session, request(text(10), 5)).recalls[0]
    assert report.n_selected == 0 and report.n_candidates > 0
    assert all(b.why != "selected" and b.score is None for b in report.blocks)


def test_only_the_newest_text_tokens_of_a_long_step_are_its_query() -> None:
    run, session = asked(n_query=24)
    result = run.step(session, request(text(700, 2), 5))
    assert result.n_query == 24 and result.n_read == 676
    run, session = asked(n_query=24, query_tokens="all")
    assert run.step(session, request(text(100, 2), 5)).n_query == 100


# -- no-op, ablations


def test_a_recall_that_changes_nothing_skips_the_replay() -> None:
    # Recent is what the canonical view keeps, and nothing more has room.
    options = {"n_recent": 184, "n_reserve": 48}
    run, session = asked(256, **options)
    n = run.model.n_calls
    result = run.step(session, request(text(16, 1), 0))
    report = result.recalls[0]
    assert report.noop and report.timings.replay_s < 1 and run.model.n_calls == n + 1
    assert all(b.resident for b in report.blocks if b.start < 256)
    twin, other = asked(256, replay_shortcut=False, **options)
    n = twin.model.n_calls
    again = twin.step(other, request(text(16, 1), 0))
    assert twin.model.n_calls == n + 2 and again.recalls[0].noop
    assert records(run, session) == records(twin, other)


@pytest.mark.parametrize("off", ["reuse_resident", "packing", "replay_shortcut"])
def test_an_ablation_changes_the_work_but_not_the_answer(off: str) -> None:
    run, session = asked()
    twin, other = asked(**{off: False})
    for seed in range(3):
        req = request(text(20, seed), 100)
        assert same(run.step(session, req), twin.step(other, req))
    if off == "reuse_resident":
        assert twin.model.n_moved == twin.model.n_shown == 0 < run.model.n_shown
        assert sum(twin.model.writes) > sum(run.model.writes)
    if off == "packing":
        assert len(twin.model.writes) > len(run.model.writes) and max(twin.model.writes) <= 8


# -- independence of earlier questions


@settings(max_examples=10)
@given(st.lists(st.integers(1, 50), max_size=3), st.booleans())
def test_selection_does_not_depend_on_earlier_questions(earlier: list[int], exact: bool) -> None:
    run, base = asked(700, exact=exact)
    base.evict()
    question = request(text(20, 99), 10)
    for seed in earlier:
        fork = run.adopt(base.fork(), 0)
        run.step(fork, request(text(10 + seed, seed), 30))
        fork.evict()
    fork = run.adopt(base.fork(), 0)
    alone = run.step(fork, question)
    fork.evict()
    twin, other = asked(700, exact=exact)
    assert same(twin.step(other, question), alone)


@settings(max_examples=8)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=3))
def test_a_question_asked_and_truncated_leaves_no_trace(earlier: list[int]) -> None:
    run, session = asked(700)
    for seed in earlier:
        run.step(session, request(text(10 + seed, seed), 30))
        truncate(session, 700)
    twin, other = asked(700)
    assert same(run.step(session, request(text(20, 99), 50)), twin.step(other, request(text(20, 99), 50)))


# -- positions


def test_positions_are_packed_once_the_history_outgrows_the_trained_window() -> None:
    run, session = asked(400, n_train=700)
    report = run.step(session, request(text(20, 1), 10)).recalls[0]
    assert all(b.position == b.start for b in report.blocks)
    run.read(session, text(400, 2))
    report = run.step(session, request(text(20, 1), 10)).recalls[0]
    assert [b.position for b in report.blocks] == list(range(0, len(report.blocks) * 8, 8))


def test_an_answer_goes_on_past_the_trained_window() -> None:
    run, session = asked(400, n_train=500, n_reserve=64)
    result = run.step(session, request(text(20, 1), 500))
    kinds = [all(b.position == b.start for b in r.blocks) for r in result.recalls]
    assert result.n_generated == 500 and kinds[0] and not kinds[-1]


def test_original_positions_are_refused_beyond_the_trained_window() -> None:
    run, session = asked(400, n_train=500, position_mode="original")
    calls = run.model.n_calls
    with pytest.raises(InvalidOption, match="trained"):
        run.step(session, request(text(90, 1), 10))
    with pytest.raises(InvalidOption, match="trained"):
        run.read(session, text(101, 1))
    assert run.model.n_calls == calls
    result = run.step(session, request(text(20, 1), 300))
    assert result.n_generated == 80 and session.history.n_committed == 500


@pytest.mark.parametrize("first_pass", ["canonical", "current"])
@pytest.mark.parametrize("n_train", [500, 693, 700, 704])
def test_original_positions_are_never_packed_and_the_answer_ends_with_the_window(
    n_train: int, first_pass: str
) -> None:
    run, session = asked(400, n_train=n_train, position_mode="original", first_pass=first_pass)
    result = run.step(session, request(text(20, 1), 500))
    assert result.finish_reason == "length" and session.history.n_committed == n_train
    assert all(b.position == b.start for r in result.recalls for b in r.blocks)
    assert all(p < n_train for batch in run.model.batches for _, p, _ in batch)
    assert session.view.original


# -- what stays in cells


def test_a_step_after_another_finds_blocks_in_slack_and_moves_others() -> None:
    run, session = asked(position_mode="compact")
    for seed in range(4):
        run.step(session, request(text(20, seed), 60))
    assert run.model.n_shown > 0 and run.model.n_moved > 0


@pytest.mark.parametrize("options", [{"cache_type_k": "q8_0"}, {"exact": True}, {"max_moves": 0}])
def test_quantized_and_exact_caches_are_never_moved_in_place(options: dict[str, Any]) -> None:
    run, session = asked(position_mode="compact", **options)
    twin, other = asked(position_mode="compact")
    req = request(text(20, 1), 400)
    assert same(run.step(session, req), twin.step(other, req))
    assert run.model.n_moved == 0 < twin.model.n_moved


# -- other ways to read


def test_the_view_while_reading_can_be_smaller() -> None:
    run, session = asked(n_prefill_view=64)
    widest = max(position for batch in run.model.batches for _, position, _ in batch)
    assert run.settings.position_mode == "auto" and session.view.n_tokens <= 64 and widest == BASE - 1
    assert run.step(session, request(text(20, 1), 300)).n_generated == 300
    run, session = asked(200, n_prefill_view=64)
    report = run.step(session, request(text(10, 1), 5)).recalls[0]
    assert report.n_selected == report.n_candidates, "all of it fits the view of the answer"


def test_a_view_that_cannot_be_read_over_is_refused_before_anything_is_evaluated() -> None:
    run = Run(n_prefill_view=24)
    session = run.session()
    run.read(session, text(100))
    session.history.pins = [(40, 57)]
    calls = run.model.n_calls
    with pytest.raises(MandatoryTooLarge, match="n-prefill-view"):
        run.read(session, text(10))
    assert run.model.n_calls == calls
    with pytest.raises(InvalidOption, match="n-prefill-view"):
        Run(n_prefill_view=15).session()


def test_the_first_pass_may_go_over_the_view_of_the_step_before() -> None:
    run, session = asked(first_pass="current")
    twin, other = asked()
    for seed in range(4):
        req = request([*text(30, seed), *text(20, seed)], 100, query_start=30)
        assert run.step(session, req).n_generated == twin.step(other, req).n_generated == 100
    assert sum(run.model.writes) < sum(twin.model.writes)


def test_a_long_answer_and_a_long_text_follow_with_the_first_pass_over_the_current_view() -> None:
    run, session = asked(first_pass="current", n_train=2000)
    run.step(session, request(text(180, 1), 600))
    run.read(session, text(900, 3))
    session.evict()
    assert run.step(session, request(text(100, 1), 300)).n_generated == 300


def test_a_subset_of_layers_can_be_scored() -> None:
    run, session = asked(layers_scored="2")
    report = run.step(session, request(text(20, 1), 5)).recalls[0]
    assert report.n_selected > 0
    with pytest.raises(InvalidOption):
        asked(layers_scored="1")  # a sliding-window layer


def test_a_token_that_was_asked_for_is_found() -> None:
    """The block whose keys resemble the query's is selected, wherever it lies."""
    run = Run()
    session = run.session()
    tokens = text(BASE)
    tokens[tokens == 77] = 78
    tokens[400:408] = 77
    run.read(session, tokens)
    report = run.step(session, request([77] * 4, 5)).recalls[0]
    best = next(b for b in report.blocks if b.rank == 1)
    assert best.start == 400 and best.why == "selected" and not best.resident
    assert best.text == fake_model.FakeVocab().detokenize(tokens[400:408]).decode()


@pytest.mark.parametrize("length", [10, 5000])
def test_of_a_long_grammar_only_the_hash_is_stored(length: int) -> None:
    run, session = asked(100)
    stored: list[str] = []
    commit = session.history.commit
    session.history.commit = lambda facts: (stored.append(facts.options), commit(facts))[1]  # type: ignore[method-assign]
    grammar = AnswerGrammar(f'root ::= "{"x" * length}"', lazy=True)
    asked_for = dataclasses.replace(request(text(20, 1), 2), sampling=SamplingParams(temp=0, grammar=grammar))
    run.step(session, asked_for)
    found = json.loads(stored[0])["sampling"]["grammar"]
    if length < 100:
        assert found["grammar"] == grammar.grammar and found["lazy"]
    else:
        assert found["n_characters"] == len(grammar.grammar) and len(stored[0]) < 2000
