"""What verify says of index rows: those still to be written are no damage, those that have changed are."""

from __future__ import annotations

from pathlib import Path

import durable_run
import numpy as np
import pytest
from durable_run import (
    BLOCK,
    NO_MEANS,
    Memory,
    index_rows,
    make_memory,
    make_root,
    mean_of,
    open_records,
    record_of,
)
from store_faults import Killed, Stops

from kvmem_llama.store.append import set_means
from kvmem_llama.store.content import iter_blocks
from kvmem_llama.store.forking import fork_workspace
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.index_file import NO_ROW, mean_xxh
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.store.rows import BlockRow
from kvmem_llama.store.tables import BLOCKS
from kvmem_llama.store.verify import Finding

ROW = NO_MEANS.nbytes


@pytest.fixture
def files() -> Stops:
    return Stops()


@pytest.fixture
def root(tmp_path: Path, files: Stops) -> Root:
    return make_root(tmp_path, files)


def found(memory: Memory, **options: bool) -> list[Finding]:
    return verify_family(memory.root, memory.place.family, **options).findings


def flip(memory: Memory, number: int) -> None:
    """Flips one bit of the index row of a block; all blocks are of the first lineage."""
    path = memory.root.folder / memory.place.family / "index" / "1.mk"
    data = bytearray(path.read_bytes())
    data[4096 + number * ROW + 5] ^= 4
    path.write_bytes(data)


def killed() -> None:
    raise Killed


def kill_in_rewrite(memory: Memory, files: Stops, n: int) -> None:
    files.on["rewrite.after"] = killed
    with pytest.raises(Killed):
        memory.rewrite(n, [7] * 30)
    files.on.clear()


def block(memory: Memory, number: int) -> BlockRow:
    with memory.holding.family.catalog.snapshot() as db:
        return list(iter_blocks(db, 1))[number]


# -- rows that are still to be written


@pytest.mark.parametrize("n", [9, 8])
def test_an_edit_that_was_killed_before_its_index_rows_is_no_damage(root: Root, files: Stops, n: int) -> None:
    memory = make_memory(root, n_tokens=30)
    kill_in_rewrite(memory, files, n)
    memory.close()
    assert found(memory) == []
    memory = Memory(root, memory.place)
    memory.check([*range(n), *[7] * 30])
    memory.check_index()
    memory.close()
    assert found(memory) == []


def test_an_edit_is_no_damage_before_it_is_acknowledged(root: Root, files: Stops) -> None:
    memory = make_memory(root, n_tokens=30)
    seen: list[list[Finding]] = []
    files.on["index_append.before"] = lambda: seen.append(found(memory))
    memory.rewrite(9, [7] * 30)
    assert seen == [[]]
    memory.close()


def test_a_fork_of_an_edit_that_was_killed_is_no_damage(root: Root, files: Stops) -> None:
    memory = make_memory(root, n_tokens=30)
    kill_in_rewrite(memory, files, 9)
    memory.close()
    with Holding.open(root, memory.place) as holding:
        records = open_records(holding)
        fork_workspace(holding, records, "fork").close()
        records.close()
    assert found(memory) == []
    fork = Memory(root, root.find("fork"))
    fork.check_index()
    fork.close()


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_changed_row_of_an_acknowledged_edit_is_found(root: Root, number: int) -> None:
    memory = make_memory(root, n_tokens=30)
    memory.rewrite(9, [7] * 30)
    memory.close()
    assert found(memory) == []
    flip(memory, number)
    (finding,) = found(memory)
    assert finding.kind == "index" and f"block {number}" in finding.where
    assert "opening the workspace makes it again" in finding.what


def test_a_changed_row_before_an_edit_that_was_killed_is_found(root: Root, files: Stops) -> None:
    memory = make_memory(root, n_tokens=30)
    kill_in_rewrite(memory, files, 9)
    memory.close()
    flip(memory, 1)
    assert [finding.kind for finding in found(memory)] == ["index"]


# -- repair


@pytest.mark.parametrize("has_record", [True, False])
def test_a_repair_gives_up_a_damaged_row_and_opening_makes_it_again(root: Root, has_record: bool) -> None:
    memory = make_memory(root, n_tokens=30)
    if not has_record:
        at = memory.store.locate(memory.blocks[3].ref)
        assert at is not None
        memory.journal.fall([at])
    memory.close()
    flip(memory, 3)
    report = verify_family(root, memory.place.family, repair=True)
    assert (len(report.findings), report.n_repaired) == (1, 1)
    assert found(memory) == []
    memory = Memory(root, memory.place)
    assert memory.restored.unscored == ([] if has_record else [3])
    if has_record:
        memory.check()
        memory.check_index()
    memory.close()
    assert found(memory) == []


# -- rows that are made again while others are at work


@pytest.mark.parametrize("what", ["falls", "is computed again"])
def test_a_block_that_changes_while_its_row_is_made_keeps_what_it_has_become(
    root: Root, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    parent = make_memory(root, "parent", 30)
    child = parent.fork("child")
    parent.close()
    catalog = child.holding.family.catalog
    catalog.write(lambda db: set_means(db, {block(child, n): NO_ROW for n in (1, 2)}))
    ref, other = child.blocks[2].ref, record_of([5] * 12, BLOCK)
    at = child.store.locate(ref)
    assert at is not None
    begun: list[int] = []

    def beside(record: np.ndarray, count: int) -> np.ndarray:
        if not begun:
            begun.append(1)
            child.journal.fall([at])
            if what != "falls":
                child.store._entries.live(ref).location = None
                child.store.restore(ref, other)
                assert child.journal.recomputed(2, ref, mean_of(other, BLOCK))
        return mean_of(record, count)

    with monkeypatch.context() as patch:
        patch.setattr(durable_run, "mean_of", beside)
        parent = Memory(root, parent.place)
    assert begun
    with catalog.snapshot() as db:
        row = BLOCKS.one(db, "lineage=? AND number=?", (1, 2))
    assert row is not None
    old = record_of(list(range(12)), BLOCK)
    made_of = old if what == "falls" else other
    assert (row.location is None) == (what == "falls")
    assert row.mean_xxh == mean_xxh(mean_of(made_of, BLOCK))
    child.close()
    parent.close()
    assert found(parent) == []
    parent = Memory(root, parent.place)
    np.testing.assert_array_equal(index_rows(parent.restored)[2], mean_of(made_of, BLOCK))
    parent.close()
