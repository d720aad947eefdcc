"""A workspace and its forks, open at once in one process: one catalog and one host pool, each its own store.

Whoever is closed, deleted or compacted first, the others go on, and each history stays what a list would be.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from pathlib import Path

import pytest
from durable_run import BLOCK, Memory, make_memory, make_root, reopened

from kvmem_llama.errors import StoreDamaged, StoreLocked, WorkspaceNotFound
from kvmem_llama.store.compact import compact
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.store.tables import SEGMENTS, SLOTS


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return make_root(tmp_path)


def pair(root: Root, n_tokens: int = 30) -> tuple[Memory, Memory]:
    """A workspace and a fork of it; both are open."""
    parent = make_memory(root, "parent", n_tokens)
    return parent, parent.fork("child")


def in_use(memory: Memory) -> set[tuple[int, int]]:
    """Slots that count as used in the catalog, of the segments a workspace writes to."""
    with memory.holding.family.catalog.snapshot() as db:
        own = {row.number for row in SEGMENTS.rows(db, "owner=?", (memory.place.workspace,))}
        return {(row.segment, row.slot) for row in SLOTS.rows(db) if row.used and row.segment in own}


def assert_sound(root: Root) -> None:
    for family in root.family_ids():
        assert verify_family(root, family).findings == []


@pytest.mark.parametrize("first", ["parent", "child"])
@pytest.mark.parametrize("n_tokens", [28, 30])
def test_the_one_goes_on_when_the_other_is_closed(root: Root, first: str, n_tokens: int) -> None:
    parent, child = pair(root, n_tokens)
    parent.step([1] * 7)
    child.step([2] * 9)
    gone, left = (parent, child) if first == "parent" else (child, parent)
    gone.close()
    left.check()
    left.step([3] * 11)
    left.truncate(n_tokens - 3)
    left.step([4] * 5)
    left.check()
    assert_sound(root)
    again = Memory(root, gone.place)
    again.check(gone.tokens)
    again.step([5] * 6)
    left.step([6] * 6)
    for memory in (again, left):
        memory.check()
        memory.close()
    assert_sound(root)


@pytest.mark.parametrize("way", ["truncate", "rewrite"])
def test_what_only_the_last_of_a_line_had_in_common_leaves_no_file(root: Root, way: str) -> None:
    parent, child = pair(root)
    child.step([2] * 9)
    last = child.fork("last")
    child.close()
    delete_workspace(root, child.place)  # its part of the history stays, as `last` needs it
    if way == "truncate":
        last.truncate(2)
    else:
        last.rewrite(2, [3] * 30)
    assert_sound(root)
    for memory in (last, parent):
        memory.check()
        memory.close()
    assert_sound(root)


def test_both_write_to_segments_of_their_own(root: Root) -> None:
    parent, child = pair(root)
    for i in range(6):
        parent.step([i] * 5)
        child.step([i + 9] * 5)
    parent.check()
    child.check()
    numbers = [{segment for segment, _ in in_use(memory)} for memory in (parent, child)]
    assert numbers[0] and numbers[1] and not numbers[0] & numbers[1]
    child.close()
    parent.close()
    assert_sound(root)


def test_the_slot_of_a_copied_block_is_free_when_the_fork_has_grown(root: Root) -> None:
    """The copy lies in a segment of the parent, but is the fork's own."""
    parent, child = pair(root)
    before = in_use(parent)
    child.step([1] * 9)
    freed = before - in_use(parent)
    assert len(freed) == 1
    child.close()
    parent = reopened(parent)
    parent.step([2] * 40)
    parent.check()
    assert freed <= in_use(parent)
    Memory(root, child.place).close()
    parent.close()


@pytest.mark.parametrize("who", ["parent", "child"])
def test_one_is_deleted_while_the_other_is_open(root: Root, who: str) -> None:
    parent, child = pair(root)
    gone, left = (parent, child) if who == "parent" else (child, parent)
    gone.step([1] * 9)
    left.step([2] * 9)
    with pytest.raises(StoreLocked):
        delete_workspace(root, gone.place)
    gone.close()
    delete_workspace(root, gone.place)
    left.check()
    for i in range(8):
        left.step([i] * 5)
    left.check()
    compact(left.holding, left.store)
    left.check()
    assert_sound(root)
    left = reopened(left)
    left.check()
    left.check_index()
    left.step([7] * 30)
    left.check()
    left.close()
    assert_sound(root)


@pytest.mark.parametrize("who", ["parent", "child"])
@pytest.mark.parametrize("both_open", [True, False])
def test_one_is_compacted_while_the_other_is_open_or_closed(root: Root, who: str, both_open: bool) -> None:
    parent, child = pair(root)
    for i in range(5):
        parent.step([i] * 6)
        child.step([i + 9] * 6)
    parent.truncate(19)
    child.truncate(35)
    one, other = (parent, child) if who == "parent" else (child, parent)
    if not both_open:
        other.close()
    compact(one.holding, one.store)
    one.check()
    one.step([1] * 9)
    if not both_open:
        other = Memory(root, other.place)
    other.check()
    other.step([2] * 9)
    compact(other.holding, other.store)
    for memory in (one, other):
        memory.check()
        memory.close()
    assert_sound(root)


def test_a_shared_record_that_falls_or_is_lost_is_so_for_both(root: Root) -> None:
    parent, child = pair(root)
    at = parent.store.locate(parent.blocks[1].ref)
    assert at is not None
    parent.journal.fall([at])
    child.step([1] * 9)
    assert_sound(root)
    child.close()
    child = Memory(root, child.place)
    assert child.store.where(child.blocks[1].ref) == "tokens"
    child.close()
    parent.close()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_done_in_whatever_order_each_history_is_its_own(tmp_path: Path, seed: int) -> None:
    root = make_root(tmp_path, durability="relaxed")  # syncs change nothing here but the time it takes
    rng = random.Random(seed)
    opened = {"0": make_memory(root, "0", rng.randrange(5, 30), host_records=rng.choice([4, 40]))}
    closed: dict[str, Memory] = {}
    n_made = 1
    for _ in range(60):
        name = rng.choice(sorted(opened)) if opened else ""
        match rng.choices(
            ["step", "truncate", "fork", "close", "open", "delete", "compact", "ahead", "pin"],
            [30, 10, 12, 12, 14, 5, 8, 4, 5],
        )[0]:
            case "open" if closed:
                other = rng.choice(sorted(closed))
                was = closed.pop(other)
                opened[other] = Memory(root, was.place)
                assert opened[other].tokens == was.tokens
            case "delete" if closed and len(opened) + len(closed) > 1:
                delete_workspace(root, closed.pop(rng.choice(sorted(closed))).place)
            case _ if not opened:
                continue
            case "step":
                opened[name].step([rng.randrange(9) for _ in range(rng.randrange(1, 14))])
            case "truncate":
                opened[name].truncate(rng.randrange(len(opened[name].tokens) + 1))
            case "fork" if len(opened) + len(closed) < 5:
                opened[str(n_made)] = opened[name].fork(str(n_made))
                n_made += 1
            case "close":
                closed[name] = opened.pop(name)
                closed[name].close()
            case "compact":
                compact(opened[name].holding, opened[name].store)
            case "ahead":
                opened[name].read_ahead([rng.randrange(9) for _ in range(rng.randrange(BLOCK, 19))])
            case "pin" if opened[name].tokens:
                end = rng.randrange(1, len(opened[name].tokens) + 1)
                opened[name].journal.pin([(rng.randrange(end), end)])
        for memory in opened.values():
            memory.check()
    assert_sound(root)
    for memory in opened.values():
        memory.close()
    for memory in [*opened.values(), *closed.values()]:
        again = Memory(root, memory.place)
        again.check(memory.tokens)
        again.check_index()
        again.close()
    assert_sound(root)


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_missing_row_hides_no_other_workspace(root: Root, has_cache: bool) -> None:
    """And its own name is not taken for a free one."""
    parent, child = pair(root)
    child.close()
    parent.close()
    if not has_cache:
        (root.folder / "names.json").unlink(missing_ok=True)
    catalog = root.folder / parent.place.family / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(catalog)) as db, db:
        db.execute("DELETE FROM workspaces WHERE name = 'child'")
    assert root.find("parent") == parent.place
    with pytest.raises(WorkspaceNotFound) as missing:
        root.find("child")
    assert missing.value.may_exist
    with pytest.raises(StoreDamaged):  # what only the missing one uses would count as free
        Memory(root, parent.place)
    assert verify_family(root, parent.place.family, repair=True).findings
    again = Memory(root, root.find("parent"))
    again.check(parent.tokens)
    again.close()
