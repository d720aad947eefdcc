"""Verify finds what is wrong and mends what can be mended; compact gives back what is not needed."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from durable_run import BLOCK, Memory, make_memory, make_root, open_records, reopened
from store_faults import Killed, Stops

from kvmem_llama.errors import CatalogDamaged, StoreLocked
from kvmem_llama.store import content
from kvmem_llama.store.compact import Compacted, compact
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.family import Family
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.store.segment import SegmentRow
from kvmem_llama.store.tables import SEGMENTS, SLOTS
from kvmem_llama.store.verify import Report


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return make_root(tmp_path)


def verify(memory: Memory, **options: bool) -> Report:
    return verify_family(memory.root, memory.place.family, **options)


def folder_of(memory: Memory) -> Path:
    return memory.root.folder / memory.place.family


def flip(memory: Memory, number: int) -> Path:
    """Flips one bit in the middle of the record of a block; the workspace must be open."""
    at = memory.store.locate(memory.blocks[number].ref)
    assert at is not None
    format = memory.disk.format
    path = folder_of(memory) / "segments" / f"{at.segment:06}.gguf"
    with path.open("r+b") as file:
        file.seek(format.offset(SegmentRow(at.segment, 4), at.slot) + 100)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return path


def test_what_is_sound_has_no_findings(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    fork = memory.fork("fork")
    fork.step([1] * 7)
    memory.truncate(9)
    fork.read_ahead([3] * 9)
    report = verify(memory)
    assert report.is_sound, report.findings
    assert (report.n_workspaces, report.n_segments) == (2, 5)
    assert report.n_records == 13 and report.n_index_rows == 13
    memory.close()
    fork.close()


def test_verify_runs_beside_a_writer(root: Root) -> None:
    memory = make_memory(root, n_tokens=5)
    for i in range(6):
        memory.step([i] * 3)
        assert verify(memory).findings == []
    with pytest.raises(StoreLocked):
        verify(memory, repair=True)
    memory.close()


def test_a_damaged_record_falls_to_its_tokens(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    flip(memory, 3)
    memory.close()
    report = verify(memory)
    assert [(f.kind, f.where.split(" (")[0]) for f in report.findings] == [("record", "block 3")]
    assert verify(memory, repair=True).n_repaired == 1
    assert verify(memory).is_sound
    memory = reopened(memory)
    assert [memory.store.where(block.ref) for block in memory.blocks].count("tokens") == 1
    memory.check_index()
    memory.close()


def test_a_missing_segment_is_confined_to_its_blocks(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    memory.close()
    (folder_of(memory) / "segments" / "000001.gguf").unlink()
    report = verify(memory)
    assert {f.kind for f in report.findings} == {"segment", "record"} and len(report.findings) == 5
    verify(memory, repair=True)
    assert verify(memory).is_sound
    memory = reopened(memory)
    assert [memory.store.where(block.ref) for block in memory.blocks] == ["tokens"] * 4 + ["disk"] * 4
    memory.step([1] * 20)
    memory = reopened(memory)
    assert len(memory.tokens) == 50 and memory.store.where(memory.blocks[-1].ref) == "disk"
    memory.close()


def test_a_damaged_header_is_written_again(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    memory.close()
    path = folder_of(memory) / "segments" / "000002.gguf"
    whole = path.read_bytes()
    path.write_bytes(b"X" + whole[1:])
    assert "segment" in {f.kind for f in verify(memory).findings}
    verify(memory, repair=True)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", ["delete", "flip", "header"])
def test_an_index_is_made_again_when_the_workspace_is_opened(root: Root, damage: str) -> None:
    memory = make_memory(root, n_tokens=30)
    memory.close()
    path = next((folder_of(memory) / "index").iterdir())
    whole = path.read_bytes()
    match damage:
        case "delete":
            path.unlink()
        case "flip":
            path.write_bytes(whole[:-130] + bytes([whole[-130] ^ 4]) + whole[-129:])
        case "header":
            path.write_bytes(b"x" + whole[1:])
    report = verify(memory)
    assert {f.kind for f in report.findings} == {"index"}
    memory = reopened(memory)
    memory.check()
    memory.check_index()
    assert path.read_bytes() == whole
    assert verify(memory).is_sound
    memory.close()


def test_a_block_without_record_and_index_row_is_named(root: Root) -> None:
    memory = make_memory(root, n_tokens=12)
    at = memory.store.locate(memory.blocks[1].ref)
    assert at is not None
    memory.journal.fall([at])
    memory.close()
    next((folder_of(memory) / "index").iterdir()).unlink()
    memory = Memory(root, memory.place)
    assert memory.restored.unscored == [1]
    memory.close()


@pytest.mark.parametrize(
    ("statement", "is_mended"),
    [
        ("UPDATE blocks SET checksum = zeroblob(16) WHERE number = 2", True),
        ("UPDATE blocks SET start = 99 WHERE number = 0", True),
        ("UPDATE blocks SET count = 3 WHERE number = 7", True),
        ("UPDATE steps SET answer = 'no' WHERE number = 1", True),
        ('UPDATE steps SET "end" = 31 WHERE number = 0', True),
        ("UPDATE texts SET text = 'no' WHERE number = 1", True),
        ("UPDATE heat SET total = 77", True),
        ("UPDATE pins SET start = 3", True),
        ("UPDATE slots SET generation = 77 WHERE slot = 1", True),
        ("UPDATE slots SET used = 0 WHERE slot = 1", True),
        ("UPDATE segments SET owner = 'x'", True),
        ("UPDATE workspaces SET used = 7", True),
        ("UPDATE tokens SET ids = zeroblob(120)", False),
        ("UPDATE lineages SET created = 7", False),
        ("DELETE FROM slots WHERE slot = 1", True),
        ("DELETE FROM segments", True),
    ],
)
def test_a_changed_row_is_found_and_mended_from_what_is_left(
    root: Root, statement: str, is_mended: bool
) -> None:
    memory = make_memory(root, n_tokens=25)
    memory.step([1] * 5, kind="ask", answer="yes")
    memory.journal.pin([(0, 4)])
    tokens = memory.tokens
    memory.holding.family.catalog.write(lambda db: db.execute(statement) and None)
    memory.close()
    report = verify(memory)
    assert report.findings
    report = verify(memory, repair=True)
    assert (report.n_repaired > 0) == is_mended
    again = verify(memory)
    assert all(f.kind == "index" for f in again.findings) == is_mended, again.findings
    if is_mended:
        memory = Memory(root, memory.place)
        assert memory.tokens == tokens
        for block in memory.blocks:
            if memory.store.where(block.ref) != "tokens":
                memory.store.get(block.ref)
        memory.step([2] * 9)
        memory.close()


def damaged(memory: Memory, *statements: str) -> None:
    """Closes a workspace and runs statements on its catalog, past everything that guards it."""
    memory.close()
    with sqlite3.connect(folder_of(memory) / "catalog.sqlite") as db:
        for statement in statements:
            assert db.execute(statement).rowcount > 0, statement
    db.close()


@pytest.fixture
def few_tokens_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "CHUNK", 16)


def long_memory(root: Root) -> Memory:
    """More tokens than fit one row of them; three steps and three pins."""
    memory = make_memory(root, n_tokens=30)
    memory.step([1] * 5, kind="ask", answer="yes")
    memory.step([2] * 5, kind="ask", answer="no")
    memory.journal.pin([(0, 4), (8, 12), (36, 40)])
    return memory


@pytest.mark.usefixtures("few_tokens_per_row")
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DELETE FROM pins WHERE number = 2", "2 of the 3 pins"),
        ("DELETE FROM pins WHERE number = 0", "2 of the 3 pins"),
        ("DELETE FROM pins", "0 of the 3 pins"),
        ("DELETE FROM steps WHERE number = 2", "2 of the 3 steps"),
        ("DELETE FROM steps WHERE number = 1", "step 1 of lineage 1 is missing"),
        ("DELETE FROM steps", "0 of the 3 steps"),
    ],
)
def test_a_missing_row_is_noticed_and_a_repair_goes_on_without_it(
    root: Root, statement: str, what: str
) -> None:
    memory = long_memory(root)
    tokens = memory.tokens
    damaged(memory, statement)
    with pytest.raises(CatalogDamaged, match=what):
        Memory(root, memory.place)
    report = verify(memory)
    assert [f.kind for f in report.findings] == ["count"] and what in report.findings[0].what
    assert verify(memory, repair=True).n_repaired == 1
    assert verify(memory).findings == []
    memory = Memory(root, memory.place)
    memory.check(tokens)
    steps = memory.restored.steps
    assert [step.start for step in steps] == [0, *(step.end for step in steps[:-1])]
    assert steps[-1].end == len(tokens)
    memory.step([3] * 9)
    memory.truncate(34)
    memory = reopened(memory)
    assert len(memory.tokens) == 34
    memory.close()
    assert verify(memory).findings == []


@pytest.mark.usefixtures("few_tokens_per_row")
@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("DELETE FROM tokens WHERE chunk = (SELECT max(chunk) FROM tokens)", "token 32 of 40"),
        ("DELETE FROM blocks WHERE number = (SELECT max(number) FROM blocks)", "end at token 36 of 40"),
        ("DELETE FROM lineages", "lineage 1 is missing"),
        ("DELETE FROM workspaces", "0 of its 1 workspaces"),
        ("DELETE FROM meta WHERE key = 'n_workspaces'", "number of workspaces is missing"),
        ("DELETE FROM slots WHERE slot = 1", "does not count as used"),
    ],
)
def test_a_missing_row_of_the_history_is_noticed(root: Root, statement: str, what: str) -> None:
    memory = long_memory(root)
    damaged(memory, statement)
    with pytest.raises(CatalogDamaged, match=what):
        Memory(root, memory.place)
    assert not verify(memory).is_sound
    with pytest.raises(CatalogDamaged):
        Memory(root, memory.place)


def test_a_slot_that_does_not_count_as_used_is_noticed_without_its_entry_in_the_index(root: Root) -> None:
    memory = long_memory(root)
    memory.close()
    path = folder_of(memory) / "catalog.sqlite"
    left_out = " AND number <> 3"
    index = "SELECT count(*) FROM blocks INDEXED BY blocks_by_slot WHERE segment IS NOT NULL"
    with sqlite3.connect(path) as db:
        segment, slot = db.execute("SELECT segment, slot FROM blocks WHERE number = 3").fetchone()
        db.execute("DELETE FROM slots WHERE segment=? AND slot=?", (segment, slot))
        db.execute("PRAGMA writable_schema=ON")
        db.execute("UPDATE sqlite_master SET sql = sql || ? WHERE name = 'blocks_by_slot'", (left_out,))
    db.close()
    with sqlite3.connect(path) as db:  # a new connection sees the changed schema
        db.execute("REINDEX")
        db.execute("PRAGMA writable_schema=ON")
        db.execute("UPDATE sqlite_master SET sql = replace(sql, ?, '') WHERE type = 'index'", (left_out,))
    db.close()
    with sqlite3.connect(path) as db:
        assert db.execute(index).fetchone()[0] == len(memory.blocks) - 1
    db.close()
    with pytest.raises(CatalogDamaged, match=f"slot {slot} of segment {segment}, which does not count"):
        Memory(root, memory.place)


@pytest.mark.parametrize("who", ["parent", "child", "both"])
def test_a_workspace_whose_row_is_missing_is_recovered(root: Root, who: str) -> None:
    parent = make_memory(root, "parent", 30)
    parent.step([1] * 7)
    child = parent.fork("child")
    child.step([2] * 9)
    parent.step([3] * 9)
    parent.journal.pin([(0, 4)])
    child.close()
    held = {"parent": parent.tokens, "child": child.tokens}
    lost = {"parent": ["parent"], "child": ["child"], "both": ["parent", "child"]}[who]
    damaged(parent, *(f"DELETE FROM workspaces WHERE name = '{name}'" for name in lost))
    with pytest.raises(CatalogDamaged):
        Memory(root, child.place)
    assert [f.kind for f in verify(parent).findings] == ["workspaces"]
    verify(parent, repair=True)
    assert [f for f in verify(parent).findings if f.kind != "file"] == []
    found = []
    for item in root.list():
        assert item.row is not None
        assert item.row.name.startswith("recovered") == (item.row.name not in held)
        memory = Memory(root, root.find(item.row.name))
        memory.check()
        found.append(memory.tokens)
        memory.step([4] * 9)
        memory.close()
        if len(lost) == 1:
            assert item.place in (parent.place, child.place)
    assert sorted(found) == sorted(held.values())


def test_pins_steps_and_forks_are_counted_wherever_they_change(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    memory.step([1] * 9)
    memory.journal.pin([(0, 4), (20, 36)])
    fork = memory.fork("fork")
    fork.step([2] * 3)
    memory.truncate(33)
    fork.truncate(10)
    assert verify(memory).findings == []
    memory, fork = reopened(memory), reopened(fork)
    assert memory.restored.pins == [(0, 4), (20, 33)] and fork.restored.pins == [(0, 4)]
    assert [step.end for step in fork.restored.steps] == [10]
    fork.close()
    delete_workspace(root, fork.place)
    assert verify(memory).findings == []
    memory.close()


@pytest.mark.parametrize("n_tokens", [27, 28])
def test_a_fork_is_sound_as_soon_as_it_is_there(root: Root, n_tokens: int) -> None:
    memory = make_memory(root, n_tokens=n_tokens)
    fork = memory.fork("fork")
    assert verify(memory).findings == []
    fork.close()
    memory.close()
    assert verify(memory).findings == []
    fork = Memory(root, fork.place)
    fork.check()
    fork.check_index()
    fork.close()


@pytest.mark.parametrize("point", ["index_append.after", "row_commit.before", "row_commit.statements"])
def test_what_a_step_cut_short_wrote_to_the_index_is_no_finding(tmp_path: Path, point: str) -> None:
    files = Stops()
    memory = make_memory(make_root(tmp_path, files), n_tokens=30)

    def killed() -> None:
        raise Killed

    files.on[point] = killed
    with pytest.raises(Killed):
        memory.step([1] * 9)
    files.on.clear()
    fork = memory.fork("fork")  # copies no row that is not the right one
    fork.close()
    memory.close()
    assert verify(memory).findings == []
    memory = Memory(memory.root, memory.place)
    memory.check(list(range(30)))
    memory.check_index()
    fork = Memory(memory.root, fork.place)
    fork.check(list(range(30)))
    fork.check_index()
    fork.close()
    memory.close()


def test_a_segment_whose_number_seems_never_given_is_kept(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    damaged(memory, "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'segments'")
    memory = Memory(root, memory.place)
    memory.check()
    memory.step([1] * 30)
    memory.check()
    memory.close()
    assert verify(memory).findings == []


def test_a_family_whose_workspace_is_missing_is_not_taken_for_an_empty_one(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    damaged(memory, "DELETE FROM workspaces")
    (root.folder / "names.json").unlink()
    make_memory(root, "other").close()
    assert (folder_of(memory) / "catalog.sqlite").exists()
    assert [item.place.family for item in root.list() if item.error] == [memory.place.family]


def test_a_damaged_page_is_a_finding(root: Root) -> None:
    memory = make_memory(root, n_tokens=400)
    memory.close()
    path = folder_of(memory) / "catalog.sqlite"
    data = bytearray(path.read_bytes())
    for page in range(4, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 8] = b"\xff" * 8
    path.write_bytes(data)
    assert not verify(memory).is_sound


def test_files_that_no_row_stands_for_are_found_and_removed(root: Root) -> None:
    memory = make_memory(root, n_tokens=9)
    memory.close()
    folder = folder_of(memory)
    strays = [
        folder / "segments" / "000077.gguf",
        folder / "segments" / "000078.gguf.tmp",
        folder / "index" / "99.mk",
        folder / "locks" / f"{memory.place.workspace[:-4]}0000.head",
        folder / "locks" / f"{memory.place.workspace[:-4]}0000.lock",
    ]
    for path in strays:
        path.write_bytes(b"x")
    (folder / "segments" / "mine.txt").write_bytes(b"x")
    assert sorted(f.where.split("/")[1] for f in verify(memory).findings) == sorted(p.name for p in strays)
    verify(memory, repair=True)
    assert not any(path.exists() for path in strays)
    assert verify(memory).is_sound and (folder / "segments" / "mine.txt").exists()


# -- compact


def run_compact(memory: Memory) -> Compacted:
    return compact(memory.holding, memory.store)


def n_used(family: Family) -> int:
    with family.catalog.snapshot() as db:
        return sum(1 for row in SLOTS.rows(db) if row.used)


def test_compacting_moves_records_together_while_the_workspace_is_open(root: Root) -> None:
    memory = make_memory(root, n_tokens=0)
    forks = []
    for i in range(6):
        memory.step([i] * BLOCK * 2)
        forks.append(memory.fork(f"fork {i}"))
    for fork in forks:
        fork.step([9] * BLOCK * 3)
        fork.close()
    for fork in forks[:-1]:
        delete_workspace(root, fork.place)
    memory.truncate(17)
    done = run_compact(memory)
    assert done.n_lost == 0 and done.bytes_after <= done.bytes_before
    memory.check()
    report = verify(memory)
    assert report.is_sound, report.findings
    with memory.holding.family.catalog.snapshot() as db:
        segments = list(SEGMENTS.rows(db))
    used = n_used(memory.holding.family)
    assert len(segments) <= -(-used // 4) + 1 and used == report.n_records
    memory = reopened(memory)
    memory.check()
    memory.check_index()
    fork = Memory(root, forks[-1].place)
    fork.check()
    fork.close()
    assert run_compact(memory).n_moved == 0
    memory.close()


def test_compacting_leaves_segments_alone_that_somebody_else_writes(root: Root) -> None:
    memory = make_memory(root, n_tokens=30)
    fork = memory.fork("fork")
    fork.step([1] * 9)
    fork.truncate(31)
    run_compact(memory)
    fork.check()
    fork.step([2] * 9)
    fork.check()
    memory.check()
    memory.close()
    fork = reopened(fork)
    fork.check()
    assert verify(fork).is_sound
    fork.close()


def test_compacting_drops_a_damaged_record_to_its_tokens(root: Root) -> None:
    memory = make_memory(root, n_tokens=BLOCK * 5)
    memory.truncate(BLOCK * 3)
    memory.step([1] * BLOCK * 7)
    memory.truncate(BLOCK * 2)
    memory.step([5] * BLOCK)
    with memory.holding.family.catalog.snapshot() as db:
        before = len(list(SEGMENTS.rows(db)))
    memory.close()
    with Holding.open(root, memory.place) as holding:
        records = open_records(holding)
        done = compact(holding, records)
        records.close()
    assert done.n_segments_dropped == before - 1
    assert verify(memory).is_sound


def test_space_grows_with_what_is_kept_not_with_what_was_written(root: Root) -> None:
    memory = make_memory(root, n_tokens=BLOCK * 4)
    rng = np.random.default_rng(0)
    for _ in range(30):
        memory.step(rng.integers(0, 9, 7).tolist())
        memory.truncate(BLOCK * 4)
    run_compact(memory)
    family = memory.holding.family
    with family.catalog.snapshot() as db:
        assert [row.n_slots for row in SEGMENTS.rows(db)] == [4]
    assert family.disk_bytes() < 200_000
    memory.close()
