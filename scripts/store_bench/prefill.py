"""Reading a text into a durable workspace with stage-out at once, or only when it is committed, or into RAM.

As a program it is one side: prefill.py MODEL ram|on|off FOLDER N_TOKENS N_THREADS
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from engine_bench.pairs import paired_ratio
from engine_bench.recall import text_like

from .rounds import environment

SIDES = {"ram": "in RAM", "on": "durable, stage-out on", "off": "durable, stage-out off"}
N_VIEW = 2048


class Side:
    """A process of its own, idle while another one runs a round."""

    def __init__(self, model: str, kind: str, folder: Path, n_tokens: int, n_threads: int) -> None:
        given = [model, kind, str(folder / kind), str(n_tokens), str(n_threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "store_bench.prefill", *given],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def round(self) -> tuple[float, float]:
        """(seconds until the last token is evaluated, seconds until the read is acknowledged)"""
        assert self._process.stdin is not None
        print("round", file=self._process.stdin, flush=True)
        evaluated, acknowledged = self._read()
        return evaluated, acknowledged

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a benchmark process ended early with status {self._process.wait()}")
        return [float(x) for x in json.loads(line)]


def bench(model: str, folder: Path, n_tokens: int, n_threads: int, n_pairs: int) -> list[str]:
    """Lines of the report."""
    sides = {kind: Side(model, kind, folder, n_tokens, n_threads) for kind in SIDES}
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in SIDES}
    kinds = list(SIDES)
    for i in range(n_pairs + 1):
        for kind in kinds[i % 3 :] + kinds[: i % 3]:
            took = sides[kind].round()
            if i:
                times[kind].append(took)
        print(f"\rprefill: round {i}/{n_pairs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for side in sides.values():
        side.close()
    lines = [
        f"  {SIDES[kind]:24} {n_tokens / np.median(took, axis=0)[0]:6.0f} tokens/s evaluated, "
        f"{n_tokens / np.median(took, axis=0)[1]:6.0f} tokens/s acknowledged"
        for kind, took in times.items()
    ]
    for which, what in ((0, "evaluated"), (1, "acknowledged")):
        for fast, slow in (("off", "on"), ("ram", "on"), ("ram", "off")):
            ratio = paired_ratio([t[which] for t in times[fast]], [t[which] for t in times[slow]])
            lines.append(f"  {what}: speed of {SIDES[slow]} / {SIDES[fast]}: {ratio}")
    return lines


# -- the process of one side


def reader(model: str, kind: str, folder: Path, n_tokens: int, n_threads: int) -> Callable[[], list[float]]:
    from kvmem_llama.settings import Settings
    from kvmem_llama.store.deleting import delete_workspace
    from kvmem_llama.workspace import open_engine

    options = {} if kind != "off" else {"stage_out": False}
    # the whole read is one commit: with stage-out off nothing is written before
    settings = Settings(
        n_ctx=N_VIEW, n_threads=n_threads, data_dir=str(folder), commit_blocks=n_tokens, **options
    )
    engine = open_engine(Path(model), settings)
    tokens = text_like(n_tokens, 5)

    def read() -> list[float]:
        name = None if kind == "ram" else "prefill"
        with engine.workspace(name) as ws:
            began = time.perf_counter()
            evaluated = 0.0
            stream = ws.read_tokens(tokens)
            for event in stream:
                if getattr(event, "done", 0) == getattr(event, "total", -1):
                    evaluated = time.perf_counter() - began
            stream.result()
            acknowledged = time.perf_counter() - began
        if name is not None:
            delete_workspace(engine.shelf.root, engine.shelf.root.find(name))
        return [evaluated, acknowledged]

    return read


if __name__ == "__main__":
    given = sys.argv[1:]
    read = reader(given[0], given[1], Path(given[2]), int(given[3]), int(given[4]))
    print("[]", flush=True)
    for _ in sys.stdin:
        print(json.dumps(read()), flush=True)
