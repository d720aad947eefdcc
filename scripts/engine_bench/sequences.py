"""Decode speed with one and with four resident sequences, one and four of them answering."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, open_engine

from .recall import GREEDY, N_QUESTION, question, text_like

N_HISTORY, N_ANSWER = 1500, 64


def _rates(spaces: list[Workspace], n_rounds: int) -> tuple[float, float]:
    """Median tokens/s of one sequence, and of all together, while `spaces` answer at the same time."""
    each, total = [], []
    for i in range(n_rounds + 1):
        forks = [ws.fork() for ws in spaces]
        streams = [f.step(question(i), N_QUESTION - 8, sampling=GREEDY, max_tokens=N_ANSWER) for f in forks]
        rates = []
        for stream in streams:
            result = stream.result()
            rates.append(result.n_generated / result.timings["decode_s"])
        for fork in forks:
            fork.close()
        if i:
            each.append(np.median(rates))
            total.append(sum(rates))
    return float(np.median(each)), float(np.median(total))


def bench(model: str, n_threads: int, n_rounds: int) -> list[str]:
    """Lines of the report; a view of 1,024 tokens per sequence, each with a history of 1,500 tokens."""
    lines = []
    for n_parallel in (1, 4):
        settings = Settings(n_ctx=1024, n_threads=n_threads, n_parallel=2 * n_parallel)  # room for the forks
        with open_engine(Path(model), settings) as engine:
            spaces = [engine.workspace() for _ in range(n_parallel)]
            for i, ws in enumerate(spaces):
                ws.read_tokens(text_like(N_HISTORY, i)).result()
            for n_active in sorted({1, n_parallel}):
                each, total = _rates(spaces[:n_active], n_rounds)
                lines.append(
                    f"{n_parallel} resident, {n_active} answering: "
                    f"{each:6.1f} tokens/s each, {total:6.1f} together"
                )
            for ws in spaces:
                ws.close()
    return lines
