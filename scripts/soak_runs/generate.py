"""Reads 40,000 tokens with a view of 2,048, answers with 1,024 tokens and a reserve of 128."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import open_engine

from .common import manual_tokens, say, words


def run(model: Path) -> None:
    settings = Settings(n_ctx=2048, n_threads=2, n_reserve=128)
    with open_engine(model, settings) as engine, engine.workspace() as ws:
        tokens = manual_tokens(engine, 40_000)
        began = time.monotonic()
        ws.read_tokens(tokens).result()
        say(f"read {len(tokens)} tokens in {time.monotonic() - began:.0f} s")
        gaps = 0

        def watch(_: object) -> None:
            nonlocal gaps
            pos, seq = engine.core.hooks.cells()
            visible = np.sort(pos[seq >= 0])
            gaps += not np.array_equal(visible, np.arange(len(visible)))

        stop_watching = engine.observe(watch)
        question = words(engine, "\n\n# Every option of the server, one on each line, with what it does:\n")
        began = time.monotonic()
        result = ws.step(question, 0, sampling=SamplingParams(temp=0.9, seed=1), max_tokens=1024).result()
        stop_watching()
        n_mid = sum(r.mid_answer for r in result.recalls)
        say(
            f"{result.n_generated} tokens in {time.monotonic() - began:.0f} s, "
            f"{n_mid} recalls in mid-answer, finish {result.finish_reason}"
        )
        assert gaps == 0, f"{gaps} batches saw a gap in view positions"
        assert result.finish_reason in ("stop", "length")
        assert result.n_generated < 1024 or n_mid >= 7
