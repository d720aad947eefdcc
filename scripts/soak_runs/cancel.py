"""100 steps cancelled at random points; the history answers as before after each (exact mode)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from kvmem_llama.errors import Cancelled
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import open_engine

from .common import GREEDY, manual_tokens, say, words


def run(model: Path) -> None:
    rng = random.Random(11)
    with (
        open_engine(model, Settings(n_ctx=512, n_threads=2, exact=True)) as engine,
        engine.workspace() as base,
    ):
        tokens = manual_tokens(engine, 4000)
        base.read_tokens(tokens[:1500]).result()
        probe = words(engine, "\nWhich flag sets the number of threads?\n")
        with base.fork() as fork:
            want = fork.step(probe, 0, sampling=GREEDY, max_tokens=8).result()
        n_cancelled = {}
        for point in range(100):
            at = rng.randrange(1, 40)  # batches after the start
            start = rng.randrange(1500, 3000)
            step = np.concatenate([tokens[start : start + rng.randrange(50, 700)], probe])
            with base.fork() as ws:
                stream = ws.step(step, len(step) - len(probe), sampling=GREEDY, max_tokens=40)
                n = 0

                def watch(report, stream=stream, at=at) -> None:
                    nonlocal n
                    n += 1
                    if n == at:
                        n_cancelled.setdefault(report.pieces[0].phase.value, []).append(at)
                        stream.cancel()

                stop_watching = engine.observe(watch)
                try:
                    stream.result()
                except Cancelled:
                    assert np.array_equal(ws.history(), base.history())
                    got = ws.step(probe, 0, sampling=GREEDY, max_tokens=8).result()
                    assert got.tokens == want.tokens
                stop_watching()
            if point % 10 == 9:
                phases = ", ".join(f"{phase}: {len(at)}" for phase, at in n_cancelled.items())
                say(f"{point + 1} points; cancelled in {phases}")
