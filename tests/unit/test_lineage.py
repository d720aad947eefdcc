"""Histories that share ranges: whatever is forked, cut and deleted, each stays what a plain list would be.

And nothing is kept that nobody can reach.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmem_llama.store import content, lineage
from kvmem_llama.store.ahead import put_ahead
from kvmem_llama.store.append import (
    AddedBlock,
    Addition,
    Heat,
    append,
    drop_records,
    put_heat,
    put_pins,
    put_record,
    read_heat,
    workspace_row,
)
from kvmem_llama.store.lineage import Tail
from kvmem_llama.store.location import Location, Tier
from kvmem_llama.store.rows import AheadRow, BlockRow, StepRow, WorkspaceRow
from kvmem_llama.store.schema import SCHEMA
from kvmem_llama.store.slot_rows import adopt_segments, new_segment
from kvmem_llama.store.tables import (
    AHEAD,
    ALL_TABLES,
    BLOCKS,
    LINEAGES,
    META,
    PINS,
    SEGMENTS,
    SLOTS,
    BadRow,
    Db,
)

BLOCK = 4  # tokens


def open_db() -> Db:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(SCHEMA)
    return db


class FakeSlots:
    """Gives out free slots of the segments of a catalog, the lowest first."""

    def __init__(self, db: Db, n_slots: int = 8) -> None:
        self.db = db
        self.n_slots = n_slots
        self.provisional: set[tuple[int, int]] = set()

    def write(self, content: bytes) -> Location:
        """A location for a record whose checksum is `content`."""
        used = {(row.segment, row.slot): row for row in SLOTS.rows(self.db)}
        for segment in SEGMENTS.rows(self.db):
            for slot in range(segment.n_slots):
                row = used.get((segment.number, slot))
                if (row is None or not row.used) and (segment.number, slot) not in self.provisional:
                    self.provisional.add((segment.number, slot))
                    generation = 1 if row is None else row.generation + 1
                    return Location(segment.number, slot, generation, content)
        new_segment(self.db, "w0", lambda number: self.n_slots)
        return self.write(content)

    def settle(self) -> None:
        self.provisional.clear()


@dataclass(frozen=True)
class ModelBlock:
    start: int
    count: int
    record: bytes


@dataclass
class ModelWorkspace:
    tokens: list[int] = field(default_factory=list)
    blocks: list[ModelBlock] = field(default_factory=list)
    steps: list[tuple[str, int, int, int]] = field(default_factory=list)  # kind, start, end, closed
    pins: list[tuple[int, int]] = field(default_factory=list)
    ahead: list[tuple[int, bytes]] = field(default_factory=list)  # start, record

    def copy(self) -> ModelWorkspace:
        return ModelWorkspace(list(self.tokens), list(self.blocks), list(self.steps), list(self.pins))


class Histories(RuleBasedStateMachine):
    """The catalog's rows against lists."""

    @initialize()
    def begin(self) -> None:
        content.CHUNK = 8  # type: ignore[misc]
        self.db = open_db()
        self.slots = FakeSlots(self.db)
        self.model: dict[str, ModelWorkspace] = {}
        self.n_made = 0
        self.n_records = 0
        self.create()

    def teardown(self) -> None:
        content.CHUNK = 4096  # type: ignore[misc]

    def record(self) -> bytes:
        self.n_records += 1
        return self.n_records.to_bytes(16, "little")

    def fresh(self) -> WorkspaceRow:
        self.n_made += 1
        return WorkspaceRow(
            f"w{self.n_made}", f"name {self.n_made}", 0, 0, 0, "kvmem", None, float(self.n_made), 0.0
        )

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model)), label="workspace")

    # -- what can happen

    @precondition(lambda self: len(self.model) < 4)
    @rule()
    def create(self) -> None:
        row = lineage.new_workspace(self.db, self.fresh())
        self.model[row.id] = ModelWorkspace()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(1, 19), kind=st.sampled_from(["read", "ask", "step"]))
    def commit(self, data: st.DataObject, n: int, kind: str) -> None:
        name = self.pick(data)
        own = self.model[name]
        start = len(own.tokens)
        ids = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
        use_ahead = data.draw(st.booleans())
        own.tokens += ids
        first = len(own.blocks) - (1 if own.blocks and own.blocks[-1].count < BLOCK else 0)
        added = []
        ahead = {at: record for at, record in own.ahead} if use_ahead else {}
        rows = {row.start: row.location for row in AHEAD.rows(self.db, "workspace=?", (name,))}
        del own.blocks[first:]
        at = first * BLOCK
        while at < len(own.tokens):
            count = min(BLOCK, len(own.tokens) - at)
            if count == BLOCK and at in ahead:
                record, location = ahead[at], rows[at]
            else:
                record = self.record()
                location = self.slots.write(record)
            own.blocks.append(ModelBlock(at, count, record))
            added.append(AddedBlock(first + len(added), at, count, location, record))
            at += count
        own.ahead = []
        own.steps.append((kind, start, len(own.tokens), 1))
        step = StepRow(0, 0, kind, start, len(own.tokens), start, f"answer {start}", 1, "cpu", "{}", 0.0)
        row, _ = append(self.db, name, Addition(start, np.array(ids, np.int32), added, step, 1.0))
        assert row.n_tokens == len(own.tokens)
        self.slots.settle()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        name = self.pick(data)
        own = self.model[name]
        n = data.draw(st.integers(0, len(own.tokens)))
        tail = self.cut(own, n)
        own.ahead = []
        own.steps = [
            (kind, start, min(end, n), closed if end <= n else 0)
            for kind, start, end, closed in own.steps
            if start < n
        ]
        own.pins = [(start, min(end, n)) for start, end in own.pins if start < n]
        before = ids(self.db)
        row, freed = lineage.truncate(self.db, workspace_row(self.db, name), n, tail)
        assert set(freed.lineages) == before - ids(self.db)
        assert row.n_tokens == n
        self.slots.settle()

    def cut(self, own: ModelWorkspace, n: int) -> Tail | None:
        """Cuts tokens and blocks; the tail's record is a new one."""
        del own.tokens[n:]
        start = n // BLOCK * BLOCK
        own.blocks = [block for block in own.blocks if block.start < start]
        if start == n:
            return None
        record = self.record()
        own.blocks.append(ModelBlock(start, n - start, record))
        return Tail(start, n - start, self.slots.write(record), record)

    @precondition(lambda self: self.model and len(self.model) < 7)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = self.pick(data)
        own = self.model[name].copy()
        tail = self.cut(own, len(own.tokens))
        before = {table.name: count(self.db, table.name) for table in ALL_TABLES}
        row = lineage.fork(self.db, workspace_row(self.db, name), self.fresh(), tail)
        for table in ALL_TABLES:
            assert count(self.db, table.name) - before[table.name] <= (len(own.pins) if table is PINS else 1)
        self.model[row.id] = own
        self.slots.settle()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = self.pick(data)
        before = ids(self.db)
        freed = lineage.delete(self.db, workspace_row(self.db, name))
        assert set(freed.lineages) == before - ids(self.db)
        del self.model[name]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(1, 3), is_new=st.booleans())
    def read_ahead(self, data: st.DataObject, n: int, is_new: bool) -> None:
        name = self.pick(data)
        own = self.model[name]
        if is_new or not own.ahead:
            own.ahead = []
            start = len(own.tokens) // BLOCK * BLOCK
        else:
            start = own.ahead[-1][0] + BLOCK
        rows = []
        for i in range(n):
            record = self.record()
            at = self.slots.write(record)
            own.ahead.append((start + i * BLOCK, record))
            number = start // BLOCK + i
            rows.append(
                AheadRow(
                    name, number, start + i * BLOCK, BLOCK, at.segment, at.slot, at.generation, record, b""
                )
            )
        put_ahead(self.db, name, rows)
        self.slots.settle()

    @precondition(lambda self: any(own.tokens for own in self.model.values()))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(k for k, own in self.model.items() if own.tokens)))
        own = self.model[name]
        start = data.draw(st.integers(0, len(own.tokens) - 1))
        own.pins.append((start, data.draw(st.integers(start + 1, len(own.tokens)))))
        put_pins(self.db, name, own.pins)

    # -- what must always hold

    @invariant()
    def every_history_is_what_its_list_is(self) -> None:
        for name, own in self.model.items():
            row = workspace_row(self.db, name)
            assert row.n_tokens == len(own.tokens)
            assert content.read_tokens(self.db, row.lineage, 0, row.n_tokens).tolist() == own.tokens
            blocks = list(content.iter_blocks(self.db, row.lineage))
            assert [ModelBlock(b.start, b.count, b.checksum) for b in blocks] == own.blocks
            content.check_blocks(blocks, row)
            steps = [(s.kind, s.start, s.end, s.closed) for s in content.iter_steps(self.db, row.lineage)]
            assert steps == own.steps and row.n_steps == len(steps)
            assert content.read_pins(self.db, row) == own.pins
            ahead = AHEAD.rows(self.db, "workspace=?", (name,), "ORDER BY number")
            assert [(a.start, a.checksum) for a in ahead] == own.ahead

    @invariant()
    def nothing_is_kept_that_nobody_reaches(self) -> None:
        reachable = {block.record for own in self.model.values() for block in own.blocks}
        ahead = {record for own in self.model.values() for _, record in own.ahead}
        assert {row.checksum for row in BLOCKS.rows(self.db)} == reachable
        used = {(row.segment, row.slot) for row in SLOTS.rows(self.db, "used=1")}
        named = {(row.segment, row.slot) for row in BLOCKS.rows(self.db)}
        named |= {(row.segment, row.slot) for row in AHEAD.rows(self.db)}
        assert used == named and len(named) == len(reachable | ahead)

    @invariant()
    def workspaces_are_counted(self) -> None:
        content.check_workspaces(self.db)

    @invariant()
    def no_lineage_is_kept_without_a_use(self) -> None:
        rows = {row.id: row for row in LINEAGES.rows(self.db)}
        heads = {workspace_row(self.db, name).lineage for name in self.model}
        parents = {row.parent for row in rows.values()}
        assert heads <= rows.keys()
        assert all(number in heads or number in parents for number in rows)
        assert len(rows) <= 2 * max(len(heads), 1)

    @invariant()
    def every_row_has_its_checksum(self) -> None:
        for table in ALL_TABLES:
            for _ in table.rows(self.db):
                pass


def ids(db: Db) -> set[int]:
    return {row.id for row in LINEAGES.rows(db)}


def count(db: Db, table: str) -> int:
    found: int = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return found


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=40)


# -- single cases


def history(db: Db, n: int, name: str = "w1") -> tuple[FakeSlots, WorkspaceRow]:
    """A workspace of `n` tokens, read in one step."""
    slots = FakeSlots(db, 64)
    lineage.new_workspace(db, WorkspaceRow(name, name, 0, 0, 0, "kvmem", "be brief", 0.0, 0.0))
    blocks = []
    for number in range(-(-n // BLOCK)):
        record = number.to_bytes(16, "little")
        count = min(BLOCK, n - number * BLOCK)
        blocks.append(AddedBlock(number, number * BLOCK, count, slots.write(record), record, text="word"))
    step = StepRow(0, 0, "read", 0, n, 0, "", 0, "", "{}", 0.0)
    row, _ = append(db, name, Addition(0, np.arange(n, dtype=np.int32), blocks, step, 0.0))
    slots.settle()
    return slots, row


@pytest.mark.parametrize("n", [40, 4000])
def test_a_fork_writes_the_same_few_rows_however_long_the_history_is(n: int) -> None:
    db = open_db()
    slots, row = history(db, n + 3)
    before = db.total_changes
    tail = Tail(n, 3, slots.write(b"t" * 16), b"t" * 16)
    lineage.fork(db, row, replace(row, id="w2", name="w2"), tail)
    # lineage (twice: its number is part of its checksum), workspace, their number, slot, block, tokens
    assert db.total_changes - before == 7


def test_a_deleted_fork_takes_only_what_was_its_own() -> None:
    db = open_db()
    slots, row = history(db, 43)
    tail = Tail(40, 3, slots.write(b"t" * 16), b"t" * 16)
    child = lineage.fork(db, row, replace(row, id="w2", name="w2"), tail)
    slots.settle()
    assert [at.checksum for at in lineage.delete(db, child).records] == [b"t" * 16]
    freed = lineage.delete(db, row)
    assert len(freed.records) == 11 and freed.lineages == [row.lineage]
    assert not any(count(db, t.name) for t in ALL_TABLES if t not in (SLOTS, SEGMENTS, META))
    assert [segment.owner for segment in SEGMENTS.rows(db)] == ["w0"]


def test_a_deleted_parent_leaves_what_its_fork_uses() -> None:
    db = open_db()
    slots, row = history(db, 43)
    tail = Tail(40, 3, slots.write(b"t" * 16), b"t" * 16)
    child = lineage.fork(db, row, replace(row, id="w2", name="w2"), tail)
    freed = lineage.delete(db, row)
    assert [at.checksum for at in freed.records] == [(10).to_bytes(16, "little")]
    assert content.read_tokens(db, child.lineage, 0, 43).tolist() == list(range(43))
    assert len(list(content.iter_blocks(db, child.lineage))) == 11


def test_chains_of_forks_do_not_grow_longer_than_they_must() -> None:
    db = open_db()
    _, row = history(db, 8)
    for number in range(2, 12):
        row = lineage.fork(db, row, replace(row, id=f"w{number}", name=f"w{number}"), None)
    assert len(content.spans(db, row.lineage)) == 2
    for number in range(1, 11):
        lineage.delete(db, workspace_row(db, f"w{number}"))
    assert len(list(LINEAGES.rows(db))) == 2
    assert content.read_tokens(db, row.lineage, 0, 8).tolist() == list(range(8))


def test_segments_of_a_deleted_workspace_go_to_the_next_writer() -> None:
    db = open_db()
    history(db, 8)
    lineage.new_workspace(db, WorkspaceRow("w2", "w2", 0, 0, 0, "kvmem", None, 0.0, 0.0))
    new_segment(db, "w2", lambda number: 5)
    lineage.delete(db, workspace_row(db, "w2"))
    assert [(segment.number, segment.n_slots) for segment in adopt_segments(db, "w1")] == [(2, 5)]


def test_a_slot_is_never_named_twice_nor_with_an_old_generation() -> None:
    db = open_db()
    history(db, 8)
    used = next(SLOTS.rows(db))
    for at in (
        Location(used.segment, used.slot, used.generation, b"x" * 16),
        Location(used.segment, used.slot, used.generation + 1, b"x" * 16),
    ):
        block = AddedBlock(2, 8, 4, at, b"x" * 16)
        with pytest.raises(BadRow, match="is taken"):
            append(db, "w1", Addition(8, np.arange(4, dtype=np.int32), [block], None, 0.0))


@pytest.mark.parametrize(
    ("start", "number", "at"), [(7, 2, 8), (8, 3, 12), (8, 1, 4), (8, 2, 9), (9, 2, 8), (8, 2, 4)]
)
def test_blocks_that_do_not_continue_the_history_are_refused(start: int, number: int, at: int) -> None:
    db = open_db()
    slots, _ = history(db, 8)
    block = AddedBlock(number, at, 4, slots.write(b"x" * 16), b"x" * 16)
    with pytest.raises(BadRow):
        append(db, "w1", Addition(start, np.arange(4, dtype=np.int32), [block], None, 0.0))


def test_a_block_falls_to_its_tokens_and_comes_back_recomputed() -> None:
    db = open_db()
    slots, row = history(db, 8)
    first = content.find_block(db, row.lineage, 0)
    assert first is not None and first.location is not None
    assert drop_records(db, [first.location, first.location]) == [first.location]
    fallen = content.find_block(db, row.lineage, 0)
    assert fallen is not None and (fallen.tier, fallen.location) == (Tier.TOKENS, None)
    assert fallen.mean_xxh == first.mean_xxh
    new = slots.write(b"n" * 16)
    assert new.generation == 2 and (new.segment, new.slot) == (first.segment, first.slot)
    assert put_record(db, row.lineage, 0, old=None, new=new, mean_xxh=bytes(16)) == (new, [])
    slots.settle()
    late = slots.write(b"l" * 16)
    assert put_record(db, row.lineage, 0, old=None, new=late, mean_xxh=bytes(16)) == (new, [late])
    again = content.find_block(db, row.lineage, 0)
    assert again is not None and again.location == new and again.origin == 1


def test_heat_belongs_to_the_block_wherever_it_is_shared() -> None:
    db = open_db()
    _, row = history(db, 8)
    child = lineage.fork(db, row, replace(row, id="w2", name="w2"), None)
    put_heat(db, child.lineage, [Heat(1, 0.5, 3, 7)])
    assert read_heat(db, row.lineage) == read_heat(db, child.lineage) == [Heat(1, 0.5, 3, 7)]


def test_a_row_that_was_changed_from_outside_is_found() -> None:
    db = open_db()
    _, row = history(db, 43)
    put_pins(db, "w1", [(0, 4), (8, 12)])
    content.CHUNK = 4096  # type: ignore[misc]

    def blocks() -> list[BlockRow]:
        return list(content.iter_blocks(db, row.lineage))

    cases: list[tuple[str, Any]] = [
        ("UPDATE blocks SET start = start + 1 WHERE number = 3", blocks),
        ("DELETE FROM blocks WHERE number = 3", blocks),
        ("UPDATE tokens SET ids = zeroblob(172)", lambda: content.read_tokens(db, row.lineage, 0, 43)),
        ("DELETE FROM tokens", lambda: content.read_tokens(db, row.lineage, 0, 43)),
        ("UPDATE workspaces SET n_tokens = 42", lambda: workspace_row(db, "w1")),
        ("UPDATE lineages SET own_start = 4", lambda: content.spans(db, row.lineage)),
        ("UPDATE steps SET answer = 'another'", lambda: list(content.iter_steps(db, row.lineage))),
        ("DELETE FROM steps", lambda: content.check_steps(list(content.iter_steps(db, row.lineage)), row)),
        ("DELETE FROM pins WHERE number = 1", lambda: content.read_pins(db, workspace_row(db, "w1"))),
        ("DELETE FROM workspaces", lambda: content.check_workspaces(db)),
        ("UPDATE slots SET used = 0", lambda: list(SLOTS.rows(db))),
    ]  # fmt: skip
    for statement, use in cases:
        db.execute("BEGIN")
        assert db.execute(statement).rowcount
        with pytest.raises(BadRow):
            use()
        db.execute("ROLLBACK")
        use()
