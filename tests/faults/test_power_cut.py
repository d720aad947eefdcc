"""The power fails at any moment: what was acknowledged is there. Without any one of the syncs it is not."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from durable_run import BLOCK, N_K, make_memory, make_root, record_of
from power_cut import Pictures, PowerCut
from store_kill import Op, State, after, check_after, check_export, make_script, n_acknowledged, run_script

from kvmem_llama.errors import KvmemError
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.files import Files, install
from kvmem_llama.store.repair import verify_family

# Every place that syncs, and the operation that shows it.
SITES = {
    "writer._sync": "step",
    "segment.create_segment": "step",
    "segment.create_segment folder": "step",
    "row_files.put": "step",
    "row_files.put folder": "step",
    "family.create_family folder": "create",
    "root._make_folder folder": "create",
    "root.create folder": "create",
    "names.forget folder": "rename",
    "forking._copy_tail": "fork",
    "compact._gather": "compact",
    "segment_files.unlink folder": "compact",
    "root.remove_family folder": "import",
    "family.drop_files folder": "delete",
    "export.export_workspace": "export",
    "export.export_workspace folder": "export",
    "importing._copy_records": "import",
    "importing.import_workspace folder": "import",
}

ERASING = "deleting.finish_erasing"

N_SEEDS = 3  # for each group
N_TRIES = 12  # scripts that may pass without a sync before that is an error


def photographed(
    folder: Path, seed: int, group: str, skip: str | None
) -> tuple[list[Op], Pictures, PowerCut]:
    """Carries out a script; the pictures are what power cuts at some moments of it would have left."""
    rng = random.Random(seed)
    system = PowerCut()
    system.skip = skip
    folder.mkdir(parents=True)
    run = folder / "run"
    run.mkdir()
    # What is missing without a sync shows best where nothing is under way; the header of a segment is synced
    # with its first record, so it can be missing only before that.
    odds = {"acknowledged": 0.5, "": 0.02} if skip is None else {"acknowledged": 1.0, "segment.after": 0.5}
    files = Pictures(system, run, folder, rng, odds, most=20)
    ops = make_script(seed, group)
    try:
        run_script(run, ops, files)
    finally:
        install(Files())
    return ops, files, system


def check_picture(picture: Path, point: str, ops: list[Op]) -> None:
    """Everything that a kill must not harm; and where nothing was under way, nothing may be missing."""
    if point == "acknowledged":
        n_done = n_acknowledged(picture / "log")
        state: State = {}
        for op in ops[:n_done]:
            state = after(state, op)
        root = make_root(picture)
        for family in root.family_ids():
            # An old file of a lock holds nothing.
            findings = [
                f for f in verify_family(root, family).findings if f.kind != "file" or "locks/" not in f.where
            ]
            assert not findings, findings
        for name in state:
            root.find(name)
        kind, name, *_ = ops[n_done - 1]
        with root.renaming(None) as names:
            assert set(names) == set(state), f"{kind}: names {set(names)}, workspaces {set(state)}"
        if kind == "export":
            assert check_export(root, picture / f"export {n_done - 1}", state[name]), "no export"
    check_after(picture, ops)


@pytest.mark.parametrize("group", sorted(set(SITES.values())))
def test_what_was_acknowledged_survives_a_power_cut(folder: Path, group: str) -> None:
    points: Counter[str] = Counter()
    for seed in range(N_SEEDS):
        ops, files, system = photographed(folder / str(seed), seed, group, None)
        assert set(system.sites) <= {*SITES, ERASING}, "a sync that no test leaves out"
        for picture, point in files.taken:
            check_picture(picture, point, ops)
            points[point] += 1
    assert points["acknowledged"] > 5 and len(points) > 1


@pytest.mark.parametrize("site", SITES)
def test_a_sync_that_is_left_out_is_noticed(folder: Path, site: str) -> None:
    for seed in range(N_TRIES):
        ops, files, system = photographed(folder / str(seed), seed, SITES[site], site)
        for picture, point in files.taken if system.sites[site] else []:
            try:
                check_picture(picture, point, ops)
            except (AssertionError, KvmemError):
                return
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("skip", [None, ERASING])
def test_the_kv_of_a_deleted_workspace_does_not_come_back(folder: Path, skip: str | None) -> None:
    """Its slots lie in a segment that a fork still uses, so they are overwritten."""
    folder.mkdir(parents=True)
    system = PowerCut()
    system.skip = skip
    install(Files(system))
    try:
        root = make_root(folder)
        parent = make_memory(root, "parent", 2 * BLOCK)
        child = parent.fork("child")
        parent.step([7] * BLOCK)
        record = record_of(parent.tokens, BLOCK)[:N_K].tobytes()
        parent.close()
        child.close()
        assert any(record in path.read_bytes() for path in folder.rglob("*.gguf"))
        delete_workspace(root, parent.place)
        system.cut()
    finally:
        install(Files())
    assert any(record in path.read_bytes() for path in folder.rglob("*.gguf")) == (skip is not None)


class Told(sqlite3.Connection):
    """Notes how a commit is made durable."""

    modes: set[tuple[str, int]] = set()  # noqa: RUF012
    change: tuple[str, str] = ("", "")  # what is replaced in every statement: a defect to be found

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            journal = super().execute("PRAGMA journal_mode").fetchone()[0]
            self.modes.add((journal, super().execute("PRAGMA synchronous").fetchone()[0]))
        return super().execute(sql.replace(*self.change), *args)


@pytest.mark.parametrize("durability, change, is_synced", [
    ("full", ("", ""), True),
    ("full", ("synchronous=FULL", "synchronous=NORMAL"), False),
    ("full", ("journal_mode=WAL", "journal_mode=MEMORY"), False),
    ("relaxed", ("", ""), False),
])  # fmt: skip
def test_a_commit_of_the_catalog_waits_for_the_disk(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: str,
    change: tuple[str, str],
    is_synced: bool,
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, factory=Told, **options))
    monkeypatch.setattr(Told, "change", change)
    monkeypatch.setattr(Told, "modes", set())
    make_memory(make_root(folder, durability=durability), "notes", 30).close()
    # FULL and WAL: the log is synced with every commit.
    assert (Told.modes == {("wal", 2)}) == is_synced and Told.modes
