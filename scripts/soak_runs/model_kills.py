"""20 processes that read 1,500 tokens and answer with a real model, killed at moments of engine and store."""

from __future__ import annotations

import random
import time
from pathlib import Path

from .common import ROOT, fast_folder, say, scaled

N_KILLS = 20
N_PIECES = 6  # of 250 tokens


def run(model: Path, scale: float = 1.0) -> None:
    from model_kill import Bench

    text = "\n\n".join(
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("durability", "format")
    )
    began = time.monotonic()
    with fast_folder() as folder:
        bench = Bench(folder, model, text, N_PIECES)
        say(f"{len(bench.expected)} steps without a kill in {time.monotonic() - began:.0f} s")
        kills = bench.kill(scaled(N_KILLS, scale), random.Random(7))
    n = kills.points.total()
    points = ", ".join(f"{point} {k}" for point, k in sorted(kills.points.items()))
    say(f"{n} kills in {time.monotonic() - began:.0f} s ({points})")
    say(f"the step under way was there {kills.n_there} times, not there {n - kills.n_there} times")
    say(f"{kills.n_same} steps told the same as without a kill")
