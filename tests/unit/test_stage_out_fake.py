"""Stage-out on and off, over the fake model: when blocks are written, and who waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_durable import Engine, engine_on
from fake_run import checked_sessions, text

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.store.tiered import TierStats
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions


def tiers_of(ws: Workspace) -> TierStats:
    tiers = ws.stats().tiers
    assert tiers is not None
    return tiers


def seen_while_reading(engine: Engine, ws: Workspace, n: int) -> list[TierStats]:
    """The tiers before every batch of a read of `n` tokens."""
    seen: list[TierStats] = []
    store = ws._opened.store  # type: ignore[union-attr]
    before = engine.model.before_decode

    def look(batch: Any) -> None:
        seen.append(store.tiers())
        before(batch)

    engine.model.before_decode = look
    ws.read_tokens(text(n, 1)).result()
    engine.model.before_decode = before
    return seen


def test_without_stage_out_blocks_are_written_when_the_step_commits(tmp_path: Path) -> None:
    with engine_on(tmp_path, stage_out=False, commit_blocks=10_000) as engine, engine.workspace("a") as ws:
        seen = seen_while_reading(engine, ws, 1000)
        assert [tiers.disk_bytes for tiers in seen] == [0] * len(seen)
        assert seen[-1].n_pending > 100
        after = tiers_of(ws)
        assert (after.n_disk, after.n_pending, after.n_flush_waits) == (125, 0, 1)
        assert after.flush_wait_seconds > 0 and after.n_put_waits == 0


def test_a_long_read_that_is_kept_on_the_way_writes_on_the_way(tmp_path: Path) -> None:
    with engine_on(tmp_path, stage_out=False, commit_blocks=16) as engine, engine.workspace("a") as ws:
        seen = seen_while_reading(engine, ws, 1000)
        assert seen[-1].disk_bytes > 0
        assert tiers_of(ws).n_flush_waits == 1 + 1000 // 8 // 16


def test_a_host_pool_that_is_full_of_unwritten_blocks_makes_the_reader_wait(tmp_path: Path) -> None:
    options = {"stage_out": False, "commit_blocks": 10_000, "host_budget": 20_000}
    with engine_on(tmp_path, **options) as engine, engine.workspace("a") as ws:
        ws.read_tokens(text(1000, 1)).result()
        assert tiers_of(ws).n_put_waits > 0


def test_answers_and_what_is_stored_do_not_depend_on_it(tmp_path: Path) -> None:
    found = []
    for stage_out in (True, False):
        folder = tmp_path / str(stage_out)
        told: list[Any] = []
        for seed in range(3):
            with engine_on(folder, stage_out=stage_out) as engine, engine.workspace("a") as ws:
                ws.read_tokens(text(700, seed)).result()
                step = ws.step(text(20, 9), sampling=SamplingParams(temp=0), max_tokens=30)
                told.append(step.result().tokens)
                told.append(tiers_of(ws).n_disk)
        found.append(told)
    assert found[0] == found[1]
