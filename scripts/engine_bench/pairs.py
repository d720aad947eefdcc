"""Alternating timed rounds of two processes, one idle while the other runs, and the ratio of their times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]


class Worker:
    """A process that runs one timed round per line it reads: {"round": ...} -> {"seconds": ...}."""

    def __init__(self, args: Sequence[str], library: Path | None) -> None:
        env = dict(os.environ)
        if library is not None:
            env["LLAMA_CPP_LIB_PATH"] = str(library)
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), *args]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._read()

    def round(self, kind: str) -> float:
        """Seconds of one round."""
        assert self._process.stdin is not None
        print(json.dumps({"round": kind}), file=self._process.stdin, flush=True)
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a benchmark process ended early with status {self._process.wait()}")
        return json.loads(line)


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios with a 95% bootstrap interval."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.n} pairs"


def paired_ratio(a: Sequence[float], b: Sequence[float], seed: int = 0) -> Ratio:
    """a[i] / b[i] of rounds that ran next to each other."""
    ratios = np.asarray(a) / np.asarray(b)
    picks = np.random.default_rng(seed).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), [0.025, 0.975])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def alternate(first: Worker, second: Worker, kind: str, n_pairs: int) -> tuple[list[float], list[float]]:
    """Rounds of both in turn; who goes first alternates too. One round of each is not counted."""
    first.round(kind), second.round(kind)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(n_pairs):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            times[which].append((first, second)[which].round(kind))
        print(f"\r{kind}: pair {i + 1}/{n_pairs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times
