"""A disk that fails in the middle of a step: the step is undone, what is safe is not read again, and the
workspace and all others go on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from fake_durable import engine_on
from fake_run import checked_sessions, text
from store_faults import NOTHING, SHORT, FaultySystem

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import StoreError, StoreFailed, StoreFull
from kvmem_llama.memory.ledger import Ledger
from kvmem_llama.store import files
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace, WorkspaceEngine

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions
GREEDY = SamplingParams(temp=0)
RECORD = fake_model.FakeModel(8, 8, 8).layout.nbytes  # bytes
SMALL = 40 * RECORD  # of the host pool: less than a history

Open = Callable[..., Any]


@pytest.fixture
def system() -> Iterator[FaultySystem]:
    """What the store of this test runs on."""
    faulty = FaultySystem()
    before = files.install(files.Files(faulty))
    yield faulty
    files.install(before)


@pytest.fixture
def opened(tmp_path: Path, system: FaultySystem) -> Open:
    """An engine whose workspaces lie in a folder of the test; whatever failed, they are sound at the end."""

    @contextmanager
    def open_engine(**options: Any) -> Iterator[WorkspaceEngine]:
        folder = tmp_path / "data"
        with engine_on(folder, **options) as engine:
            yield engine
        system.heal()
        root = Root(folder)
        for family in root.family_ids():
            assert verify_family(root, family).findings == []

    return open_engine


def ask(ws: Workspace, seed: int) -> Any:
    return ws.step(text(20, seed), sampling=GREEDY, max_tokens=30).result()


def read(ws: Workspace, n: int, seed: int = 0) -> Any:
    return ws.read_tokens(text(n, seed)).result()


def expected(opened: Open, *acts: Callable[[Workspace], Any]) -> list[int]:
    """Tokens of the last step, where nothing ever failed and nothing was kept."""
    with opened() as engine, engine.workspace() as ws:
        return [act(ws) for act in acts][-1].tokens  # type: ignore[no-any-return]


class Commits(sqlite3.Connection):
    """Connections to catalogs; while `fail` is set, transactions that change something do not end well."""

    fail = False

    def execute(self, sql: str, *args: object) -> sqlite3.Cursor:  # type: ignore[override]
        if sql == "COMMIT" and Commits.fail:
            failure = sqlite3.OperationalError("disk I/O error")
            failure.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise failure
        return super().execute(sql, *args)  # type: ignore[arg-type]


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> type[Commits]:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Commits))
    monkeypatch.setattr(Commits, "fail", False)
    return Commits


WRITES = [
    ("pwritev", "ENOSPC", "segments"),
    ("pwritev", "EIO", "segments"),
    ("pwritev", NOTHING, "segments"),
    ("fsync", "EIO", "segments"),
    ("pwritev", "ENOSPC", "index"),
    ("fsync", "EIO", "index"),
    ("commit", "", ""),
]


@pytest.mark.parametrize("host", [2**20, SMALL])
@pytest.mark.parametrize(("call", "what", "only"), WRITES)
def test_a_step_that_cannot_be_stored_is_undone_and_goes_through_later(
    opened: Open, system: FaultySystem, commits: type[Commits], call: str, what: str, only: str, host: int
) -> None:
    with opened(host_budget=host) as engine, engine.workspace("notes") as ws:
        read(ws, 701)
        ask(ws, 1)
        before, n_steps = ws.history(), ws.n_tokens
        if call == "commit":
            commits.fail = True
        else:
            system.fail(call, what, only=only)
        for act in (lambda: read(ws, 400, 5), lambda: ask(ws, 7), lambda: read(ws, 400, 5)):
            with pytest.raises((StoreFull, StoreFailed)):
                act()
            assert ws.n_tokens == n_steps and np.array_equal(ws.history(), before)
            assert ws.stats().n_tokens == n_steps
        with engine.workspace() as other:  # that is not kept goes on
            read(other, 300, 9)
            assert ask(other, 3).n_generated == 30
        system.heal()
        commits.fail = False
        result = read(ws, 400, 5)
        assert (result.n_reused > 0) == (only != "segments")  # what was safe is not read again
        found = ask(ws, 2).tokens
    with opened() as engine, engine.workspace("notes") as ws:
        assert ws.n_tokens == n_steps + 400 + 50
        assert ask(ws, 3).tokens
    acts = (lambda w: read(w, 701), lambda w: ask(w, 1), lambda w: read(w, 400, 5), lambda w: ask(w, 2))
    assert found == expected(opened, *acts)


@pytest.mark.parametrize("commit_blocks", [16, 1000])
def test_records_that_cannot_be_written_do_not_stand_in_the_way_of_other_workspaces(
    opened: Open, system: FaultySystem, commit_blocks: int
) -> None:
    options = {"host_budget": SMALL, "commit_blocks": commit_blocks}
    with opened(**options) as engine, engine.workspace("one") as one, engine.workspace("two") as two:
        read(one, 301)
        read(two, 301, 1)
        family = one._opened.holding.place.family  # type: ignore[union-attr]
        system.fail("pwritev", "EIO", only=family)
        with pytest.raises(StoreError):
            read(one, 900, 2)
        read(two, 900, 3)
        assert ask(two, 4).n_generated == 30
        assert one.n_tokens == 301
        system.heal()
        read(one, 900, 2)
        assert ask(one, 5).n_generated == 30


@pytest.mark.parametrize("what", [SHORT, "EIO"])
def test_a_record_that_cannot_be_read_undoes_the_step_or_is_computed_again(
    opened: Open, system: FaultySystem, what: str
) -> None:
    acts = (lambda w: read(w, 1501), lambda w: ask(w, 1))
    with opened() as engine, engine.workspace("notes") as ws:
        acts[0](ws)
    with opened(host_budget=SMALL) as engine, engine.workspace("notes") as ws:
        system.fail("preadv", what, only="segments", times=3 if what == "EIO" else 1 << 60)
        if what == SHORT:
            found = ask(ws, 1).tokens
        else:
            try:
                ask(ws, 1)
            except StoreError:
                assert ws.n_tokens == 1501
            else:
                assert ws.stats().n_recomputed > 0
                ws.truncate(1501)
            system.heal()
            found = ask(ws, 1).tokens
        assert ws.n_tokens == 1551
    if what == SHORT:
        assert found == expected(opened, *acts)


def test_an_undo_that_cannot_tell_the_journal_is_still_whole(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise MemoryError

    with opened() as engine, engine.workspace("notes") as ws:
        read(ws, 90)
        before = ws.history().tolist()
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "read", fail)  # also of the undo
            with pytest.raises(MemoryError):
                read(ws, 200, 1)
        assert ws.history().tolist() == before
        ask(ws, 2)
        assert ws.history().tolist()[:90] == before
