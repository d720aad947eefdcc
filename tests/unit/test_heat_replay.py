"""The replay of scripts/bench_store heat counts disk reads as a model of the policies does."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

from store_bench.heat import Recording, in_runs, replay  # noqa: E402

from kvmem_llama.store.heat import Heat, LeastRecentlyUsed  # noqa: E402

N = 60  # blocks


def recording(recalled: list[list[int]]) -> Recording:
    return Recording(["made up"], 32 * N, 1024, 32, ["?"] * len(recalled), [N] * len(recalled), recalled)


def reads_of_lru(recalled: list[list[int]], n_host: int) -> int:
    """Disk reads of the textbook's policy, after every block was written once."""
    cache: OrderedDict[int, None] = OrderedDict.fromkeys(range(N))
    while len(cache) > n_host:
        cache.popitem(last=False)
    n_reads = 0
    for numbers in recalled:
        missing = [number for number in numbers if number not in cache]
        for number in numbers:
            if number in cache:
                cache.move_to_end(number)
        for number in missing:
            n_reads += 1
            cache[number] = None
            if len(cache) > n_host:
                cache.popitem(last=False)
    return n_reads


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
def test_lru_reads_what_the_textbook_says(tmp_path: Path, share: float) -> None:
    rng = np.random.default_rng(3)
    recalled = [rng.choice(N, 4, replace=False).tolist() for _ in range(40)]
    found = replay(tmp_path / "disk", recording(recalled), LeastRecentlyUsed(), share)
    assert found.n_host == round(share * N)
    assert found.n_reads == reads_of_lru(recalled, found.n_host)
    assert found.n_reads + found.n_hits == 40 * 4


def test_heat_keeps_what_is_wanted_again_and_again_where_lru_loses_it(tmp_path: Path) -> None:
    """Between two questions about a few favourites come others about blocks that nobody wants twice."""
    favourites, once = [1, 2, 3, 4], iter(range(5, N))
    recalled = []
    for _ in range(8):
        recalled += [favourites, [next(once) for _ in range(3)], [next(once) for _ in range(3)]]
    heat = replay(tmp_path / "heat", recording(recalled), Heat(), 0.1)
    lru = replay(tmp_path / "lru", recording(recalled), LeastRecentlyUsed(), 0.1)
    assert (heat.n_host, heat.policy, lru.policy) == (6, "heat", "lru")
    assert heat.n_reads < lru.n_reads == sum(map(len, recalled))


def test_questions_come_in_runs_about_one_text() -> None:
    assert in_runs([["a", "b", "c"], ["x"], ["r", "s"]], run=2) == ["a", "b", "x", "r", "s", "c"]
