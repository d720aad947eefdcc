"""The step lifecycle on the real library: recall, order of questions, refusals, cancel, several sequences."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_models import write_model

from kvmem_llama.engine.requests import Phase
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import Cancelled, MandatoryTooLarge, ModelUnsupported
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, WorkspaceEngine, open_engine

pytestmark = pytest.mark.usefixtures("checked")
GREEDY = SamplingParams(temp=0)
EXACT = Settings(n_ctx=512, n_threads=2, exact=True, raw_k_type="f32")


def ids(n: int, seed: int, n_vocab: int = 250) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def ask(ws: Workspace, seed: int, n: int = 20, max_tokens: int = 4):
    return ws.step(ids(n, 10_000 + seed), 0, sampling=GREEDY, max_tokens=max_tokens).result()


def selected(result) -> tuple[int, ...]:
    return tuple(b.start for b in result.recalls[0].blocks if b.why == "selected")


@contextmanager
def engine_with_base(
    model: Path, settings: Settings, n_base: int
) -> Iterator[tuple[WorkspaceEngine, Workspace]]:
    with open_engine(model, settings) as engine, engine.workspace() as base:
        base.read_tokens(ids(n_base, 1)).result()
        yield engine, base


# -- the order of questions


@pytest.fixture(scope="module")
def exact_base(tiny):
    with engine_with_base(tiny, EXACT, 3000) as pair:
        yield pair


@pytest.fixture(scope="module")
def asked_first(exact_base) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What every question selects and answers when nothing was asked before."""
    _, base = exact_base
    found = {}
    for question in range(5):
        with base.fork() as fork:
            result = ask(fork, question)
        found[question] = (selected(result), result.tokens)
    return found


@hypothesis_settings(max_examples=12)
@given(order=st.permutations(range(5)))
def test_selection_and_answer_do_not_depend_on_earlier_questions_in_exact_mode(
    exact_base, asked_first, order
):
    _, base = exact_base
    for question in order:
        with base.fork() as fork:
            result = ask(fork, question)
        assert (selected(result), result.tokens) == asked_first[question]


def test_in_normal_mode_the_selection_differs_at_most_around_the_cut(tiny):
    with engine_with_base(tiny, Settings(n_ctx=512, n_threads=2), 3000) as (_, base):
        first = {}
        for question in [*range(4), *range(3, -1, -1)]:
            with base.fork() as fork:
                report = ask(fork, question).recalls[0]
            scores = {b.start: b.score for b in report.blocks if b.why == "selected"}
            before = first.setdefault(question, scores)
            shared = before.keys() & scores.keys()
            assert len(shared) >= 0.95 * len(before)
            cut = min(before.values())
            differing = [before.get(s, scores.get(s)) for s in before.keys() ^ scores.keys()]
            assert all(abs(score - cut) <= 0.01 * cut for score in differing)


# -- the hard set


def test_a_step_that_cannot_fit_is_refused_before_any_decode_call_and_the_next_one_works(tiny):
    settings = Settings(n_ctx=512, n_threads=2, n_reserve=64)
    with engine_with_base(tiny, settings, 1024) as (engine, base):
        calls = []
        stop_watching = engine.observe(calls.append)
        fixed = 32 + 64  # sink and reserve
        with pytest.raises(MandatoryTooLarge) as caught:
            ask(base, 1, n=512 - fixed + 1)
        assert (caught.value.n_needed, caught.value.n_view) == (513, 512)
        assert not calls
        result = ask(base, 1, n=512 - fixed - 32)  # one block of room
        assert result.recalls[0].n_selected <= 1 and result.n_generated == 4
        stop_watching()
        assert ask(base, 2).n_generated == 4


# -- cancel


def cancelled_at(
    engine: WorkspaceEngine, ws: Workspace, tokens: np.ndarray, query_start: int, phase: Phase, nth: int
):
    """Runs a step, cancels it at its n-th batch of a phase -> its result, None if it was cancelled."""
    seen = itertools.count(1)
    started = threading.Event()
    box = []

    def watch(report) -> None:
        started.wait()
        if any(piece.phase is phase for piece in report.pieces) and next(seen) == nth:
            box[0].cancel()

    stop_watching = engine.observe(watch)
    box.append(ws.step(tokens, query_start, sampling=GREEDY, max_tokens=12))
    started.set()
    try:
        return box[0].result()
    except Cancelled:
        return None
    finally:
        stop_watching()


def test_a_cancelled_step_leaves_the_last_committed_one_and_what_it_read_is_not_read_again(tiny):
    rng = random.Random(3)
    with engine_with_base(tiny, EXACT, 1500) as (engine, base):
        with base.fork() as fork:
            want = ask(fork, 0)
        n_cancelled = dict.fromkeys(Phase, 0)
        for point in range(100):
            phase = (Phase.READ, Phase.QUERY, Phase.REPLAY, Phase.DECODE)[point % 4]
            step = np.concatenate(
                [ids(rng.randrange(200, 900), point), ids(rng.randrange(8, 40), 500 + point)]
            )
            query_start = len(step) - rng.randrange(4, 8)
            nth = rng.randrange(1, 8) if phase in (Phase.READ, Phase.DECODE) else 1
            with base.fork() as ws:
                result = cancelled_at(engine, ws, step, query_start, phase, nth)
                if result is None:
                    n_cancelled[phase] += 1
                    assert np.array_equal(ws.history(), base.history())
                    again = ws.step(step, query_start, sampling=GREEDY, max_tokens=1).result()
                    if phase is not Phase.READ:  # everything before the query had been read
                        first_open = (1500 + query_start) // 32 * 32 - 1500
                        assert again.n_reused == first_open and again.n_read == query_start - first_open
                    else:
                        assert again.n_reused + again.n_read == query_start
                    ws.truncate(1500)
                after = ask(ws, 0) if result is None else want
                assert (selected(after), after.tokens) == (selected(want), want.tokens)
        assert all(n >= 15 for n in n_cancelled.values()), n_cancelled


def test_a_neighbour_decodes_the_same_tokens_while_another_step_is_cancelled(tiny):
    settings = Settings(n_ctx=512, n_threads=2, exact=True, raw_k_type="f32", n_parallel=2)
    with open_engine(tiny, settings) as engine:
        alone = engine.workspace()
        alone.read_tokens(ids(700, 2)).result()
        fork = alone.fork()
        want = ask(alone, 5, max_tokens=60).tokens
        other = engine.workspace()
        for phase in (Phase.READ, Phase.QUERY, Phase.DECODE):
            with fork.fork() as neighbour:
                stream = neighbour.step(ids(20, 10_005), 0, sampling=GREEDY, max_tokens=60)
                assert cancelled_at(engine, other, ids(600, 9), 580, phase, 1) is None
                assert stream.result().tokens == want
        for ws in (alone, fork, other):
            ws.close()


# -- several sequences


def test_four_workspaces_share_two_sequences_and_answer_as_if_alone(tiny):
    alone = {}
    with open_engine(tiny, EXACT) as engine:
        for i in range(4):
            with engine.workspace() as ws:
                ws.read_tokens(ids(600 + 50 * i, i)).result()
                alone[i] = [ask(ws, q, max_tokens=10).tokens for q in range(2)]
    settings = Settings(n_ctx=512, n_threads=2, exact=True, raw_k_type="f32", n_parallel=2)
    with open_engine(tiny, settings) as engine:
        spaces = [engine.workspace() for _ in range(4)]
        for i, stream in enumerate([ws.read_tokens(ids(600 + 50 * i, i)) for i, ws in enumerate(spaces)]):
            assert stream.result().n_read == 600 + 50 * i
        for q in range(2):
            streams = [ws.step(ids(20, 10_000 + q), 0, sampling=GREEDY, max_tokens=10) for ws in spaces]
            assert [s.result().tokens for s in streams] == [alone[i][q] for i in range(4)]
        for ws in spaces:
            ws.close()


# -- restored = never evicted, and generation without end


def test_a_history_whose_cells_were_given_up_answers_the_same_in_exact_mode(tiny):
    with engine_with_base(tiny, EXACT, 900) as (engine, base):
        with base.fork() as fork:
            want = ask(fork, 3, max_tokens=30)
        engine.release(base._policy)
        with base.fork() as fork:
            engine.release(fork._policy)
            got = ask(fork, 3, max_tokens=30)
        assert (selected(got), got.tokens) == (selected(want), want.tokens)


@pytest.mark.parametrize("mode", ["auto", "compact", "original"])
@pytest.mark.parametrize("n_recent", [0, 64])
def test_an_answer_goes_on_past_the_view_at_positions_of_either_kind(tiny, mode, n_recent):
    settings = Settings(n_ctx=256, n_threads=1, position_mode=mode, n_recent=n_recent)
    with engine_with_base(tiny, settings, 640) as (_, base):
        n_mid_answer = 0
        for question in range(6):  # random weights end an answer at random
            with base.fork() as fork:
                result = ask(fork, question, n=32, max_tokens=200)
            assert result.n_generated == 200 or result.finish_reason == "stop"
            n_mid_answer += sum(r.mid_answer for r in result.recalls)
        assert n_mid_answer >= 6
        base.pin(100, 170)
        assert ask(base, 2, n=32, max_tokens=40).n_generated > 0


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_generation_goes_on_for_many_times_the_reserve(smollm2, cache):
    """Reads 6,000 tokens with a view of 512, answers with 1,024 tokens and a reserve of 64."""
    n_read, n_answer = (6000, 1024) if cache == "f16" else (1500, 200)
    settings = Settings(n_ctx=512, n_threads=2, n_reserve=64, cache_type_k=cache, cache_type_v=cache)
    with open_engine(smollm2, settings) as engine, engine.workspace() as ws:
        vocab = engine.core.model.vocab
        tokens = vocab.tokenize(
            Path(__file__).read_text(encoding="utf-8") * 3, add_bos=True, parse_special=False
        )[:n_read]
        ws.read_tokens(tokens).result()
        positions = []

        def watch(report) -> None:
            pos, seq = engine.core.hooks.cells()
            positions.append(np.sort(pos[seq >= 0]))

        stop_watching = engine.observe(watch)
        question = vocab.tokenize(
            "\n\n# A long list of all test names, one on each line:\n", add_bos=False, parse_special=False
        )
        result = ws.step(question, 0, sampling=SamplingParams(temp=0.9, seed=4), max_tokens=n_answer).result()
        stop_watching()
        assert result.finish_reason in ("stop", "length")
        if result.finish_reason == "length":
            assert result.n_generated == n_answer
        mid_answer = [r for r in result.recalls if r.mid_answer]
        assert len(mid_answer) >= min(result.n_generated // 128 - 1, 7)
        assert ws.n_tokens == len(tokens) + len(question) + result.n_generated
        original = n_read + n_answer <= engine.core.model.n_ctx_train
        for at in positions:  # view positions have no gap, or are token positions while the window allows it
            assert len(at) <= 512 and len(set(at.tolist())) == len(at)
            assert original or np.array_equal(at, np.arange(len(at)))


def test_a_model_with_recurrent_layers_slides_as_its_refusal_says(tmp_path):
    model = write_model(tmp_path / "lfm2.gguf", "lfm2")
    with pytest.raises(ModelUnsupported, match=r"lfm2.*full_context.*sliding_window"):
        open_engine(model, Settings(n_ctx=256, n_threads=1))
    settings = Settings(n_ctx=256, n_threads=1, policy="sliding_window")
    with open_engine(model, settings) as engine, engine.workspace() as ws:
        result = ws.step(ids(400, 1), 0, sampling=SamplingParams(temp=0), max_tokens=8).result()
        assert result.n_read + result.n_query == 400


def test_a_model_with_recurrent_layers_keeps_a_right_history_without_hooks(tmp_path):
    model = write_model(tmp_path / "lfm2.gguf", "lfm2")
    sampling = SamplingParams(temp=1.5, seed=5, top_k=0, top_p=1, min_p=0)

    def answer(ws: Workspace) -> tuple[int, ...]:
        return ws.step(ids(20, 8), 0, sampling=sampling, max_tokens=12).result().tokens

    with open_engine(model, Settings(n_ctx=512, n_threads=1, policy="full_context", n_parallel=2)) as engine:
        with engine.workspace() as ws:
            ws.read_tokens(ids(150, 1)).result()
            want = answer(ws)
        with engine.workspace() as ws:
            ws.read_tokens(ids(150, 1)).result()
            with ws.fork() as fork:
                assert answer(fork) == want
            ws.read_tokens(ids(40, 2)).result()
            ws.truncate(150)
            assert answer(ws) == want
