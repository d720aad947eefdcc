"""kill -9 while a real model reads and answers: the next process goes on as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

from model_kill import Bench

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_a_killed_process_is_succeeded_by_one_that_tells_the_same(smollm2: Path, tmp_path: Path) -> None:
    text = (DOCS / "durability.md").read_text(encoding="utf-8")
    bench = Bench(tmp_path, smollm2, text, n_pieces=4)
    kills = bench.kill(2, random.Random(0), ("phase.decode", "row_commit.after"))
    assert kills.points.total() == 2 and kills.n_there == 1 and kills.n_same >= 5
