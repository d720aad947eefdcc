"""200 steps on one workspace: memory of the process stays flat."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvmem_llama.settings import Settings
from kvmem_llama.workspace import open_engine

from .common import GREEDY, manual_tokens, rss_mib, say, words


def run(model: Path) -> None:
    with open_engine(model, Settings(n_ctx=512, n_threads=2)) as engine, engine.workspace() as ws:
        ws.read_tokens(manual_tokens(engine, 3000)).result()
        probe = words(engine, "\nWhich flag sets the number of threads?\n")
        rss, tokens = [], []
        for i in range(200):
            with ws.fork() as fork:
                fork.step(probe, 0, sampling=GREEDY, max_tokens=8).result()
            rss.append(rss_mib())
            tokens.append(ws.n_tokens)
            if i % 50 == 49:
                say(f"{i + 1} steps, {rss[-1]:.0f} MiB")
        assert np.median(rss[-20:]) <= 1.02 * np.median(rss[20:40]), (rss[20:40], rss[-20:])
