"""kill -9 at every kind of moment: what was acknowledged is there, all is right, no space is lost."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kill import GROUPS, Server, check_after, make_script

N_KILLS = 12  # at least, in each group

# Of these, the workspaces or the exported file tell whether what was under way was done or not.
BOTH = {"row_commit", "fork", "truncate", "delete", "export", "import", "create", "rename"}
OFTEN = {"stage_out", "data_write", "sync", "index_append"}  # passed many times in a script


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.mark.parametrize("group", GROUPS)
def test_a_process_that_is_killed_leaves_every_acknowledged_step(
    server: Server, group: str, folder: Path
) -> None:
    rng = random.Random(group)
    outcomes: Counter[bool | None] = Counter()
    points: Counter[str] = Counter()
    for case in range(20 * N_KILLS):
        is_all = set(points) == set(GROUPS[group]) and (group not in BOTH or {True, False} <= outcomes.keys())
        if is_all and points.total() >= N_KILLS:
            return
        point = GROUPS[group][case % len(GROUPS[group])]
        folder.mkdir(exist_ok=True)
        ops = make_script(rng.randrange(1 << 30), group)
        nth = rng.randrange(1, 25 if group in OFTEN else 5)
        while nth and not server.run(folder, ops, point, nth):
            passed = json.loads((folder / "points.json").read_text()).get(point, 0)
            nth = rng.randrange(1, passed + 1) if passed else 0  # a script that never comes here is left out
            shutil.rmtree(folder)
            folder.mkdir()
        if nth:
            points[point] += 1
            outcomes[check_after(folder, ops).is_done] += 1
        shutil.rmtree(folder)
    raise AssertionError(f"not every point was met with every outcome: {points} {outcomes}")


def test_a_script_that_is_not_killed_ends_as_expected(server: Server, folder: Path) -> None:
    for seed in range(5):
        folder.mkdir(exist_ok=True)
        ops = make_script(seed, n_ops=20)
        assert not server.run(folder, ops, "", 0)
        check_after(folder, ops)
        shutil.rmtree(folder)
