"""Bits that flip on disk, seen by whoever asks: nothing wrong is served, what is needed is noticed."""

from __future__ import annotations

from pathlib import Path

from stack_flips import Flipper, fakes, make_whole

N_FLIPS = 300


def test_no_flipped_bit_reaches_the_model(folder: Path, tmp_path: Path) -> None:
    with fakes() as remade:
        wholes = [make_whole(tmp_path / str(seed), seed, forked=seed > 0) for seed in range(2)]
        flipper = Flipper(folder, wholes, remade, seed=3)
        for number in range(N_FLIPS):
            flipper.flip_one(number)
    found = {outcome for _, outcome in flipper.outcomes}
    assert found == {"refused", "recomputed", "index made again", "right"}
