"""A durable workspace that is open read-only: it answers, keeps nothing, and never meets the lock."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_durable import engine_on
from fake_model import FakeSampler
from fake_run import FakeTemplate, checked_sessions, faked_template, text

from kvmem_llama.engine import core
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InvalidOption, StoreFull, StoreLocked, WorkspaceNotFound
from kvmem_llama.memory import answering
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace, WorkspaceEngine

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """An engine with a workspace "notes" of 1500 tokens in its folder."""

    @contextmanager
    def open_engine(**options: Any) -> Iterator[WorkspaceEngine]:
        with engine_on(tmp_path, **options) as engine:
            yield engine

    with open_engine() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1500, 0)).result()
    return open_engine


def ask(ws: Workspace, seed: int, n: int = 30) -> Any:
    result = ws.step(text(20, seed), sampling=SamplingParams(temp=0), max_tokens=n).result()
    return result.tokens, [[(b.start, b.count, b.why, b.position) for b in r.blocks] for r in result.recalls]


def contents(folder: Path) -> dict[str, str]:
    """Every durable file; SQLite's -shm and its empty log come and go with whoever looks."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".sqlite-shm" and path.stat().st_size
    }


def test_it_answers_as_the_workspace_itself_would_and_nothing_on_disk_changes(
    opened: Open, tmp_path: Path
) -> None:
    before = contents(tmp_path)
    with opened() as engine, engine.workspace("notes", read_only=True) as ws:
        assert ws.read_only and ws.n_tokens == 1500
        told = [ask(ws, 1), ask(ws, 2)]
        assert ws.n_tokens == 1500 + 2 * 50
        ws.pin(800, 816)
        ws.truncate(1400)
        ws.read_tokens(text(700, 3)).result()
        ask(ws, 4)
        tiers = ws.stats().tiers
        assert tiers is not None and tiers.n_pending == 0
    assert contents(tmp_path) == before
    assert Root(tmp_path).last_name() == "notes"
    with opened() as engine, engine.workspace("notes") as ws:
        assert not ws.read_only and ws.n_tokens == 1500 and ws.stats().pins == ()
        assert [ask(ws, 1), ask(ws, 2)] == told


@pytest.mark.parametrize("host", [2**20, 20_000])
def test_a_reader_sees_the_moment_it_was_opened_while_another_engine_writes(opened: Open, host: int) -> None:
    with opened() as mine, mine.workspace("notes") as writer:
        ask(writer, 1)
        with pytest.raises(StoreLocked, match="notes") as locked, opened() as second:
            second.workspace("notes")
        assert "--read-only" in locked.value.hint
        with opened(host_budget=host) as theirs, theirs.workspace("notes", read_only=True) as reader:
            expected = writer.history().tolist()
            for seed in (2, 3, 4):
                ask(writer, seed)
            assert writer.n_tokens > reader.n_tokens == 1550
            assert reader.history().tolist() == expected
            answer = ask(reader, 9)
            assert reader.stats().n_recomputed == 0  # the partial last block was not lost to the writer
            n_writer = writer.n_tokens
        with opened() as theirs, theirs.workspace("notes", read_only=True) as reader:
            assert reader.n_tokens == n_writer
    with opened() as engine, engine.workspace("notes") as ws:
        ws.truncate(1550)
        assert ask(ws, 9) == answer


def test_a_reader_outlives_a_writer_that_truncates_and_deletes(opened: Open) -> None:
    with opened(host_budget=20_000) as engine, engine.workspace("notes", read_only=True) as reader:
        with opened() as other, other.workspace("notes") as writer:
            writer.truncate(100)
            writer.read_tokens(text(1400, 7)).result()
        history = reader.history().tolist()
        ask(reader, 1)
        assert reader.history().tolist()[:1500] == history
        assert reader.stats().n_recomputed > 0  # what is gone is computed again from its tokens


def _write(folder: Path, started: Any, go_on: Any) -> None:
    core.ChatTemplate = FakeTemplate  # type: ignore[misc, assignment]
    answering.Sampler = FakeSampler  # type: ignore[misc, assignment]
    with engine_on(folder) as engine, engine.workspace("notes") as ws:
        started.set()
        go_on.wait(60)
        for seed in range(3):
            ask(ws, seed)


def test_another_process_writes_while_one_reads(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The new process looks for this module by its name; the source folder comes last, so that the installed
    # package is found before it.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    spawn = multiprocessing.get_context("spawn")
    started, go_on = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_write, args=(tmp_path, started, go_on))
    process.start()
    try:
        assert started.wait(60)
        with opened() as engine:
            with pytest.raises(StoreLocked):
                engine.workspace("notes")
            with engine.workspace("notes", read_only=True) as ws:
                before = ws.history().tolist()
                go_on.set()
                answers = [ask(ws, 5), ask(ws, 6)]
                assert ws.history().tolist()[:1500] == before
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
    with opened() as engine, engine.workspace("notes", read_only=True) as ws:
        assert ws.n_tokens == 1500 + 3 * 50
        ws.truncate(1500)
        assert [ask(ws, 5), ask(ws, 6)] == answers


def test_what_a_reader_cannot_do_is_refused(opened: Open, tmp_path: Path) -> None:
    with opened() as engine:
        with engine.workspace("notes", read_only=True) as ws:
            for name in ("branch", None):
                with pytest.raises(InvalidOption, match="read-only"):
                    ws.fork(name)
        with pytest.raises(WorkspaceNotFound):
            engine.workspace("none", read_only=True)
        with pytest.raises(InvalidOption, match="name"):
            engine.workspace(read_only=True)
        assert [item.row.name for item in Root(tmp_path).list() if item.row] == ["notes"]


def test_a_reader_adds_what_fits_the_host_budget(opened: Open) -> None:
    with opened(host_budget=20_000) as engine, engine.workspace("notes", read_only=True) as ws:
        with pytest.raises(StoreFull, match="host pool") as full:
            ws.read_tokens(text(2000, 5)).result()
        assert "read-only" in full.value.hint
        assert ws.n_tokens == 1500
        ask(ws, 1, 3)
