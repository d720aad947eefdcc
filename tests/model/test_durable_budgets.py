"""A durable workspace stays within its budgets of memory and disk, however much it reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_models import Shape, write_model

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

from soak_runs.budgets import MIB, Load, check, long_text  # noqa: E402

N_TOKENS = 20_000


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="counts what Linux tells of a process")
def test_memory_disk_descriptors_and_threads_stay_within_their_budgets(tmp_path: Path) -> None:
    # 131 KB a block: all records together are ten times the host budget.
    model = write_model(tmp_path / "model.gguf", Shape(n_layer=4, n_head=4, n_head_kv=4, d=64))
    text = tmp_path / "text"
    pages = [page.read_text(encoding="utf-8") for page in sorted((REPO / "docs").glob("*.md"))]
    text.write_text(long_text(pages, 2 * N_TOKENS), encoding="utf-8")
    load = Load(
        str(model), str(text), str(tmp_path / "data"), n_tokens=N_TOKENS, n_ctx=512, n_threads=1,
        host_budget=8 * MIB,
    )  # fmt: skip
    said = list(check(load))
    assert len(said) == 5
