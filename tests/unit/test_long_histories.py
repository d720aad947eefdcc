"""What opening and forking cost does not depend on the length of the history, beyond index and catalog."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_run import checked_sessions, faked_template, text
from long_history import BLOCK, CountingFiles, bytes_of_process, fake_engine, write_history

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.store import files as files_module
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.store.tables import ALL_TABLES, BLOCKS, SLOTS
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
SHORT, LONG = 20_007, 200_007  # tokens; the last block of either is not complete
MIB = 2**20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with the workspace `notes`, by its number of tokens."""
    folders = {n: tmp_path_factory.mktemp(f"history-{n}") for n in (SHORT, LONG)}
    for n, folder in folders.items():
        write_history(folder, "notes", n)
    return folders


@pytest.fixture
def counting() -> Iterator[CountingFiles]:
    files = CountingFiles()
    before = files_module.install(files)
    yield files
    files_module.install(before)


def copied(made: dict[int, Path], n: int, to: Path) -> Path:
    shutil.copytree(made[n], to)
    return to


def n_bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"*/{pattern}"))


def ask(ws: Workspace, seed: int) -> tuple[Any, ...]:
    """Tokens and recalled blocks of an answer to 20 tokens."""
    result = ws.step(text(20, seed), sampling=SamplingParams(temp=0), max_tokens=5).result()
    return result.tokens, [[(b.start, b.count, b.rank, b.why) for b in r.blocks] for r in result.recalls]


@pytest.mark.parametrize("n", [SHORT, LONG])
def test_opening_reads_index_and_catalog_only(
    made: dict[int, Path], tmp_path: Path, counting: CountingFiles, n: int
) -> None:
    folder = copied(made, n, tmp_path / "data")
    index, catalog = n_bytes(folder, "index/*.mk"), n_bytes(folder, "catalog.sqlite*")
    assert index + catalog > n  # bytes
    with fake_engine(folder) as engine:
        before = bytes_of_process("rchar")
        with engine.workspace("notes") as ws:
            n_read = bytes_of_process("rchar") - before
            assert counting.n_read[".gguf"] == 0
            assert index <= counting.n_read[".mk"] <= index + 4096
            assert n_read <= index + catalog + MIB
            assert ws.n_tokens == n


@pytest.mark.parametrize("n", [SHORT, LONG])
def test_a_question_after_opening_evaluates_and_reads_what_it_needs(
    made: dict[int, Path], tmp_path: Path, n: int
) -> None:
    with (
        fake_engine(copied(made, n, tmp_path / "data")) as engine,
        engine.workspace("notes") as ws,
    ):
        ask(ws, 1)
        # the question twice, its answer once
        assert sum(len(batch) for batch in engine.model.batches) == 20 + 20 + 5
        tiers = ws.stats().tiers
        assert tiers is not None
        # the canonical view, then that of the recall, and the partial block that is continued
        assert 0 < tiers.n_reads + tiers.n_hits <= 2 * engine.core.n_view // BLOCK + 2


def rows_of(ws: Workspace) -> dict[str, int]:
    with ws._opened.holding.family.catalog.snapshot() as db:  # type: ignore[union-attr]
        return {t.name: db.execute(f"SELECT count(*) FROM {t.name}").fetchone()[0] for t in ALL_TABLES}


def cost_of_a_fork(folder: Path, files: CountingFiles) -> tuple[dict[str, int], dict[str, int], int]:
    """(rows added by table, bytes written by kind of file, bytes written to the catalog's log)"""
    with fake_engine(folder) as engine, engine.workspace("notes") as ws:
        rows = rows_of(ws)
        files.n_written.clear()
        before = bytes_of_process("wchar")
        with ws.fork("branch") as fork:
            n_written = bytes_of_process("wchar") - before
            by_file = dict(files.n_written)
            added = {name: n - rows[name] for name, n in rows_of(fork).items()}
    return added, by_file, n_written - sum(by_file.values())


def test_a_fork_writes_as_many_rows_and_bytes_for_ten_times_the_history(
    made: dict[int, Path], tmp_path: Path, counting: CountingFiles
) -> None:
    short = cost_of_a_fork(copied(made, SHORT, tmp_path / "short"), counting)
    long = cost_of_a_fork(copied(made, LONG, tmp_path / "long"), counting)
    assert long[:2] == short[:2]
    assert set(short[0].values()) == {0, 1}
    # Rows go to pages; one that is full is split, wherever the table's end happens to be.
    assert abs(long[2] - short[2]) <= 4 * 4200 and short[2] < 40 * 4200


@pytest.mark.parametrize("n", [SHORT, LONG])
@pytest.mark.parametrize("gone", ["notes", "branch"])
def test_both_sides_of_a_fork_go_on_and_either_can_be_deleted(
    made: dict[int, Path], tmp_path: Path, n: int, gone: str
) -> None:
    expected = {}
    with fake_engine(copied(made, n, tmp_path / "alone")) as engine, engine.workspace("notes") as ws:
        for name, seed in (("notes", 2), ("branch", 3)):
            expected[name] = ask(ws, seed)
            ws.truncate(n)
        base = ws.history().tolist()
    folder = copied(made, n, tmp_path / "forked")
    with fake_engine(folder) as engine, engine.workspace("notes") as ws, ws.fork("branch") as fork:
        assert ask(fork, 3) == expected["branch"]
        assert ask(ws, 2) == expected["notes"]
    root = Root(folder)
    delete_workspace(root, root.find(gone))
    stays, seed = ("branch", 3) if gone == "notes" else ("notes", 2)
    place = root.find(stays)
    with root.family(place.family) as family, family.catalog.snapshot() as db:
        n_used = sum(row.used > 0 for row in SLOTS.rows(db))
        assert n_used == sum(1 for _ in BLOCKS.rows(db)) == -(-(n + 25) // BLOCK)
    assert not verify_family(root, place.family).findings
    with fake_engine(folder) as engine, engine.workspace(stays) as ws:
        assert ws.history().tolist() == [*base, *text(20, seed).tolist(), *expected[stays][0]]
        ws.truncate(n)
        assert ask(ws, seed) == expected[stays]
