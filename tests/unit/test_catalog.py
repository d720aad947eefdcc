"""Durable workspaces end to end, without a model: what is committed is there again, whole, after opening."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from durable_run import BLOCK, Memory, make_binding, make_memory, make_root, reopened

from kvmem_llama.errors import (
    CatalogDamaged,
    FormatTooNew,
    FormatTooOld,
    StoreFailed,
    StoreFull,
    StoreLocked,
    WorkspaceExists,
    WorkspaceMismatch,
    WorkspaceNotFound,
)
from kvmem_llama.store.catalog import Catalog, connect_sqlite
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.files import Files
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.store.schema import FORMAT
from kvmem_llama.store.tables import BLOCKS, META, SEGMENTS, SLOTS


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return make_root(tmp_path)


def test_what_was_committed_is_there_after_opening(root: Root) -> None:
    memory = make_memory(root, n_tokens=21)
    memory.step([7, 8, 9], kind="ask", answer="nine")
    memory.step([1], kind="ask", answer="one")
    memory = reopened(memory)
    memory.check([*range(21), 7, 8, 9, 1])
    memory.check_index()
    assert [(s.kind, s.start, s.end, s.answer) for s in memory.restored.steps] == [
        ("read", 0, 21, ""),
        ("ask", 21, 24, "nine"),
        ("ask", 24, 25, "one"),
    ]
    memory.close()


def test_text_that_is_not_quite_text_is_kept_as_far_as_it_is(root: Root) -> None:
    place = root.create("notes", make_binding(), system="be \udce9 brief")
    memory = Memory(root, place)
    memory.step([1, 2], kind="ask", answer="a\udc80b\0c")
    memory = reopened(memory)
    assert memory.restored.system == "be ? brief"
    assert memory.restored.steps[0].answer == "a?b\0c"
    memory.close()


def test_one_that_is_closed_and_opened_at_every_step_is_the_same_as_one_that_never_was(root: Root) -> None:
    rng = np.random.default_rng(0)
    plain, again = make_memory(root, "plain"), make_memory(root, "again")
    for _ in range(12):
        ids = rng.integers(0, 50, rng.integers(1, 11)).tolist()
        for memory in (plain, again):
            memory.step(ids)
        again = reopened(again)
        again.check(plain.tokens)
        again.check_index()
    plain.check()
    for memory in (plain, again):
        memory.close()


def test_truncation_and_forks_keep_both_sides_right(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    fork = memory.fork("fork")
    fork.check(range(30))
    memory.step([1, 2, 3])
    memory.truncate(13)
    memory.step([4, 5])
    fork.step([9] * 5)
    memory, fork = reopened(memory), reopened(fork)
    memory.check([*range(13), 4, 5])
    fork.check([*range(30), 9, 9, 9, 9, 9])
    memory.check_index()
    fork.check_index()
    fork.truncate(0)
    memory.close()
    fork = reopened(fork)
    fork.check([])
    fork.close()
    delete_workspace(root, memory.place)
    fork = reopened(fork)
    fork.step([1] * 9)
    fork.check([1] * 9)
    fork.close()


def test_deleting_the_parent_leaves_the_fork_whole(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    fork = memory.fork("fork")
    memory.close()
    fork.step([9] * 5)
    fork.close()
    delete_workspace(root, memory.place)
    assert [item.row.name for item in root.list() if item.row] == ["fork"]
    fork = reopened(fork)
    fork.check([*range(30), 9, 9, 9, 9, 9])
    fork.close()


def test_deleting_the_last_one_leaves_nothing(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    memory.close()
    delete_workspace(root, memory.place)
    assert root.list() == []
    assert sorted(path.name for path in root.folder.iterdir()) == ["last", "names.json", "root.lock"]
    with pytest.raises(WorkspaceNotFound):
        Holding.open(root, memory.place)


def test_a_deleted_fork_leaves_no_byte_of_what_was_its_own(root: Root) -> None:
    memory = make_memory(root, n_tokens=8)
    fork = memory.fork("the secret fork")
    fork.step([777] * 5, kind="ask", answer="the secret answer")
    record = fork.store.get(fork.blocks[-2].ref).tobytes()[:512]
    fork.close()
    memory.close()
    assert any(record in path.read_bytes() for path in root.folder.rglob("*") if path.is_file())
    delete_workspace(root, fork.place)
    needles = [record, b"secret", fork.place.workspace.encode(), np.full(5, 777, "<i4").tobytes()]
    for path in [path for path in root.folder.rglob("*") if path.is_file() and path.name != "last"]:
        assert not any(needle in path.read_bytes() for needle in needles), path
    memory = reopened(memory)
    memory.check(range(8))
    memory.close()


def test_blocks_read_by_an_unfinished_step_are_kept_and_adopted(root: Root) -> None:
    memory = make_memory(root, n_tokens=6)
    memory.read_ahead([5] * 20)
    assert len(memory.ahead) == 5
    memory = reopened(memory)
    memory.check(range(6))
    assert [read.start for read in memory.ahead] == [4, 8, 12, 16, 20]
    memory.step([5] * 9)
    memory.check([*range(6), *[5] * 9])
    memory = reopened(memory)
    memory.check()
    assert not memory.ahead
    with memory.holding.family.catalog.snapshot() as db:
        used = [row for row in SLOTS.rows(db) if row.used]
        assert len(used) == len(list(BLOCKS.rows(db))) == 4
    memory.close()


def test_a_block_that_fell_to_its_tokens_is_recomputed_and_stays(root: Root) -> None:
    memory = make_memory(root, n_tokens=8)
    first = memory.blocks[0]
    location = memory.store.locate(first.ref)
    assert location is not None
    memory.journal.fall([location])
    memory.store.settle([], [location])
    memory = reopened(memory)
    assert memory.store.where(memory.blocks[0].ref) == "tokens"
    memory.check_index()
    record = np.arange(memory.disk.format.record_nbytes, dtype=np.uint8)
    memory.store.restore(memory.blocks[0].ref, record)
    memory.journal.recomputed(0, memory.blocks[0].ref)
    memory = reopened(memory)
    np.testing.assert_array_equal(memory.store.get(memory.blocks[0].ref), record)
    assert memory.blocks[0].origin == 1 and not memory.restored.n_made
    memory.check_index()  # its row is the one that it had
    memory.close()


def test_slots_are_used_again_in_the_same_process(root: Root) -> None:
    memory = make_memory(root, n_tokens=1)
    for _ in range(40):
        memory.step([1])
        memory.truncate(1)
    with memory.holding.family.catalog.snapshot() as db:
        assert len(list(SEGMENTS.rows(db))) == 1
    memory.check([0])
    memory.close()


def test_a_disk_budget_makes_the_coldest_blocks_fall(root: Root) -> None:
    memory = make_memory(root, "notes", 0)
    memory.close()
    slot = memory.disk.format.slot_nbytes
    memory = Memory(root, memory.place, budget=6 * slot, host_records=4)
    for i in range(12):
        memory.step([i] * BLOCK)
    memory = reopened(memory)
    tiers = [memory.store.where(block.ref) for block in memory.blocks]
    assert tiers.count("disk") == 6
    memory.check_index()
    memory.close()


def test_heat_cools_while_others_are_recalled(root: Root) -> None:
    memory = make_memory(root, n_tokens=12)
    for _ in range(3):
        memory.step([1])
    warm = memory.store.heat(memory.blocks[0].ref)
    memory = reopened(memory)
    recent, total = memory.store.heat(memory.blocks[0].ref)
    assert total == warm[1] == 3 and recent == pytest.approx(warm[0])
    assert memory.store.heat(memory.blocks[-1].ref) == (0.0, 0)
    memory.close()


# -- who may open what


def test_one_writer_and_any_number_of_readers(root: Root) -> None:
    memory = make_memory(root, n_tokens=10)
    with pytest.raises(StoreLocked, match=r"this process on .* since") as caught:
        Holding.open(root, memory.place)
    assert caught.value.name == "notes"
    reader = Memory(root, memory.place, read_only=True)
    reader.check(range(10))
    memory.step([1, 2])
    reader.check(range(10))
    with pytest.raises(StoreFailed, match="read-only"):
        reader.step([1])
    reader.close()
    memory.close()
    Memory(root, memory.place).close()


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("model", "ff" * 16, "fingerprint ffff"),
        ("block_size", 16, "16 tokens"),
        ("cache_type_k", "q8_0", "q8_0"),
        ("cache_type_v", "q4_0", "q4_0"),
        ("raw_k_type", "f32", "f32"),
        ("rope", "base 5, scale 0", "base 5"),
        ("layout", "another", "another"),
    ],
)
def test_another_model_or_layout_is_refused_with_both_sides_named(
    root: Root, field: str, value: object, shown: str
) -> None:
    place = root.create("notes", make_binding())
    with pytest.raises(WorkspaceMismatch, match=shown) as caught:
        Holding.open(root, place, make_binding(**{field: value}))
    assert str(caught.value.stored) in str(caught.value)
    Holding.open(root, place, make_binding()).close()


def test_a_newer_format_is_refused_and_not_touched(root: Root) -> None:
    place = root.create("notes", make_binding())
    path = root.folder / place.family / "catalog.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(FormatTooNew, match=f"format {FORMAT + 1}"):
        Holding.open(root, place)
    assert [type(item.error) for item in root.list()] == [FormatTooNew]
    assert path.read_bytes() == before


def test_a_catalog_from_before_the_counts_is_refused_as_older_and_not_as_damaged(root: Root) -> None:
    memory = make_memory(root, n_tokens=10)
    memory.close()
    path = root.folder / memory.place.family / "catalog.sqlite"
    with sqlite3.connect(path) as db:  # what format 1 was
        for column in ("n_steps", "n_pins"):
            db.execute(f"ALTER TABLE workspaces DROP COLUMN {column}")
        db.execute("DELETE FROM meta WHERE key='n_workspaces'")
        db.execute("PRAGMA user_version=1")
    db.close()
    before = path.read_bytes()
    with pytest.raises(FormatTooOld, match=f"the older format 1, .* reads format {FORMAT}") as caught:
        Holding.open(root, memory.place)
    assert caught.value.found == 1 and "Export" in caught.value.hint
    with pytest.raises(FormatTooOld):
        verify_family(root, memory.place.family, repair=True)
    assert [type(item.error) for item in root.list()] == [FormatTooOld]
    with pytest.raises(WorkspaceNotFound, match="older format 1") as unread:
        root.find("notes")
    assert unread.value.may_exist  # so that no empty one takes its place
    assert path.read_bytes() == before


def test_a_family_folder_that_was_copied_is_refused(root: Root) -> None:
    place = root.create("notes", make_binding())
    other = place.family[:-1] + ("0" if place.family[-1] != "0" else "1")
    os.rename(root.folder / place.family, root.folder / other)
    assert [type(item.error) for item in root.list()] == [WorkspaceMismatch]


def test_folders_and_files_are_the_owners_alone(root: Root) -> None:
    memory = make_memory(root, n_tokens=10)
    for path in [root.folder, *root.folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    memory.close()


# -- opening is lazy


def test_opening_reads_index_and_catalog_only(root: Root) -> None:
    memory = make_memory(root, n_tokens=400)
    memory.close()
    read: list[Path] = []

    class Watched(Files):
        def read_into(self, fd: int, buffers: object, offset: int) -> int:
            read.append(self.path_of(fd))
            return super().read_into(fd, buffers, offset)  # type: ignore[arg-type]

    watching = Root(root.folder, Watched())
    memory = Memory(watching, memory.place)
    assert {path.parent.name for path in read} <= {"index", "locks", "workspaces"}
    memory.close()


# -- faults


def test_a_commit_that_was_acknowledged_and_is_gone_is_noticed(root: Root) -> None:
    memory = make_memory(root, n_tokens=10)
    place = memory.place
    memory.close()
    path = root.folder / place.family / "catalog.sqlite"
    old = path.read_bytes()
    memory = Memory(root, place)
    memory.step([1])
    memory.close()
    path.write_bytes(old)
    with pytest.raises(CatalogDamaged, match=r"2 commits .* were acknowledged, it has 1"):
        Holding.open(root, place)


def test_a_missing_catalog_is_not_made_anew(root: Root) -> None:
    place = root.create("notes", make_binding())
    path = root.folder / place.family / "catalog.sqlite"
    path.unlink()
    with pytest.raises(StoreFailed, match="missing"):
        Holding.open(root, place)
    assert not path.exists()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (sqlite3.SQLITE_FULL, StoreFull),
        (sqlite3.SQLITE_IOERR, StoreFailed),
        (sqlite3.SQLITE_READONLY, StoreFailed),
        (sqlite3.SQLITE_BUSY, StoreFailed),
        (sqlite3.SQLITE_CORRUPT, CatalogDamaged),
    ],
)
@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "INSERT INTO meta", "COMMIT"])
def test_a_transaction_that_fails_changes_nothing_and_the_next_one_works(
    tmp_path: Path, fault: int, error: type[Exception], statement: str
) -> None:
    (tmp_path / "locks").mkdir()
    path = tmp_path / "catalog.sqlite"
    Catalog.create(path)
    armed: list[str] = []

    class Failing(sqlite3.Connection):
        def execute(self, sql: str, *args: object) -> sqlite3.Cursor:  # type: ignore[override]
            if armed and sql.startswith(armed[0]):
                armed.clear()
                failure = sqlite3.OperationalError("injected")
                failure.sqlite_errorcode = fault
                raise failure
            return super().execute(sql, *args)  # type: ignore[arg-type]

    def connect(uri: str) -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, factory=Failing)

    catalog = Catalog(path, connect=connect)

    def put(key: str) -> Callable[[sqlite3.Connection], None]:
        return lambda db: db.execute("INSERT INTO meta VALUES (?, 'v', 0)", (key,)) and None

    armed.append(statement)
    with pytest.raises(error):
        catalog.write(put("lost"))
    catalog.write(put("kept"))
    with catalog.snapshot() as db:
        assert [row[0] for row in META.raw(db)] == ["kept"]
    catalog.close()
    catalog.close()
    with pytest.raises(StoreFailed, match="closed"):
        catalog.write(put("late"))


def test_a_commit_that_failed_is_written_over_at_once(tmp_path: Path) -> None:
    """Else its pages, if they did reach the log, would be taken for a transaction after a crash."""
    (tmp_path / "locks").mkdir()
    path = tmp_path / "catalog.sqlite"
    Catalog.create(path)
    said: list[str] = []

    class Failing(sqlite3.Connection):
        def execute(self, sql: str, *args: object) -> sqlite3.Cursor:  # type: ignore[override]
            said.append(sql)
            if said.count("COMMIT") == 1 and sql == "COMMIT":
                raise sqlite3.OperationalError("injected")
            return super().execute(sql, *args)  # type: ignore[arg-type]

    def connect(uri: str) -> sqlite3.Connection:
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, factory=Failing)

    catalog = Catalog(path, connect=connect)
    with pytest.raises(CatalogDamaged, match="injected"):
        catalog.write(lambda db: None)
    catalog.close()
    end = said[said.index("COMMIT") :]
    assert end.index("ROLLBACK") < end.index(f"PRAGMA user_version={FORMAT}") and end.count("COMMIT") == 2


def test_a_commit_that_cannot_be_written_over_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    path = tmp_path / "catalog.sqlite"
    Catalog.create(path)
    made: list[sqlite3.Connection] = []

    class Failing(sqlite3.Connection):
        def execute(self, sql: str, *args: object) -> sqlite3.Cursor:  # type: ignore[override]
            if sql == "COMMIT":
                failure = sqlite3.OperationalError("injected")
                failure.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise failure
            return super().execute(sql, *args)  # type: ignore[arg-type]

    def connect(uri: str) -> sqlite3.Connection:
        made.append(
            sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, factory=Failing)
        )
        return made[-1]

    catalog = Catalog(path, connect=connect)
    for _ in range(3):
        with pytest.raises(StoreFailed, match="injected"):
            catalog.write(lambda db: db.execute("INSERT INTO meta VALUES ('k', 'v', 0)") and None)
        assert not made[-1].in_transaction
        other = Catalog(path)
        other.write(lambda db: None)
        other.close()
    catalog.close()


def test_a_catalog_that_vanished_does_not_hide_why_a_commit_failed(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    path = tmp_path / "catalog.sqlite"
    Catalog.create(path)

    class Vanishing(sqlite3.Connection):
        def execute(self, sql: str, *args: object) -> sqlite3.Cursor:  # type: ignore[override]
            if sql in ("COMMIT", "ROLLBACK"):  # so the connection is given up, and none can be had after it
                path.unlink(missing_ok=True)
                failure = sqlite3.OperationalError("injected")
                failure.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise failure
            return super().execute(sql, *args)  # type: ignore[arg-type]

    def connect(uri: str) -> sqlite3.Connection:
        return sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, factory=Vanishing
        )

    catalog = Catalog(path)
    writer = Catalog(path, connect=connect)
    with pytest.raises(StoreFailed, match="injected"):
        writer.write(lambda db: db.execute("INSERT INTO meta VALUES ('k', 'v', 0)") and None)
    with pytest.raises(StoreFailed, match="missing"):
        writer.write(lambda db: None)
    writer.close()
    catalog.close()


def test_a_full_disk_is_told_by_sqlite_itself(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    path = tmp_path / "catalog.sqlite"
    Catalog.create(path)

    def connect(uri: str) -> sqlite3.Connection:
        db = connect_sqlite(uri)
        db.execute("PRAGMA max_page_count=40")
        return db

    catalog = Catalog(path, connect=connect)
    with pytest.raises(StoreFull):
        catalog.write(
            lambda db: db.execute("INSERT INTO meta VALUES ('k', hex(zeroblob(500000)), 0)") and None
        )
    catalog.write(lambda db: db.execute("INSERT INTO meta VALUES ('k', 'small', 0)") and None)
    catalog.close()


def test_readers_see_one_moment_while_others_write(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    path = tmp_path / "catalog.sqlite"
    Catalog.create(path)
    first, second = Catalog(path), Catalog(path)
    errors: list[BaseException] = []

    def write(catalog: Catalog, name: str) -> None:
        try:
            for i in range(40):
                rows = [(f"{name} {i} {half}", "v", 0) for half in "ab"]
                catalog.write(
                    lambda db, r=rows: db.executemany("INSERT INTO meta VALUES (?,?,?)", r) and None
                )
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=write, args=(catalog, name))
        for catalog, name in ((first, "x"), (first, "y"), (second, "z"))
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with second.snapshot() as db:
            keys = [str(row[0]) for row in META.raw(db)]
            assert len(keys) == len(list(META.raw(db)))
        assert sum(key.endswith("a") for key in keys) == sum(key.endswith("b") for key in keys)
    assert not errors
    with first.snapshot() as db:
        assert len(list(META.raw(db))) == 240
    first.close()
    second.close()


def test_nothing_is_left_of_a_creation_that_failed(root: Root) -> None:
    class Full(Files):
        def at(self, point: str) -> None:
            if point == "create.folder":
                raise StoreFull("x", 1)

    with pytest.raises(StoreFull):
        Root(root.folder, Full()).create("notes", make_binding())
    assert root.list() == [] and not list(root.folder.glob(".*"))
    root.create("notes", make_binding())
    with pytest.raises(WorkspaceExists):
        root.create("notes", make_binding())


def test_a_segment_whose_transaction_failed_is_made_again(root: Root) -> None:
    class Once(Files):
        armed = True

        def at(self, point: str) -> None:
            if point == "segment.statements" and self.armed:
                self.armed = False
                raise StoreFull("x", 1)

    memory = make_memory(Root(root.folder, Once()))
    with pytest.raises(StoreFull):
        memory.step(range(4))
    memory.check([])
    memory.step(range(4))
    memory = reopened(memory)
    memory.check(range(4))
    with memory.holding.family.catalog.snapshot() as db:
        assert [row.number for row in SEGMENTS.rows(db)] == [1]
    memory.close()


def test_a_clock_that_goes_backwards_changes_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [2_000_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    memory = make_memory(root, n_tokens=5)
    now[0] = 1_000_000_000.0
    memory.step([1])
    other = make_memory(root, "other", 3)
    now[0] = 0.0
    memory = reopened(memory)
    memory.check([*range(5), 1])
    assert root.last() == memory.place
    memory.close()
    other.close()
