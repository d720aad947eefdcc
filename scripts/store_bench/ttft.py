"""The first question after opening: time to the first token, every block on disk against all in the host."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from engine_bench.pairs import paired_ratio
from engine_bench.recall import GREEDY, question, text_like

from kvmem_llama.memory.report import StepResult, TextPiece
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, WorkspaceEngine, open_engine

from .rounds import drop_page_cache

NAME = "ttft"


def bench(model: str, folder: Path, settings: Settings, n_history: int, n_pairs: int) -> list[str]:
    """Lines of the report. Both sides open the same workspace, ask the same question with empty cells, and
    undo it; who goes first alternates. One pair is not counted."""
    settings = replace(settings, data_dir=str(folder))
    with open_engine(Path(model), settings) as engine, engine.workspace(NAME) as ws:
        began = time.perf_counter()
        ws.read_tokens(text_like(n_history, 5)).result()
        read_s = time.perf_counter() - began
        stats = ws.stats()
        record = stats.store_bytes // max(stats.tiers.n_host, 1) if stats.tiers else 0
    n_host = (n_history // settings.block_size + 64) * record
    seconds: dict[str, list[float]] = {"disk": [], "host": []}
    n_read: dict[str, list[int]] = {"disk": [], "host": []}
    recall_s: dict[str, list[float]] = {"disk": [], "host": []}
    with open_engine(Path(model), replace(settings, host_budget=2 * n_host)) as engine:
        for i in range(n_pairs + 1):
            found = {}
            for side in ("disk", "host") if i % 2 == 0 else ("host", "disk"):
                first_s, result, n = _ask(engine, folder, side, i)
                found[side] = [(b.start, b.why, b.position) for b in result.recalls[0].blocks]
                if i:
                    seconds[side].append(first_s)
                    n_read[side].append(n)
                    recall_s[side].append(result.recalls[0].timings.apply_s)
            assert found["disk"] == found["host"], "the tier of a block changed the selection"
            print(f"\rttft: pair {i}/{n_pairs}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    lines = [
        f"  history of {n_history} tokens read in {read_s:.0f} s, view {settings.n_ctx}, "
        f"{int(np.median(n_read['disk']))} of its records read from disk for the first token"
    ]
    names = {"disk": "all blocks on disk, page cache dropped", "host": "all blocks in the host"}
    for side, what in names.items():
        lines.append(
            f"  {what:40} {1e3 * np.median(seconds[side]):7.0f} ms to the first token, "
            f"of which applying the recall {1e3 * np.median(recall_s[side]):.0f} ms"
        )
    lines.append(f"  disk / host: {paired_ratio(seconds['disk'], seconds['host'])}")
    return lines


def _ask(engine: WorkspaceEngine, folder: Path, side: str, i: int) -> tuple[float, StepResult, int]:
    """-> (seconds to the first token, the step, records read from disk)"""
    with engine.workspace(NAME, create=False) as ws:
        n_tokens = ws.n_tokens
        if side == "host":
            _warm(ws)
        for segments in folder.glob("*/segments"):
            drop_page_cache(segments)
        before = _n_reads(ws)
        began = time.perf_counter()
        stream = ws.step(question(i), 0, sampling=GREEDY, max_tokens=4)
        first_s = 0.0
        for event in stream:
            if isinstance(event, TextPiece) and not first_s:
                first_s = time.perf_counter() - began
        result = stream.result()
        n_read = _n_reads(ws) - before
        ws.truncate(n_tokens)
    return first_s or time.perf_counter() - began, result, n_read


def _warm(ws: Workspace) -> None:
    """Brings every record of the workspace into the host pool."""
    assert ws._opened is not None
    store = ws._opened.store
    store.get_many([ref for ref, _ in store._entries])
    assert store.tiers().n_host >= store.tiers().n_disk


def _n_reads(ws: Workspace) -> int:
    """Records in the host pool or read past it: what has come from disk since it was opened."""
    tiers = ws.stats().tiers
    assert tiers is not None
    return max(tiers.n_reads, tiers.n_host)
