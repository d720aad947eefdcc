"""Any sequence of operations, faults, crashes and power cuts, against a dictionary.

The machine plays the catalog: rows in a dictionary are durable, everything else is lost with the process. A
record is served as it was put, or an error says why not; wrong bytes are never served.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from power_cut import PowerCut
from store_data import FORMAT, NBYTES, record
from store_faults import ERRORS, NOTHING, SHORT, FaultySystem, flip

from kvmem_llama.errors import RecordDamaged, StoreFailed, StoreFull
from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.files import Files
from kvmem_llama.store.location import Location
from kvmem_llama.store.pool import HostPool
from kvmem_llama.store.readers import Readers
from kvmem_llama.store.records import NotStored, Record, RecordRef
from kvmem_llama.store.segment import SegmentRow, create_segment
from kvmem_llama.store.tiered import TieredStore

SLOTS, HOST, DISK = 3, 4, 9  # records of a segment, of the host budget, of the disk budget


class Machine(FaultySystem, PowerCut):
    """Fails on request, and forgets what was not synced."""


@dataclass
class Row:
    """What the catalog knows of a record."""

    seed: int
    location: Location | None  # None: the tokens tier


@dataclass
class Live:
    """A record the process has a reference to."""

    seed: int
    key: int  # of its row, once it has one
    refs: int = 1
    is_pinned: bool = False
    may_be_lost: bool = False  # a bit of it was flipped on disk


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.system = Machine()
        self.files = Files(self.system)
        self.readers = Readers(1)
        self.rows: dict[int, Row] = {}
        self.segments: list[SegmentRow] = []
        self.generations: dict[tuple[int, int], int] = {}
        self.flipped: set[int] = set()  # keys of rows whose record was damaged on disk
        self.n_keys = 0
        self.open()

    def teardown(self) -> None:
        self.store.close()
        self.readers.close()
        assert self.pool.n_bytes == 0
        shutil.rmtree(self.folder)

    # -- the catalog

    def grow(self) -> SegmentRow:
        number = len(self.segments) + 1
        self.segments.append(SegmentRow(number, SLOTS))  # reserved: the number is never used again
        return create_segment(self.files, self.folder, number, SLOTS, FORMAT)

    def fall(self, locations: Sequence[Location]) -> None:
        for row in self.rows.values():
            if row.location in locations:
                row.location = None

    def open(self) -> None:
        self.system.heal()
        self.is_clean = True  # no fault since it was opened
        made = [row for row in self.segments if (self.folder / row.file).exists()]
        used = {(row.location.segment, row.location.slot) for row in self.rows.values() if row.location}
        slots = [(*key, generation, key in used) for key, generation in self.generations.items()]
        self.disk = DiskStore(
            self.folder,
            FORMAT,
            segments=made,
            slots=slots,
            grow=self.grow,
            files=self.files,
            readers=self.readers,
            budget=DISK * FORMAT.slot_nbytes,
        )
        self.pool = HostPool(HOST * NBYTES)
        self.store = TieredStore(self.pool, self.disk, fall=self.fall)
        self.live: dict[RecordRef, Live] = {}
        self.doomed: set[int] = set()
        for key, row in self.rows.items():
            ref = self.store.attach(row.location)
            self.live[ref] = Live(row.seed, key, may_be_lost=key in self.flipped)

    @initialize(n=st.integers(0, 8))
    def begin(self, n: int) -> None:
        for seed in range(n):
            self.put(seed)
        self.commit()

    def ref(self, pick: int) -> RecordRef | None:
        return list(self.live)[pick % len(self.live)] if self.live else None

    # -- what the memory does

    @rule(seed=st.integers(0, 1 << 20))
    def put(self, seed: int) -> None:
        try:
            ref = self.store.put(record(seed))
        except (StoreFull, StoreFailed):
            assert not self.is_clean or any(live.is_pinned for live in self.live.values())
            return
        assert ref not in self.live
        self.n_keys += 1
        self.live[ref] = Live(seed, self.n_keys)

    @rule(picks=st.lists(st.integers(0, 50), min_size=1, max_size=6), streamed=st.booleans())
    def get(self, picks: list[int], streamed: bool) -> None:
        refs = [ref for pick in picks if (ref := self.ref(pick)) is not None]
        found: dict[int, Record] = {}
        try:
            if streamed:
                for batch in self.store.fetch(refs):
                    found.update((i, data.copy()) for i, data in batch)
            else:
                found = dict(enumerate(self.store.get_many(refs)))
            assert len(found) == len(refs)
        except NotStored as lost:
            assert {*lost.refs} <= {*refs}
        except RecordDamaged as damaged:
            assert damaged.refs
            assert not self.is_clean or all(self.live[ref].may_be_lost for ref in damaged.refs)
        except (StoreFailed, StoreFull):
            assert not self.is_clean
        for i, data in found.items():
            assert np.array_equal(data, record(self.live[refs[i]].seed))

    @rule(picks=st.lists(st.integers(0, 50), max_size=6))
    def prefetch(self, picks: list[int]) -> None:
        self.store.prefetch([ref for pick in picks if (ref := self.ref(pick)) is not None])

    @rule(picks=st.lists(st.integers(0, 50), max_size=6))
    def retrieved(self, picks: list[int]) -> None:
        self.store.retrieved([ref for pick in picks if (ref := self.ref(pick)) is not None])

    @rule(pick=st.integers(0, 50))
    def restore(self, pick: int) -> None:
        ref = self.ref(pick)
        if ref is None or self.store.where(ref) == "host":
            return
        try:
            self.store.restore(ref, record(self.live[ref].seed))
        except (StoreFull, StoreFailed):
            assert not self.is_clean or any(live.is_pinned for live in self.live.values())
            return
        self.live[ref].may_be_lost = False

    @rule(pick=st.integers(0, 50), pinned=st.booleans())
    def pin(self, pick: int, pinned: bool) -> None:
        ref = self.ref(pick)
        if ref is not None:
            self.store.pin([ref], pinned)
            self.live[ref].is_pinned = pinned

    @rule(pick=st.integers(0, 50))
    def share(self, pick: int) -> None:
        ref = self.ref(pick)
        if ref is not None:
            self.store.share(ref)
            self.live[ref].refs += 1

    @rule(pick=st.integers(0, 50))
    def free(self, pick: int) -> None:
        ref = self.ref(pick)
        if ref is None:
            return
        self.store.free(ref)
        live = self.live[ref]
        live.refs -= 1
        assert self.store.refcount(ref) == live.refs
        if live.refs == 0:
            del self.live[ref]
            if live.key in self.rows:
                self.doomed.add(live.key)

    # -- what the catalog does

    @rule()
    def commit(self) -> None:
        try:
            self.store.flush()
        except (StoreFull, StoreFailed, RecordDamaged):
            assert not self.is_clean or any(live.is_pinned for live in self.live.values())
            return
        kept: list[Location] = []
        freed: list[Location] = []
        for ref, live in self.live.items():
            location = self.store.locate(ref)
            row = self.rows.get(live.key)
            if location is not None:
                kept.append(location)
                self.generations[location.segment, location.slot] = location.generation
            if row is not None and row.location is not None and row.location != location:
                freed.append(row.location)
                self.flipped.discard(live.key)
            self.rows[live.key] = Row(live.seed, location)
        for key in self.doomed:
            row = self.rows.pop(key)
            if row.location is not None:
                freed.append(row.location)
        self.doomed.clear()
        self.store.settle(kept, freed)
        if self.is_clean:
            n_on_disk = sum(row.location is not None for row in self.rows.values())
            assert self.disk.n_bytes == n_on_disk * FORMAT.slot_nbytes, "no slot leaks"

    @rule(with_power_cut=st.booleans())
    def crash(self, with_power_cut: bool) -> None:
        self.store.close()
        assert self.pool.n_bytes == 0
        if with_power_cut:
            self.system.cut()
        self.open()
        for pick in range(len(self.live)):
            self.get([pick], False)  # every acknowledged record is there

    # -- what the world does

    @rule(
        call=st.sampled_from(["open", "preadv", "pwritev", "fsync", "ftruncate", "rename"]),
        what=st.sampled_from([*sorted(ERRORS), SHORT, NOTHING]),
        first=st.integers(1, 4),
        times=st.integers(1, 4),
    )
    def fault(self, call: str, what: str, first: int, times: int) -> None:
        self.system.fail(call, what, first=first, times=times)
        self.is_clean = False

    @rule()
    def heal(self) -> None:
        self.system.heal()

    @rule(pick=st.integers(0, 50), byte=st.integers(0, NBYTES - 1), bit=st.integers(0, 7))
    def flip_a_bit(self, pick: int, byte: int, bit: int) -> None:
        stored = [key for key, row in self.rows.items() if row.location is not None]
        if not stored:
            return
        key = stored[pick % len(stored)]
        location = self.rows[key].location
        assert location is not None
        in_segment = byte if byte < FORMAT.k_nbytes else FORMAT.v_shift + byte - FORMAT.k_nbytes
        row = SegmentRow(location.segment, SLOTS)
        flip(self.folder / row.file, FORMAT.offset(row, location.slot) + in_segment, bit)
        self.flipped.add(key)
        for live in self.live.values():
            live.may_be_lost |= live.key == key

    # -- what always holds

    @invariant()
    def the_threads_come_to_rest(self) -> None:
        """So that the same steps always have the same outcome. test_tiered_store.py lets them race."""
        with self.store._entries.changed:
            while self.store._writer._unsettled:
                assert self.store._entries.changed.wait(60)
        self.store._fetcher.close()

    @invariant()
    def budgets_are_kept(self) -> None:
        assert self.pool.n_bytes <= HOST * NBYTES
        assert self.disk.n_bytes <= DISK * FORMAT.slot_nbytes


StoreMachine.TestCase.settings = hypothesis_settings(max_examples=100, stateful_step_count=40, deadline=None)
TestStoreMachine = StoreMachine.TestCase
