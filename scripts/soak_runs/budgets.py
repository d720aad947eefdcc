"""200,000 tokens with a host budget of 256 MiB: memory, disk, descriptors and threads stay within bounds.

What the process needs besides the configured budgets is that of a `sliding_window` run with the same view.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).resolve().parents[1]
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Load:
    """What one run reads, and with which options."""

    model: str
    text: str  # path
    folder: str
    policy: str = "kvmem"
    n_tokens: int = 200_000
    n_steps: int = 200
    n_ctx: int = 2048
    n_threads: int = 2
    host_budget: int = 256 * MIB
    segment_records: int = 64


@dataclass(frozen=True, slots=True)
class Run:
    """What it took. Lists have one figure for each step, taken after it; sizes in bytes."""

    peak: int  # most anonymous memory in RAM
    rss: list[int]  # anonymous memory
    segments: list[int]  # open descriptors of segment files
    others: list[int]  # all other descriptors
    readers: list[int]  # threads that read records; started when first needed
    threads: list[int]  # all others
    blocks: list[int]
    index_nbytes: int  # in RAM
    record_nbytes: int
    row_nbytes: int  # of the index
    disk_nbytes: int  # of all files, as the file system counts them, once the workspace is closed


def run(model: Path, n_tokens: int = 200_000) -> None:
    from .common import fast_folder, manual_text, say

    data = os.environ.get("KVMEM_TEST_DATA")
    files = sorted(Path(data).glob("*.txt")) if data else []
    texts = [file.read_text(encoding="utf-8") for file in files] or [manual_text()]
    with tempfile.TemporaryDirectory() as folder, fast_folder() as fast:
        text = Path(fast) / "text"
        text.write_text(long_text(texts, 8 * n_tokens), encoding="utf-8")
        load = Load(str(model), str(text), folder, n_tokens=n_tokens)
        for line in check(load):
            say(line)


def check(load: Load) -> Iterator[str]:
    """Both runs, each in a process of its own -> lines that say what they took. Raises AssertionError."""
    from kvmem_llama.store.descriptors import MAX_OPEN
    from kvmem_llama.store.fetch import BATCH_RECORDS
    from kvmem_llama.store.readers import N_THREADS

    # Its memory does not grow with the history: a tenth of the tokens tells it.
    window = measure(replace(load, policy="sliding_window", n_tokens=max(load.n_tokens // 10, 20_000)))
    yield f"sliding_window: at most {window.peak / MIB:.0f} MiB of anonymous memory"
    memory = measure(load)
    staging = 2 * BATCH_RECORDS * memory.record_nbytes
    allowed = 1.10 * (window.peak + memory.index_nbytes + load.host_budget + staging)
    yield (
        f"kvmem: at most {memory.peak / MIB:.0f} MiB; allowed are {allowed / MIB:.0f}: 1.10 x (the window's, "
        f"index {memory.index_nbytes / MIB:.0f}, host budget {load.host_budget / MIB:.0f}, "
        f"staging {staging / MIB:.0f})"
    )
    assert memory.peak <= allowed

    n, tenth = len(memory.rss), max(len(memory.rss) // 10, 1)
    middle, end = np.median(memory.rss[n // 2 : n // 2 + tenth]), np.median(memory.rss[-tenth:])
    n_more = memory.blocks[-1] - memory.blocks[n // 2]
    yield (
        f"the last half: {middle / MIB:.1f} to {end / MIB:.1f} MiB, "
        f"the index grew by {n_more * memory.row_nbytes / MIB:.1f}"
    )
    assert end <= 1.02 * middle + n_more * memory.row_nbytes

    wanted = memory.blocks[-1] * (memory.record_nbytes + memory.row_nbytes)
    yield f"disk: {memory.disk_nbytes / MIB:.1f} MiB, {memory.disk_nbytes / wanted:.3f} of records and index"
    assert abs(memory.disk_nbytes / wanted - 1) <= 0.03

    yield (
        f"descriptors: {memory.others[-1]} and {memory.segments[-1]} of segments; "
        f"threads: {memory.threads[-1]} and {memory.readers[-1]} that read"
    )
    first = slice(n // 20, n // 4)  # threads and files that are made when first needed are there
    last = slice(-tenth, None)
    for what, counts in (("descriptors", memory.others), ("threads", memory.threads)):
        assert max(counts[last]) <= max(counts[first]), f"{what}: {counts}"
    assert max(memory.segments) <= MAX_OPEN and max(memory.readers) <= N_THREADS


def measure(load: Load) -> Run:
    """One run in a process of its own."""
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "soak_runs.memory_of_run", json.dumps(asdict(load))],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def long_text(texts: Sequence[str], n_chars: int) -> str:
    """The texts over and over, every time with other paragraphs left out and a heading of its own."""
    parts: list[str] = []
    n = 0
    for number in range(1_000):
        for i, text in enumerate(texts):
            kept = [p for at, p in enumerate(text.split("\n\n")) if (at + number) % 7 or not number]
            parts.append(f"# Volume {number + 1}, text {i + 1}\n\n" + "\n\n".join(kept))
            n += len(parts[-1])
            if n >= n_chars:
                return "\n\n".join(parts)[:n_chars]
    return "\n\n".join(parts)
