"""What the runs share: texts, and the helpers of the tests."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.workspace import WorkspaceEngine

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "vendor" / "build" / "stock" / "llama.cpp"
GREEDY = SamplingParams(temp=0)

sys.path.insert(0, str(ROOT / "tests"))


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def scaled(n: float, scale: float) -> int:
    """`n` of a full run, at least 1."""
    return max(round(n * scale), 1)


@contextmanager
def fast_folder() -> Iterator[Path]:
    """An empty folder, in RAM where there is such a place: a killed process leaves there what it wrote, too,
    and syncs cost nothing."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None, prefix="kvmem-soak-") as name:
        yield Path(name)


def manual_text() -> str:
    """llama.cpp's manuals, one after the other."""
    pages = [TREE / "tools" / "server" / "README.md", *sorted((TREE / "docs").glob("*.md"))]
    return "\n\n".join(page.read_text(encoding="utf-8") for page in pages)


def manual_tokens(engine: WorkspaceEngine, n: int) -> np.ndarray:
    """The first n tokens of the manuals."""
    return engine.core.model.vocab.tokenize(manual_text(), add_bos=True, parse_special=False)[:n]


def words(engine: WorkspaceEngine, text: str) -> np.ndarray:
    return engine.core.model.vocab.tokenize(text, add_bos=False, parse_special=False)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
