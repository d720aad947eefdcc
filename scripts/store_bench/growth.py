"""A workspace of 256K to 10M tokens: what opening it, a recall and the process's memory cost.

As a program it opens one workspace and measures: growth.py FOLDER warm|cold ROUNDS THREADS REAL_BLOCKS
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from .rounds import drop_page_cache, environment

N_QUERY, N_RECALLED, N_REAL = 64, 64, 512
NAME = "growth"
BEGIN, END = "<!-- bench_store growth: begin -->", "<!-- bench_store growth: end -->"


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one length. Times are in seconds; those in lists are of all rounds."""

    n_tokens: int
    index_nbytes: int  # the file
    catalog_nbytes: int
    open_cold: float  # index and catalog not in the page cache
    open_warm: float
    score: list[float]  # 64 query tokens, all blocks
    stage_in: list[float]  # 64 scattered blocks from disk, page cache dropped
    rss_before: int  # bytes of anonymous memory before it is opened
    rss_anon: int  # and when it is open
    rss_peak: int  # bytes, most ever, file pages included


def bench(folder: Path | None, sizes: Sequence[int], n_rounds: int, n_threads: int) -> Iterator[Point]:
    """One point after the other; every workspace is deleted when it is measured."""
    from .synthetic import BLOCK, make_workspace

    for n_tokens in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as at:
            began = time.perf_counter()
            real = make_workspace(Path(at), NAME, n_tokens // BLOCK * BLOCK, N_REAL)
            os.sync()  # the page cache of what is not written yet cannot be dropped
            seconds = time.perf_counter() - began
            print(f"{n_tokens:,} tokens: made in {seconds:.0f} s", file=sys.stderr, flush=True)
            warm = _child(at, "warm", 0, n_threads, real)
            yield replace(_child(at, "cold", n_rounds, n_threads, real), open_warm=warm.open_cold)


def _child(folder: str, kind: str, n_rounds: int, n_threads: int, real: Sequence[int]) -> Point:
    command = [sys.executable, "-m", "store_bench.growth", folder, kind, str(n_rounds), str(n_threads)]
    done = subprocess.run(
        [*command, json.dumps(real)], env=environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return Point(**json.loads(done.stdout.splitlines()[-1]))


# -- the process that opens it


def measure(folder: Path, kind: str, n_rounds: int, n_threads: int, real: Sequence[int]) -> Point:
    """`open_cold` is the time of the one opening, whatever the kind; no rounds: nothing else is measured."""
    from kvmem_llama.durable import Shelf
    from kvmem_llama.memory.history import History
    from kvmem_llama.memory.index import MeanKIndex, mean_of
    from kvmem_llama.memory.indexes import Indexes
    from kvmem_llama.memory.scoring import QueryRows
    from kvmem_llama.memory.scoring.cpu import CpuScorer
    from kvmem_llama.memory.texts import BlockTexts
    from kvmem_llama.native.kernels import load
    from kvmem_llama.settings import Settings
    from kvmem_llama.store.raw_k import RawK

    from .synthetic import BLOCK, LAYERS, LAYOUT, N_HEAD, D, binding

    # room for the least that a store wants: it is the disk that is measured
    settings = Settings(data_dir=str(folder), host_budget=2 * LAYOUT.nbytes, n_threads=n_threads)
    (family,) = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if kind == "cold":
        drop_page_cache(family / "index")
        drop_page_cache(family)
    shelf = Shelf(settings, binding(), RawK.of(LAYOUT), mean_of(LAYERS, LAYOUT))
    rss_before, began = memory("RssAnon"), time.perf_counter()
    opened = shelf.open(NAME, create=False, policy="kvmem", system=None)
    texts = BlockTexts(lambda ids: "", BLOCK)
    history = History(opened.store, Indexes(MeanKIndex(LAYERS, LAYOUT)), texts, BLOCK, LAYOUT.nbytes)
    history.restore(opened.restored)
    opened.taken_over()
    open_s, rss_anon = time.perf_counter() - began, memory("RssAnon")

    rng = np.random.default_rng(1)
    rows = tuple(rng.standard_normal((N_QUERY, N_HEAD, D), dtype=np.float32) for _ in LAYERS)
    query = QueryRows(rows, tuple(layer.scale for layer in LAYERS))
    scorer, candidates = CpuScorer(load(), n_threads=n_threads), np.arange(len(history.table), dtype=np.int64)
    score, stage_in = [], []
    for i in range(n_rounds and n_rounds + 1):
        began = time.perf_counter()
        scores = scorer.score(query, history.indexes.mean_k, candidates)
        seconds = time.perf_counter() - began
        assert abs(scores.sum() / N_QUERY - 1) < 1e-4
        if i:
            score.append(seconds)
    for i in range(n_rounds and n_rounds + 1):
        chosen = np.sort(rng.choice(real, min(N_RECALLED, len(real)), replace=False))
        starts = [int(number) * BLOCK for number in chosen]
        drop_page_cache(family / "segments")
        began = time.perf_counter()
        n = sum(len(batch) for batch in history.fetch(starts))
        seconds = time.perf_counter() - began
        assert n == len(starts)
        if i:
            stage_in.append(seconds)
    point = Point(
        n_tokens=history.n_tokens,
        index_nbytes=sum(path.stat().st_size for path in (family / "index").iterdir()),
        catalog_nbytes=(family / "catalog.sqlite").stat().st_size,
        open_cold=open_s,
        open_warm=0.0,
        score=score,
        stage_in=stage_in,
        rss_before=rss_before,
        rss_anon=rss_anon,
        rss_peak=memory("VmHWM"),
    )
    shelf.close()
    return point


def memory(field: str) -> int:
    """Bytes, as the kernel counts them for this process: RssAnon, VmHWM ..."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


# -- the page


def table(points: Sequence[Point]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| tokens | index | catalog | open, cold | open, warm | scoring, 64 query tokens "
        "| 64 blocks from disk | memory | memory / index |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        lines.append(
            f"| {count(p.n_tokens)} | {size(p.index_nbytes)} | {size(p.catalog_nbytes)} "
            f"| {p.open_cold:.2f} s | {p.open_warm:.2f} s | {1e3 * float(np.median(p.score)):.0f} ms "
            f"| {1e3 * float(np.median(p.stage_in)):.0f} ms | {size(p.rss_anon - p.rss_before)} "
            f"| {(p.rss_anon - p.rss_before) / p.index_nbytes:.2f} |"
        )
    return lines


def count(n: int) -> str:
    return f"{n / 1e6:.3g}M" if n >= 1_000_000 else f"{n / 1e3:.0f}K"


def size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def write_page(page: Path, points: Sequence[Point]) -> None:
    """Puts the table between the marks of docs/growth.md."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(
        "\n".join([before + BEGIN, "", *table(points), "", END + after]), encoding="utf-8", newline="\n"
    )


def plot(path: Path, points: Sequence[Point]) -> bool:
    """Draws the figure -> whether Matplotlib is here (the extra `plot`)."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "growth"  # the same figures give the same file
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    tokens = [p.n_tokens for p in points]
    for label, seconds in {
        "open, cold": [p.open_cold for p in points],
        "open, warm": [p.open_warm for p in points],
        "scoring": [float(np.median(p.score)) for p in points],
        "64 blocks from disk": [float(np.median(p.stage_in)) for p in points],
    }.items():
        axes[0].plot(tokens, seconds, marker="o", label=label)
    for label, nbytes in {
        "index": [p.index_nbytes for p in points],
        "catalog": [p.catalog_nbytes for p in points],
        "memory": [p.rss_anon - p.rss_before for p in points],
    }.items():
        axes[1].plot(tokens, [n / 2**20 for n in nbytes], marker="o", label=label)
    for axis, unit in zip(axes, ("seconds", "MiB"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="tokens of history", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, metadata={"Date": None})
    return True


if __name__ == "__main__":
    folder, kind, *counts, real_text = sys.argv[1:]
    n_rounds, n_threads = map(int, counts)
    print(json.dumps(asdict(measure(Path(folder), kind, n_rounds, n_threads, json.loads(real_text)))))
