"""10,000 bits flipped in the files of durable workspaces, each followed by a question."""

from __future__ import annotations

import time

from .common import fast_folder, say, scaled

N_FLIPS = 10_000
N_STORES = 6


def run(scale: float = 1.0) -> None:
    from stack_flips import KINDS, Flipper, fakes, make_whole

    began = time.monotonic()
    with fakes() as remade, fast_folder() as folder:
        wholes = [make_whole(folder / str(seed), seed, forked=seed % 2 > 0) for seed in range(N_STORES)]
        flipper = Flipper(folder / "case", wholes, remade, seed=20)
        for number in range(scaled(N_FLIPS, scale)):
            flipper.flip_one(number)
            if number % 1000 == 999:
                say(f"{number + 1} bits in {time.monotonic() - began:.0f} s")
    for kind in KINDS:
        told = ", ".join(f"{what} {n}" for (k, what), n in sorted(flipper.outcomes.items()) if k == kind)
        say(f"{kind:9} {told}")
    n_right = sum(n for (_, what), n in flipper.outcomes.items() if what == "right")
    total = flipper.outcomes.total()
    say(f"{total} flips: detected {total - n_right}, untouched (the same answer) {n_right}, wrong 0")
