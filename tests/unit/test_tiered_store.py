"""Host over disk over tokens: records survive budgets, faults and the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from store_data import FORMAT, NBYTES, SLOTS, record
from store_faults import FaultySystem, Stops, flip
from tiered_run import assert_set, opened

from kvmem_llama.errors import RecordDamaged, StoreFailed, StoreFull
from kvmem_llama.store import BlockStore, HostStore
from kvmem_llama.store.location import Location, RecordFiles
from kvmem_llama.store.records import NotStored, StaleRecord
from kvmem_llama.store.segment import SegmentRow


def test_it_is_a_block_store_and_the_record_files_of_a_catalog(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        as_store: BlockStore = store.tiered
        as_files: RecordFiles = store.tiered
        assert as_store.stats().n_records == 0
        as_files.flush()


def test_a_store_in_ram_offers_the_same(tmp_path: Path) -> None:
    store: BlockStore = HostStore()
    refs = [store.put(record(seed)) for seed in range(3)]
    store.retrieved(refs)
    store.pin(refs)
    assert store.prefetch(refs) == 0
    assert {store.where(ref) for ref in refs} == {"host"}
    assert [len(batch) for batch in store.fetch(refs)] == [3]
    store.restore(refs[0], record(9))
    found = store.get_many(refs)
    assert all(np.array_equal(a, record(seed)) for a, seed in zip(found, (9, 1, 2), strict=True))
    store.free(refs[1])
    assert store.stats().n_bytes == 2 * NBYTES
    for call in (store.where, store.get, lambda ref: store.pin([ref])):
        with pytest.raises(StaleRecord):
            call(refs[1])


def test_records_larger_than_the_host_budget_come_back_from_disk(tmp_path: Path) -> None:
    with opened(tmp_path, host=3) as store:
        refs = store.put(*range(20))
        store.tiered.flush()
        assert store.pool.n_bytes <= 3 * NBYTES
        assert store.is_sound(refs, *range(20))
        assert store.is_sound([refs[7], refs[1], refs[7]], 7, 1, 7)
        assert {store.tiered.where(ref) for ref in refs} == {"host", "disk"}
        assert not store.tiered.get(refs[0]).flags.writeable
        tiers = store.tiered.tiers()
        assert (tiers.n_disk, tiers.n_pending, tiers.n_tokens) == (20, 0, 0)
        assert tiers.disk_bytes == 20 * FORMAT.slot_nbytes
        assert tiers.n_reads >= 17


def test_records_survive_the_process(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        locations = store.commit(store.put(*range(5)))
    system = FaultySystem()
    with opened(tmp_path, system=system) as again:
        refs = [again.tiered.attach(location, 2.0, 9) for location in locations]
        assert not system.calls, "opening reads nothing"
        assert again.tiered.heat(refs[0]) == (2.0, 9)
        assert again.is_sound(refs, *range(5))


def test_references_are_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        (ref,) = store.put(1)
        store.tiered.share(ref)
        store.tiered.free(ref)
        assert store.tiered.refcount(ref) == 1
        assert store.is_sound([ref], 1)
        store.tiered.free(ref)
        assert store.tiered.refcount(ref) == 0
        for call in (store.tiered.get, store.tiered.free, store.tiered.share, store.tiered.where):
            with pytest.raises(StaleRecord):
                call(ref)
        assert store.put(2)[0] != ref
        assert store.pool.n_bytes == NBYTES


def test_a_slot_is_used_again_at_once_only_if_the_catalog_never_named_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        (provisional,) = store.put(1)
        store.tiered.flush()
        store.tiered.free(provisional)
        assert store.disk.n_bytes == 0
        refs = store.put(2)
        (kept,) = store.commit(refs)
        store.tiered.free(refs[0])
        assert store.disk.n_bytes == FORMAT.slot_nbytes
        assert np.array_equal(store.tiered.read(kept), record(2)), "a crash now finds it"
        others = store.put(*range(10, 10 + SLOTS))
        assert kept not in store.commit(others)
        store.tiered.settle([], [kept])
        assert store.disk.n_bytes == SLOTS * FORMAT.slot_nbytes


def test_a_record_freed_while_it_is_written_leaves_no_slot_behind(tmp_path: Path) -> None:
    files = Stops()
    writing, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        writing.set()
        assert_set(go_on)

    files.on["data_write.after"] = wait
    with opened(tmp_path, files=files) as store:
        (ref,) = store.put(1)
        assert writing.wait(10)
        store.tiered.free(ref)
        (other,) = store.put(2)
        assert other.slot == ref.slot
        go_on.set()
        store.tiered.flush()
        assert store.is_sound([other], 2)
        assert store.disk.n_bytes == FORMAT.slot_nbytes


def test_a_flush_waits_only_for_what_is_unfinished_and_counts_that(tmp_path: Path) -> None:
    files = Stops()
    go_on = threading.Event()
    files.on["data_write.before"] = lambda: assert_set(go_on)
    with opened(tmp_path, files=files) as store:
        refs = store.put(1)
        flusher = threading.Thread(target=store.tiered.flush)
        flusher.start()
        with pytest.raises(RuntimeError, match="not flushed"):
            store.tiered.locate(refs[0])
        go_on.set()
        flusher.join(10)
        assert store.tiered.locate(refs[0]) is not None
        assert store.tiered.tiers().n_flush_waits == 1
        store.tiered.flush()
        assert store.tiered.tiers().n_flush_waits == 1


def test_without_stage_out_nothing_is_written_before_a_flush(tmp_path: Path) -> None:
    with opened(tmp_path, stage_out=False, host=4) as store:
        refs = store.put(1, 2)
        assert not list(tmp_path.iterdir())
        store.tiered.flush()
        assert store.disk.n_bytes == 2 * FORMAT.slot_nbytes
        refs += store.put(*range(3, 15))  # more than the host holds
        store.tiered.flush()
        assert store.is_sound(refs, *range(1, 15))


def test_relaxed_durability_writes_without_a_sync(tmp_path: Path) -> None:
    for durable in (False, True):
        system = FaultySystem()
        with opened(tmp_path / str(durable), system=system, durable=durable) as store:
            refs = store.put(1)
            store.commit(refs)
            n_for_the_segment = 2
            assert (system.calls["fsync"] > n_for_the_segment) == durable


def test_a_full_disk_is_said_by_flush_and_can_be_tried_again(tmp_path: Path) -> None:
    system = FaultySystem()
    with opened(tmp_path, system=system) as store:
        kept = store.put(0)
        locations = store.commit(kept)
        system.fail("pwritev", "ENOSPC")
        refs = store.put(1, 2, 3)
        for _ in range(2):
            with pytest.raises(StoreFull):
                store.tiered.flush()
        assert store.is_sound([*kept, *refs], 0, 1, 2, 3), "they are still in the host"
        system.heal()
        locations += store.commit(refs)
        assert len(set(locations)) == 4
        assert [np.array_equal(store.tiered.read(at), record(i)) for i, at in enumerate(locations)] == [
            True
        ] * 4


def test_records_that_cannot_be_written_can_be_given_up(tmp_path: Path) -> None:
    system = FaultySystem()
    with opened(tmp_path, system=system, host=3) as store:
        system.fail("open", "EACCES")
        refs = store.put(1, 2, 3)
        with pytest.raises(StoreFailed):
            store.put(4)  # no room will be made for it
        with pytest.raises(StoreFailed):
            store.tiered.flush()
        for ref in refs:
            store.tiered.free(ref)
        store.tiered.flush()
        system.heal()
        store.commit(store.put(*range(5)))
        assert store.tiered.stats().n_records == 5


def test_after_a_failed_sync_records_are_written_elsewhere(tmp_path: Path) -> None:
    system = FaultySystem()
    with opened(tmp_path, system=system, stage_out=False) as store:
        first = store.commit(store.put(0))
        system.fail("fsync", "EIO", only="000001.gguf", times=1)
        refs = store.put(1, 2)
        with pytest.raises(StoreFailed):
            store.tiered.flush()
        second = store.commit(refs)
        assert {at.segment for at in first} == {1}
        assert {at.segment for at in second} == {2}


def test_what_a_catalog_writes_itself_is_known_to_be_lost_by_its_own_sync(tmp_path: Path) -> None:
    system = FaultySystem()
    with opened(tmp_path, system=system) as store:
        location = store.tiered.write(record(1))
        store.tiered.sync()
        assert np.array_equal(store.tiered.read(location), record(1))
        system.fail("fsync", "EIO", only=".gguf", times=1)
        store.tiered.write(record(2))
        with pytest.raises(StoreFailed):
            store.tiered.sync()
        store.tiered.sync()
        assert store.tiered.write(record(3), avoid=[2]).segment == 3
        system.fail("pwritev", "ENOSPC")
        with pytest.raises(StoreFull):
            store.tiered.write(record(4))


def test_a_defect_on_the_worker_reaches_who_waits(tmp_path: Path) -> None:
    files = Stops()

    def fail() -> None:
        raise ZeroDivisionError

    files.on["stage_out"] = fail
    with opened(tmp_path, files=files) as store:
        refs = store.put(1)
        with pytest.raises(ZeroDivisionError):
            store.tiered.flush()
        files.on.clear()
        assert len(store.commit(refs)) == 1, "the worker lives on"
        files.on["sync.before"] = fail
        refs = store.put(2)
        with pytest.raises(ZeroDivisionError):
            store.tiered.flush()
        files.on.clear()
        assert len(store.commit(refs)) == 1
        assert store.disk.n_bytes == 2 * FORMAT.slot_nbytes


# -- damage and the tokens tier


def test_all_damaged_records_are_named_and_the_others_are_there(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        locations = store.commit(store.put(*range(6)))
    for i in (1, 4):
        row = SegmentRow(locations[i].segment, SLOTS)
        flip(tmp_path / row.file, FORMAT.offset(row, locations[i].slot) + 77)
    with opened(tmp_path, host=10) as again:
        refs = [again.tiered.attach(location) for location in locations]
        with pytest.raises(RecordDamaged) as caught:
            again.tiered.get_many(refs)
        assert set(caught.value.refs) == {refs[1], refs[4]}
        batches = []
        with pytest.raises(RecordDamaged) as caught:
            for batch in again.tiered.fetch(refs):
                batches += [(i, record.copy()) for i, record in batch]
        assert set(caught.value.refs) == {refs[1], refs[4]}
        assert sorted(i for i, _ in batches) == [0, 2, 3, 5]
        assert all(np.array_equal(found, record(i)) for i, found in batches)
        for i in (1, 4):
            again.tiered.restore(refs[i], record(100 + i))
        assert again.is_sound(refs, 0, 101, 2, 3, 104, 5)
        moved = again.commit(refs)
        assert [a == b for a, b in zip(locations, moved, strict=True)] == [
            True,
            False,
            True,
            True,
            False,
            True,
        ]


def test_the_coldest_unpinned_records_fall_when_the_disk_budget_is_used_up(tmp_path: Path) -> None:
    with opened(tmp_path, host=3, disk=6, stage_out=False) as store:
        refs = store.put(*range(6))
        locations = store.commit(refs)
        store.tiered.retrieved(refs[2:])
        store.tiered.retrieved(refs[3:])
        store.tiered.pin(refs[:1])
        refs += store.put(6, 7)
        store.tiered.flush()
        assert store.fallen == [locations[1], locations[2]]
        where = [store.tiered.where(ref) for ref in refs]
        assert [i for i, tier in enumerate(where) if tier == "tokens"] == [1, 2]
        assert store.disk.n_bytes == 6 * FORMAT.slot_nbytes
        with pytest.raises(NotStored) as caught:
            store.tiered.get_many(refs)
        assert set(caught.value.refs) == {refs[1], refs[2]}
        with pytest.raises(NotStored):
            next(iter(store.tiered.fetch(refs)))
        assert store.tiered.locate(refs[1]) is None
        assert store.is_sound([refs[0], *refs[3:]], 0, 3, 4, 5, 6, 7)
        store.tiered.restore(refs[1], record(1))
        store.tiered.flush()
        assert store.is_sound([refs[1]], 1)
        assert store.tiered.tiers().n_fallen == 3
        assert store.tiered.tiers().n_tokens == 2


def test_pinned_records_never_fall_even_if_nothing_else_can(tmp_path: Path) -> None:
    with opened(tmp_path, disk=3) as store:
        refs = store.put(0, 1, 2)
        store.commit(refs)
        store.tiered.pin(refs)
        more = store.put(3)
        with pytest.raises(StoreFull, match="disk-budget"):
            store.tiered.flush()
        store.tiered.pin(refs[:1], pinned=False)
        store.tiered.flush()
        assert store.tiered.where(more[0]) == "host"
        assert [store.tiered.locate(ref) is None for ref in refs] == [True, False, False]


def test_a_catalog_that_cannot_record_a_fall_keeps_the_record(tmp_path: Path) -> None:
    with opened(tmp_path, disk=2) as store:
        refs = store.put(0, 1)
        store.commit(refs)

        def fail(_: Sequence[Location]) -> None:
            raise StoreFailed("catalog", "no")

        store.tiered._writer._fall = fail  # type: ignore[misc]
        store.put(2)
        with pytest.raises(StoreFailed, match="catalog"):
            store.tiered.flush()
        assert store.is_sound(refs, 0, 1)
        assert None not in [store.tiered.locate(ref) for ref in refs]


def test_a_record_attached_to_the_tokens_tier_is_restored(tmp_path: Path) -> None:
    with opened(tmp_path, stage_out=False) as store:  # what is restored waits in RAM for the flush
        ref = store.tiered.attach(None)
        assert store.tiered.where(ref) == "tokens"
        store.tiered.restore(ref, record(5))
        store.tiered.restore(ref, record(6))  # not lost any more
        assert len(store.commit([ref])) == 1
        assert store.is_sound([ref], 5)


def test_records_the_catalog_moved_are_read_where_they_are_now(tmp_path: Path) -> None:
    with opened(tmp_path, host=2) as store:
        refs = store.put(*range(6))
        old = store.commit(refs)
        store.tiered.seal(1)
        inside = [at for at in old if at.segment == 1]
        new = {at: store.tiered.write(store.tiered.read(at), avoid=[1]) for at in inside}
        store.tiered.sync()
        store.tiered.moved(new)
        store.tiered.settle(list(new.values()), inside)
        store.tiered.drop_segment(1)
        assert store.is_sound(refs, *range(6))
        assert not (tmp_path / "000001.gguf").exists()
        assert store.disk.n_bytes == 6 * FORMAT.slot_nbytes
