"""At least 500 processes killed at named points of the store's work: 34 in each group of points."""

from __future__ import annotations

import random
import time

from .common import fast_folder, say, scaled

N_KILLS = 34  # in each group


def run(scale: float = 1.0) -> None:
    from store_kill import BOTH, GROUPS, Server, kill_often

    total = 0
    with Server() as server, fast_folder() as folder:
        for group in GROUPS:
            began = time.monotonic()
            tally = kill_often(
                server, group, folder / "case", random.Random(f"{group} soak"), scaled(N_KILLS, scale)
            )
            total += tally.n_kills
            points = ", ".join(f"{point} {n}" for point, n in sorted(tally.points.items()))
            told = tally.outcomes
            outcome = "nothing shows whether it was done"
            if group in BOTH:
                outcome = (
                    f"under way: there {told[True]}, not there {told[False]}, not to be told {told[None]}"
                )
            seconds = time.monotonic() - began
            say(f"{group:12} {tally.n_kills} kills in {seconds:.0f} s ({points}); {outcome}")
    say(f"{total} kills; no acknowledged step was lost, nothing was wrong, no space was lost")
    assert scale < 1 or total >= 500
