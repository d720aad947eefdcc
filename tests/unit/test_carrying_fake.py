"""A history that is edited: the prefix stays, equal spans are taken over, the rest is read (fake model)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_model import FakeModel
from fake_run import checked_sessions, faked_template, text

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import Cancelled, StoreFull
from kvmem_llama.matching import match
from kvmem_llama.store import durable
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    @contextmanager
    def open_engine(**options: Any) -> Iterator[Engine]:
        with engine_on(tmp_path / "data", **options) as engine:
            yield engine
        root = Root(tmp_path / "data")
        for family in root.family_ids():
            assert not verify_family(root, family).findings

    return open_engine


def rows(ws: Workspace, model: FakeModel) -> list[tuple[int, int]]:
    """(token, fingerprint of what it had attended to) of every token."""
    history = ws._policy._session.history  # type: ignore[attr-defined]
    found: list[tuple[int, int]] = []
    for block in history.table:
        record = history.store.get(block.ref)
        tokens, seen = model.tokens_of(record, block.count), model.fingerprints_of(record, block.count)
        found += zip(tokens, seen, strict=True)
    return found


def evaluated(model: FakeModel) -> int:
    return sum(len(batch) for batch in model.batches)


def edited(stored: Any) -> Any:
    """A token changed, some cut, some put in, none of it on the edge of a block."""
    return np.concatenate(
        [stored[:203], text(5, 7), stored[204:517], stored[550:901], text(33, 8), stored[901:]]
    )


@pytest.mark.parametrize("name", [None, "notes"])
def test_equal_spans_keep_the_rows_they_were_computed_with(opened: Open, name: str | None) -> None:
    with opened() as engine, engine.workspace(name) as ws:
        ws.read_tokens(text(1500)).result()
        before, n = rows(ws, engine.model), evaluated(engine.model)
        stored = ws.history()
        wanted = edited(stored)
        plan = match(stored, wanted)
        result = ws.rewrite(wanted).result()
        assert np.array_equal(ws.history(), wanted)
        n_read = len(wanted) - plan.prefix - plan.n_carried
        assert (result.n_cached, result.n_carried, result.n_read) == (203, plan.n_carried, n_read)
        assert n_read == 5 + 33 and evaluated(engine.model) - n == n_read
        after = rows(ws, engine.model)
        assert [token for token, _ in after] == wanted.tolist()
        for span in plan.spans:
            assert after[span.new : span.new_end] == before[span.old : span.old_end]
        assert after[:203] == before[:203]
        ask = ws.step(text(20, 1), sampling=GREEDY, max_tokens=30).result()
        assert any(block.carried for block in ask.recalls[0].blocks)
        assert not ask.recalls[0].blocks[0].carried


def test_an_edited_history_is_durable(opened: Open) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1500)).result()
        ws.step(text(20, 1), sampling=GREEDY, max_tokens=30).result()
        wanted = edited(ws.history())
        ws.rewrite(wanted).result()
        expected = rows(ws, engine.model)
        with ws.fork("fork") as fork:
            answer = fork.step(text(20, 2), sampling=GREEDY, max_tokens=30).result()
    with opened() as engine, engine.workspace("notes") as ws:
        assert np.array_equal(ws.history(), wanted) and rows(ws, engine.model) == expected
        again = ws.step(text(20, 2), sampling=GREEDY, max_tokens=30).result()
        assert (again.n_cached, again.tokens) == (len(wanted), answer.tokens)
        assert any(block.carried for block in again.recalls[0].blocks)


@pytest.mark.parametrize("keep", [0, 200, 203])
def test_a_fork_is_not_changed_by_an_edit(opened: Open, keep: int) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(900)).result()
        with ws.fork("old") as old:
            before = rows(old, engine.model)
            wanted = np.concatenate([ws.history()[:keep], text(40, 5), ws.history()[300:]])
            ws.rewrite(wanted).result()
            assert np.array_equal(old.history(), text(900)) and rows(old, engine.model) == before
    with opened() as engine, engine.workspace("old") as old:
        assert rows(old, engine.model) == before
    with opened() as engine, engine.workspace("notes") as ws:
        assert np.array_equal(ws.history(), wanted)


@pytest.mark.parametrize("n", [0, 1, 200, 203])
def test_a_history_that_is_only_cut_evaluates_nothing(opened: Open, n: int) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(900)).result()
        done = evaluated(engine.model)
        result = ws.rewrite(text(900)[:n]).result()
        assert (result.n_cached, result.n_read) == (n, 0) and evaluated(engine.model) == done
        assert len(ws.history()) == n
    with opened() as engine, engine.workspace("notes") as ws:
        assert np.array_equal(ws.history(), text(900)[:n])


@pytest.mark.parametrize("name", [None, "notes"])
def test_a_cancelled_edit_changes_nothing_and_is_not_read_twice(opened: Open, name: str | None) -> None:
    with opened() as engine, engine.workspace(name) as ws:
        ws.read_tokens(text(900)).result()
        before = rows(ws, engine.model)
        wanted = np.concatenate([text(203), text(400, 5), text(900)[300:]])
        done, calls = evaluated(engine.model), 0

        def cancel(_batch: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 12:
                stream.cancel()

        checks = engine.model.before_decode
        engine.model.before_decode = cancel
        stream = ws.rewrite(wanted)
        with pytest.raises(Cancelled):
            stream.result()
        engine.model.before_decode = checks
        assert np.array_equal(ws.history(), text(900)) and rows(ws, engine.model) == before
        n_first = evaluated(engine.model) - done
        result = ws.rewrite(wanted).result()
        assert result.n_reused >= n_first - 8
        assert result.n_reused + result.n_read == 400 and result.n_carried == 600
        ws.step(text(20, 1), sampling=GREEDY, max_tokens=5).result()
        assert np.array_equal(ws.history()[: len(wanted)], wanted)


def test_rows_that_are_lost_are_read_instead(opened: Open) -> None:
    with opened(host_budget=3000, disk_budget=40 * 4096) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(900)).result()
        history = ws._policy._session.history  # type: ignore[attr-defined]
        assert history.lost(block.start for block in history.table)
        wanted = np.concatenate([text(203), text(1, 5), text(900)[203:]])
        result = ws.rewrite(wanted).result()
        assert 0 < result.n_carried < 697 and result.n_carried + result.n_read == 698
        assert np.array_equal(ws.history(), wanted)


def test_only_the_prefix_is_reused_where_that_is_asked_for(opened: Open) -> None:
    with opened(reuse="prefix") as engine, engine.workspace() as ws:
        ws.read_tokens(text(900)).result()
        result = ws.rewrite(np.concatenate([text(203), text(1, 5), text(900)[203:]])).result()
        assert (result.n_cached, result.n_carried, result.n_read) == (203, 0, 698)


@pytest.mark.parametrize("policy", ["full_context", "sliding_window", "compaction"])
def test_policies_without_recall_reuse_the_prefix(opened: Open, policy: str) -> None:
    with opened(policy=policy, n_ctx=512) as engine, engine.workspace() as ws:
        ws.read_tokens(text(150)).result()
        wanted = np.concatenate([text(50), text(3, 5), text(150)[50:]])
        result = ws.rewrite(wanted).result()
        assert (result.n_cached, result.n_read) == (50, 103)
        assert np.array_equal(ws.history(), wanted)


POINTS = ["rewrite.before", "rewrite.statements", "rewrite.after"]
KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import numpy as np
from fake_durable import engine_on
from fake_run import text
from store_faults import Stops
from kvmem_llama.store import files
stops = Stops()
stops.on[{point!r}] = lambda: os._exit(9)
files.install(stops)
with engine_on(Path({folder!r})) as engine, engine.workspace("notes") as ws:
    ws.read_tokens(text(900)).result()
    ws.rewrite(np.concatenate([text(203), text(40, 5), text(900)[300:]])).result()
"""


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_is_killed_leaves_the_old_history_or_the_new_one(
    opened: Open, tmp_path: Path, point: str
) -> None:
    tests = str(Path(__file__).parents[1])
    script = KILLED.format(tests=tests, point=point, folder=str(tmp_path / "data"))
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 9
    edit = np.concatenate([text(203), text(40, 5), text(900)[300:]])
    root = Root(tmp_path / "data")
    assert [verify_family(root, family).findings for family in root.family_ids()] == [[]]
    with opened() as engine, engine.workspace("notes") as ws:
        assert np.array_equal(ws.history(), edit if point == "rewrite.after" else text(900))
        assert [token for token, _ in rows(ws, engine.model)] == ws.history().tolist()
        result = ws.rewrite(edit).result()
        assert result.n_read == (0 if point == "rewrite.after" else 40)


def test_a_failed_commit_leaves_the_history_as_it_was(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(900)).result()
        before = rows(ws, engine.model)
        wanted = np.concatenate([text(203), text(40, 5), text(900)[300:]])

        def fail(*_args: Any) -> None:
            raise StoreFull("segment", 4096)

        with monkeypatch.context() as patch:
            patch.setattr(durable, "append", fail)
            with pytest.raises(StoreFull):
                ws.rewrite(wanted).result()
        assert np.array_equal(ws.history(), text(900)) and rows(ws, engine.model) == before
        ws.read_tokens(text(30, 2)).result()
        result = ws.rewrite(wanted).result()
        assert result.n_read == 40 and np.array_equal(ws.history(), wanted)
