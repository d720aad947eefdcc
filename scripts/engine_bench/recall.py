"""What a recall costs against reading the selected text again, and with each of its savings turned off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.memory.report import RecallReport, StepResult
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, open_engine

from .pairs import paired_ratio

GREEDY = SamplingParams(temp=0)
N_QUESTION = 64
N_SHORT, N_REPEATED = 8, 4


def text_like(n: int, seed: int) -> np.ndarray:
    """Token ids in runs that repeat, so that blocks differ from each other like passages of a text do."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1000, 40000, (max(n // 256, 1), 24))
    return np.concatenate([rng.choice(row, 256) for row in words])[:n].astype(np.int32)


def question(i: int) -> np.ndarray:
    return text_like(N_QUESTION, 1000 + i)


@contextmanager
def history(model: str, settings: Settings, n_tokens: int) -> Iterator[tuple[Workspace, float]]:
    """A workspace that has read `n_tokens` tokens, and the seconds it took."""
    with open_engine(Path(model), settings) as engine, engine.workspace() as ws:
        began = time.perf_counter()
        ws.read_tokens(text_like(n_tokens, 5)).result()
        yield ws, time.perf_counter() - began


def ask(ws: Workspace, i: int) -> tuple[StepResult, RecallReport]:
    """One question in a fork, one token of answer."""
    with ws.fork() as fork:
        result = fork.step(question(i), 0, sampling=GREEDY, max_tokens=1).result()
    return result, result.recalls[0]


def against_reading(model: str, settings: Settings, n_history: int, n_rounds: int) -> list[str]:
    """Recall (score, select, apply, replay of 64 tokens) against prefilling the selected text."""
    lines = []
    with history(model, settings, n_history) as (ws, read_s):
        recalls, rereads, parts = [], [], []
        for i in range(n_rounds + 1):
            _, report = ask(ws, i)
            n_selected = sum(b.count for b in report.blocks if b.why == "selected")
            with ws.fork() as empty:
                empty.truncate(0)
                began = time.perf_counter()
                empty.read_tokens(text_like(n_selected + N_QUESTION, 77)).result()
                seconds = time.perf_counter() - began
            if i:
                recalls.append(report.timings.total_s)
                rereads.append(seconds)
                t = report.timings
                parts.append((t.score_s, t.select_s, t.apply_s, t.replay_s))
        names = ("score", "select", "apply", "replay")
        medians = ", ".join(
            f"{n} {1e3 * m:.1f} ms" for n, m in zip(names, np.median(parts, axis=0), strict=True)
        )
        lines.append(
            f"history {n_history} tokens, view {settings.n_ctx}, "
            f"{n_selected} tokens selected, read in {read_s:.0f} s"
        )
        lines.append(f"recall  median {1e3 * np.median(recalls):.1f} ms ({medians})")
        lines.append(f"reading the selected text again / recall: {paired_ratio(rereads, recalls)}")
        lines.append(f"reading the whole history again / recall: {read_s / np.median(recalls):.0f}")
    return lines


ABLATIONS = {
    "as shipped": {},
    "reuse off": {"reuse_resident": False},
    "packing off": {"packing": False},
    "shortcut off": {"replay_shortcut": False},
}


def ablations(model: str, settings: Settings, n_history: int, n_rounds: int) -> Iterator[str]:
    """Each saving off in turn, with the working set of the step before as the first pass.

    Every question is asked twice, so that the second recall finds its blocks resident; then comes a short
    one, asked over and over: where it does not complete a block, the view stays as it is and the replay can
    be left out.
    """
    for name, off in ABLATIONS.items():
        with history(model, replace(settings, first_pass="current", **off), n_history) as (ws, _):
            asked, repeated = [], []
            for i in range(n_rounds):
                asked += [_recall(ws, question(i)) for _ in range(2)]
                short = question(i)[:N_SHORT]
                repeated += [_recall(ws, short) for _ in range(1 + N_REPEATED)][1:]
            apply_ms = 1e3 * np.median([report.timings.apply_s for report in asked])
            unchanged = [report for report in repeated if report.noop]
            yield (
                f"{name:14} apply {apply_ms:6.2f} ms   recall of a question {_median_ms(asked):6.1f} ms   "
                f"of a short one repeated, where its view was unchanged "
                f"({len(unchanged)} of {len(repeated)} times) {_median_ms(unchanged):6.1f} ms"
            )


def _recall(ws: Workspace, tokens: np.ndarray) -> RecallReport:
    return ws.step(tokens, 0, sampling=GREEDY, max_tokens=1).result().recalls[0]


def _median_ms(reports: list[RecallReport]) -> float:
    return 1e3 * float(np.median([report.timings.total_s for report in reports] or [np.nan]))
