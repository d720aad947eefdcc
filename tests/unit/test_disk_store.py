"""The disk tier: what is read is what was written, or an error that concerns one record."""

from __future__ import annotations

import os
import threading
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from power_cut import PowerCut
from store_data import FORMAT, NBYTES, SLOTS, disk_store, growing, record
from store_faults import SHORT, FaultySystem, Stops, flip

from kvmem_llama.errors import RecordDamaged, StoreError, StoreFailed, StoreFull
from kvmem_llama.store import descriptors
from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.files import Files
from kvmem_llama.store.location import Location, checksum_of
from kvmem_llama.store.segment import SegmentRow, create_segment
from kvmem_llama.store.slots import Slots


def put(store: DiskStore, *seeds: int) -> list[Location]:
    written = store.write([record(seed) for seed in seeds])
    assert written.error is None
    assert store.sync() == {}
    return written.locations


def errors_of(store: DiskStore, locations: list[Location]) -> list[StoreError | None]:
    return store.read(locations, [np.empty(NBYTES, np.uint8) for _ in locations])


def assert_reads(store: DiskStore, locations: list[Location], *seeds: int) -> None:
    buffers = [np.empty(NBYTES, np.uint8) for _ in locations]
    assert store.read(locations, buffers) == [None] * len(locations)
    for buffer, seed in zip(buffers, seeds, strict=True):
        assert np.array_equal(buffer, record(seed)), seed


def n_free(store: DiskStore) -> int:
    return sum(row.n_slots - n_used for row, n_used in store.segments().items())


def test_records_come_back_in_any_order_and_number(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    locations = put(store, *range(11))
    assert_reads(store, locations, *range(11))
    order = [7, 2, 2, 10, 0]
    assert_reads(store, [locations[i] for i in order], *order)
    assert_reads(store, [])
    store.close()


def test_neighbours_are_moved_in_one_transfer(tmp_path: Path) -> None:
    for coalesce, n_calls in ((True, 2), (False, 8)):
        system = FaultySystem()
        store = disk_store(tmp_path / str(coalesce), Files(system), coalesce=coalesce)
        put(store, 100)  # makes the first segment
        store.release(put(store, 101)[0])
        system.calls.clear()
        locations = put(store, *range(8))
        assert [location.segment for location in locations] == [1, 1, 1, 2, 2, 2, 2, 3]
        n_headers = 2  # of the new segments
        assert system.calls["pwritev"] == n_headers + n_calls + coalesce
        for number in range(1, 4):  # opens and checks them
            errors_of(store, [location for location in locations if location.segment == number][:1])
        system.calls.clear()
        assert_reads(store, locations, *range(8))
        assert system.calls["preadv"] == n_calls + coalesce
        store.close()


def test_a_slot_used_again_never_passes_for_what_it_held(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    old = put(store, 1)[0]
    store.keep(old)
    assert not store.give_back(old), "the catalog names it"
    store.release(old)
    new = put(store, 7)[0]
    assert (new.segment, new.slot) == (old.segment, old.slot)
    assert new.generation == old.generation + 1
    assert new.checksum != checksum_of(record(7), old.generation)
    assert_reads(store, [new], 7)
    assert isinstance(errors_of(store, [old])[0], RecordDamaged)
    store.release(old)  # too late: another record is there
    assert put(store, 2)[0].slot != new.slot
    store.close()


def test_a_store_opened_again_knows_what_the_catalog_tells_it(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    kept = put(store, *range(6))
    store.close()
    rows = [SegmentRow(1, SLOTS), SegmentRow(2, SLOTS)]
    slots = [(location.segment, location.slot, location.generation, True) for location in kept[:5]]
    system = FaultySystem()
    files = Files(system)
    again = DiskStore(
        tmp_path, FORMAT, segments=rows, slots=slots, grow=growing(files, tmp_path), files=files
    )
    assert not system.calls, "opening reads nothing"
    assert n_free(again) == 3
    assert_reads(again, kept[:5], *range(5))
    more = put(again, 10, 11, 12)
    assert {location.segment for location in more} == {2}
    assert not {(at.segment, at.slot) for at in more} & {(at.segment, at.slot) for at in kept[:5]}
    assert_reads(again, kept[:5] + more, *range(5), 10, 11, 12)
    again.close()


def test_segments_of_others_are_read_and_never_written(tmp_path: Path) -> None:
    theirs = disk_store(tmp_path)
    locations = put(theirs, 1, 2)
    mine = disk_store(tmp_path)
    assert_reads(mine, locations, 1, 2)
    assert not mine.owns(locations[0])
    mine.release(locations[0])
    assert put(mine, 3)[0].segment == 2
    theirs.close()
    mine.close()


def test_a_read_only_store_reads(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    locations = put(store, 1)
    store.close()
    viewer = DiskStore(tmp_path, FORMAT, grow=growing(Files(), tmp_path), read_only=True)
    assert_reads(viewer, locations, 1)
    assert isinstance(viewer.write([record(2)]).error, StoreFailed)
    viewer.close()


@pytest.mark.parametrize(
    "byte", [0, FORMAT.k_nbytes - 1, FORMAT.v_shift, FORMAT.v_shift + FORMAT.v_nbytes - 1]
)
def test_a_flipped_bit_concerns_its_record_alone(tmp_path: Path, byte: int) -> None:
    store = disk_store(tmp_path)
    locations = put(store, 0, 1, 2, 3)
    flip(tmp_path / "000001.gguf", FORMAT.offset(SegmentRow(1, SLOTS), 1) + byte, 5)
    errors = errors_of(store, locations)
    assert [type(error) for error in errors] == [type(None), RecordDamaged, type(None), type(None)]
    assert "segment 1, slot 1" in str(errors[1])
    store.close()


def test_a_read_error_of_the_drive_concerns_its_record_alone(tmp_path: Path) -> None:
    system = FaultySystem()
    store = disk_store(tmp_path, Files(system))
    locations = put(store, 0, 1, 2, 3)
    errors_of(store, locations[:1])  # opened
    system.fail("preadv", "EIO", first=1, times=1)  # the transfer of all four
    system.fail("preadv", "EIO", first=3, times=1)  # then the second alone
    errors = errors_of(store, locations)
    assert [type(error) for error in errors] == [type(None), RecordDamaged, type(None), type(None)]
    system.heal()
    assert_reads(store, locations, 0, 1, 2, 3)
    store.close()


def test_short_reads_are_continued(tmp_path: Path) -> None:
    system = FaultySystem()
    store = disk_store(tmp_path, Files(system))
    system.fail("pwritev", SHORT, times=9)
    locations = put(store, 0, 1, 2, 3)
    system.fail("preadv", SHORT, times=9)
    assert_reads(store, locations, 0, 1, 2, 3)
    store.close()


def test_a_missing_or_cut_segment_costs_its_records_only(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    locations = put(store, *range(12))
    store.close()
    (tmp_path / "000001.gguf").unlink()
    os.truncate(tmp_path / "000002.gguf", 20000)
    again = disk_store(tmp_path)
    errors = errors_of(again, locations)
    assert all(isinstance(error, RecordDamaged) for error in errors[:8])
    assert errors[8:] == [None] * 4
    again.close()


@pytest.mark.parametrize("what", ["EMFILE", "EACCES"])
def test_what_may_pass_is_not_damage(tmp_path: Path, what: str) -> None:
    system = FaultySystem()
    files = Files(system)
    store = disk_store(tmp_path, files)
    locations = put(store, 0)
    store.close()
    again = disk_store(tmp_path, files)
    system.fail("open", what)
    assert isinstance(errors_of(again, locations)[0], StoreFailed)
    system.heal()
    assert_reads(again, locations, 0)
    again.close()


def test_a_full_disk_stops_where_it_is_full_and_its_slots_are_used_later(tmp_path: Path) -> None:
    system = FaultySystem()
    store = disk_store(tmp_path, Files(system), coalesce=False)
    put(store, 50)
    system.fail("pwritev", "ENOSPC", first=3)
    written = store.write([record(seed) for seed in range(3)])
    assert len(written.locations) == 2
    assert isinstance(written.error, StoreFull)
    system.heal()
    assert_reads(store, written.locations, 0, 1)
    assert put(store, 2)[0].segment == 1
    store.close()


def test_no_segment_can_be_made_on_a_full_disk(tmp_path: Path) -> None:
    system = FaultySystem()
    store = disk_store(tmp_path, Files(system))
    first = put(store, 0, 1)
    system.fail("ftruncate", "ENOSPC")
    written = store.write([record(seed) for seed in range(2, 7)])
    assert len(written.locations) == 2
    assert isinstance(written.error, StoreFull)
    system.heal()
    assert_reads(store, first + written.locations, 0, 1, 2, 3)
    assert len(put(store, *range(4, 7))) == 3
    store.close()


def test_a_slot_the_drive_refuses_is_tried_last(tmp_path: Path) -> None:
    system = FaultySystem()
    store = disk_store(tmp_path, Files(system))
    first = put(store, 0)[0]
    system.fail("pwritev", "EIO", times=1)
    assert isinstance(store.write([record(1)]).error, StoreFailed)
    more = [put(store, seed)[0].slot for seed in range(1, SLOTS)]
    assert more == [first.slot + 2, first.slot + 3, first.slot + 1]
    store.close()


def test_a_missing_or_damaged_segment_gets_no_more_records(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    put(store, 0)
    store.close()
    flip(tmp_path / "000001.gguf", 30)
    rows = [SegmentRow(1, SLOTS), SegmentRow(2, SLOTS)]  # the second one is missing
    again = DiskStore(tmp_path, FORMAT, segments=rows, grow=growing(Files(), tmp_path), files=Files())
    errors = [again.write([record(1)]).error for _ in range(2)]
    assert [type(error) for error in errors] == [RecordDamaged, StoreFailed]
    assert put(again, 1)[0].segment == 2, "made anew"
    again.close()


@pytest.mark.parametrize("n_records", [1, 3 * SLOTS])
def test_other_segments_take_the_records_of_missing_ones(tmp_path: Path, n_records: int) -> None:
    """However many of them are made for it."""
    rows = [SegmentRow(1, SLOTS), SegmentRow(2, SLOTS)]
    numbers = count(3)

    def grow() -> SegmentRow:
        return create_segment(Files(), tmp_path, next(numbers), SLOTS, FORMAT)

    store = DiskStore(tmp_path, FORMAT, segments=rows, grow=grow, files=Files())
    done = store.place([record(seed) for seed in range(n_records)])
    assert done.error is None and len(done.locations) == n_records
    assert {at.segment for at in done.locations} <= {3, 4, 5}
    assert store.place([record(99)]).error is None
    store.close()


@pytest.mark.parametrize("n_segments", [0, 1, 3])
def test_a_folder_that_is_missing_is_an_error_once_every_segment_was_tried(
    tmp_path: Path, n_segments: int
) -> None:
    folder, system, numbers = tmp_path / "segments", FaultySystem(), count(n_segments + 1)
    files = Files(system)
    rows = [SegmentRow(number, SLOTS) for number in range(1, n_segments + 1)]

    def grow() -> SegmentRow:
        return create_segment(files, folder, next(numbers), SLOTS, FORMAT)

    store = DiskStore(folder, FORMAT, segments=rows, grow=grow, files=files)
    for n_more in (n_segments + 1, 1):  # the second time only a new segment is tried
        before = system.calls["open"]
        assert isinstance(store.place([record(7)]).error, StoreFailed)
        assert system.calls["open"] - before == n_more
    folder.mkdir()
    assert store.place([record(7)]).error is None
    store.close()


def test_what_a_failed_sync_may_have_lost_is_said_for_good(tmp_path: Path) -> None:
    system = FaultySystem()
    store = disk_store(tmp_path, Files(system))
    put(store, 0)
    store.write([record(1)])
    system.fail("fsync", "EIO", only=".gguf", times=1)
    assert list(store.sync()) == [1]
    assert list(store.sync()) == [1], "a second sync proves nothing"
    assert put_elsewhere(store) == 2
    store.close()


def put_elsewhere(store: DiskStore) -> int:
    written = store.write([record(2)])
    assert 2 not in store.sync()
    return written.locations[0].segment


@pytest.mark.parametrize("skip_syncs", [False, True])
def test_synced_records_survive_a_power_cut(tmp_path: Path, skip_syncs: bool) -> None:
    system = PowerCut()
    store = disk_store(tmp_path, Files(system))
    first = put(store, 0, 1)
    system.skip = "all" if skip_syncs else None
    second = put(store, 2)
    system.cut()
    errors = errors_of(store, first + second)
    assert errors[:2] == [None, None]
    assert isinstance(errors[2], RecordDamaged) == skip_syncs
    store.close()


def test_points_to_stop_at_are_passed_in_order(tmp_path: Path) -> None:
    files = Stops()
    passed: list[str] = []
    for point in ("data_write.before", "data_write.after", "sync.before", "sync.after"):
        files.on[point] = lambda point=point: passed.append(point)  # type: ignore[misc]
    store = disk_store(tmp_path, files)
    put(store, 0)
    assert passed == ["data_write.before", "data_write.after", "sync.before", "sync.after"]
    store.close()


def test_an_erased_record_is_zeros_and_takes_no_space(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    locations = put(store, 0, 1)
    path = tmp_path / "000001.gguf"
    n_blocks = path.stat().st_blocks
    store.erase(locations[0])
    assert record(0)[:64].tobytes() not in path.read_bytes()
    assert path.stat().st_blocks < n_blocks
    assert isinstance(errors_of(store, locations)[0], RecordDamaged)
    assert_reads(store, locations[1:], 1)
    store.release(locations[0])
    again = put(store, 2)[0]
    store.erase(locations[0])  # another record is there now
    assert_reads(store, [again], 2)
    store.close()


def test_a_dropped_segment_is_gone(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    locations = put(store, *range(5))
    for number in (1, 1):
        store.seal(number)
        store.drop_segment(number)
    assert [path.name for path in tmp_path.iterdir()] == ["000002.gguf"]
    assert store.n_bytes == FORMAT.slot_nbytes
    assert isinstance(errors_of(store, locations[:1])[0], RecordDamaged)
    store.close()


def test_sealed_and_avoided_segments_get_no_records(tmp_path: Path) -> None:
    store = disk_store(tmp_path)
    first = put(store, 0)[0]
    store.seal(1)
    second = put(store, 1)[0]
    assert second.segment == 2
    assert store.write([record(2)], avoid=[2]).locations[0].segment == 3
    store.release(first)
    assert put(store, 3)[0].segment != 1
    store.close()


def test_the_budget_counts_slots_in_use(tmp_path: Path) -> None:
    store = disk_store(tmp_path, budget=3 * FORMAT.slot_nbytes + 100)
    assert store.n_over(3) == 0
    assert store.n_over(4) == 1
    locations = put(store, 0, 1, 2)
    assert store.n_over(1) == 1
    store.give_back(locations[0])
    assert store.n_over(1) == 0
    assert store.n_bytes == 2 * FORMAT.slot_nbytes
    store.close()


def test_few_files_are_open_however_many_segments_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "MAX_OPEN", 5)
    store = disk_store(tmp_path, n_slots=1)
    locations = put(store, *range(20))
    n_before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert_reads(store, locations, *range(20))
        assert store.n_files_open <= 5
        assert len(os.listdir("/proc/self/fd")) <= n_before
    store.close()
    assert store.n_files_open == 0


def test_threads_read_write_and_free_at_once(tmp_path: Path) -> None:
    store = disk_store(tmp_path, n_slots=7)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(15):
                seeds = [seed * 1000 + i * 10 + k for k in range(3)]
                locations = put(store, *seeds)
                assert_reads(store, locations, *seeds)
                for location in locations[1:]:
                    store.release(location)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.n_bytes == 4 * 15 * FORMAT.slot_nbytes
    store.close()


@given(st.lists(st.tuples(st.sampled_from("tgrkcs"), st.integers(0, 30)), max_size=60))
def test_a_slot_has_one_record_at_a_time(operations: list[tuple[str, int]]) -> None:
    slots = Slots()
    for number in (1, 2, 3):
        slots.add(SegmentRow(number, 5), [(0, 7, number == 2), (3, 1, False)])
    seen: dict[tuple[int, int], int] = {}
    live: dict[tuple[int, int], str] = {(2, 0): "kept"}
    order: list[tuple[int, int, int]] = []
    sealed: set[int] = set()
    for operation, pick in operations:
        if operation == "t":
            taken = slots.take()
            if taken is None:
                continue
            key = (taken.segment, taken.slot)
            assert key not in live
            assert taken.segment not in sealed
            assert taken.generation > seen.get(key, -1)
            seen[key] = taken.generation
            live[key] = "provisional"
            order.append((*key, taken.generation))
        elif operation == "c" and pick < 3:
            slots.close(pick + 1)
            sealed.add(pick + 1)
        elif order:
            number, slot, generation = order[pick % len(order)]
            is_this = (number, slot) in live and seen[number, slot] == generation
            if operation == "k":
                slots.keep(number, slot, generation)
                if is_this:
                    live[number, slot] = "kept"
            elif operation == "g":
                was_provisional = is_this and live[number, slot] == "provisional"
                assert slots.give_back(number, slot, generation) == was_provisional
                if was_provisional:
                    del live[number, slot]
            elif operation == "r":
                slots.release(number, slot, generation)
                if is_this:
                    del live[number, slot]
            assert slots.holds(number, slot, generation) == (
                (number, slot) in live and seen[number, slot] == generation
            )
        assert slots.n_used == len(live)


def test_a_segment_made_by_hand_is_found_by_number(tmp_path: Path) -> None:
    """Without a catalog the numbers come from the folder."""
    create_segment(Files(), tmp_path, 41, SLOTS, FORMAT)
    store = DiskStore(tmp_path, FORMAT)
    assert put(store, 0)[0].segment == 42
    store.close()
