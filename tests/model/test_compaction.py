"""Compaction and text retrieval on the real library."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from tiny_models import write_model

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, open_engine

GREEDY = SamplingParams(temp=0)
TINY = Settings(n_ctx=1024, n_threads=1, exact=True, raw_k_type="f32", n_parallel=2)


def ids(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(32, 127, n).astype(np.int32)


def check_answer(engine, ws: Workspace) -> None:
    """The model answers as if a plain prefill had read the tokens of the view."""
    policy, views = ws._policy, []
    report = policy._report

    def seen(end: int):
        views.append(policy._view_tokens(end))
        return report(end)

    policy._report = seen
    got = ws.step(ids(20, 9), sampling=GREEDY, max_tokens=6).result()
    policy._report = report
    (view,) = views
    assert len(view) <= ws.n_view < ws.n_tokens
    with engine.workspace(policy="full_context") as plain:
        assert plain.step(view, sampling=GREEDY, max_tokens=6).result().tokens == got.tokens


@pytest.mark.parametrize("policy", ["compaction", "compaction_retrieval"])
def test_a_history_of_any_length_is_read_answered_forked_and_truncated(tmp_path, policy):
    model = write_model(tmp_path / "llama.gguf", "llama", quantization=gguf.GGMLQuantizationType.Q4_1)
    with open_engine(model, TINY) as engine, engine.workspace(policy=policy) as ws:
        base = ids(1500, 1)
        ws.read_tokens(base).result()
        assert len(ws._policy._compactions) == 1
        check_answer(engine, ws)
        result = ws.step(ids(30, 2), sampling=GREEDY, max_tokens=300).result()
        assert result.finish_reason in ("stop", "length") and ws.stats().n_resident <= 1024
        with ws.fork() as fork:
            assert np.array_equal(fork.history(), ws.history())
            fork.truncate(1200)
            check_answer(engine, fork)
        ws.truncate(600)
        assert not ws._policy._compactions and np.array_equal(ws.history(), base[:600])
        assert ws.step(ids(10, 3), sampling=GREEDY, max_tokens=3).result().n_read == 0


def test_a_model_without_hooks_can_be_compacted(tmp_path):
    model = write_model(tmp_path / "lfm2.gguf", "lfm2")
    settings = Settings(n_ctx=1024, n_threads=1, policy="compaction", n_parallel=2)
    with open_engine(model, settings) as engine, engine.workspace() as ws:
        assert engine.core.hooks is None
        ws.read_tokens(ids(1100, 1)).result()
        check_answer(engine, ws)


def test_a_fact_that_was_summarized_away_is_found_again(smollm2):
    lines = [f"Day {i}: the ship sailed on, the sea was calm, nothing was seen.\n" for i in range(36)]
    lines[4] = "Day 4: the cook hid the brass key under the third barrel.\n"
    settings = Settings(n_ctx=512, n_threads=2, policy="compaction_retrieval")
    with open_engine(smollm2, settings) as engine, engine.workspace() as ws:
        ws.read("".join(lines), source="log.txt").result()
        result = ws.ask("Where did the cook hide the brass key?", sampling=GREEDY, max_tokens=30).result()
        policy = ws._policy
        assert policy.summary.strip() and "<|im" not in policy.summary
        assert len(policy._now.summary) <= 64
        (report,) = result.recalls
        best = [b.text for b in sorted(report.blocks, key=lambda b: b.rank or 1000)][:3]
        assert "brass key" in "".join(best) and result.text
        assert "third barrel" in "".join(b.text for b in report.blocks if b.why == "selected")
        assert "barrel" in result.text
        assert b"[From earlier]" not in engine.core.model.vocab.detokenize(ws.history())
