"""kill -9 at every kind of moment: what was acknowledged is there, all is right, no space is lost."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kill import GROUPS, Server, check_after, kill_often, make_script

N_KILLS = int(os.environ.get("KVMEM_TEST_KILLS", "12"))  # at least, in each group


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.mark.parametrize("group", GROUPS)
def test_a_process_that_is_killed_leaves_every_acknowledged_step(
    server: Server, group: str, folder: Path
) -> None:
    assert kill_often(server, group, folder, random.Random(group), N_KILLS).n_kills >= N_KILLS


def test_a_script_that_is_not_killed_ends_as_expected(server: Server, folder: Path) -> None:
    for seed in range(5):
        folder.mkdir(exist_ok=True)
        ops = make_script(seed, n_ops=20)
        assert not server.run(folder, ops, "", 0)
        check_after(folder, ops)
        shutil.rmtree(folder)
