"""Many records of a tiered store at once: fetching, prefetching, several threads, the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from store_data import NBYTES, SLOTS, record
from tiered_run import Store, opened

from kvmem_llama.errors import InvalidOption, RecordDamaged, StoreFailed, WorkspaceClosed
from kvmem_llama.native.host_memory import HostMemory
from kvmem_llama.store.location import Location
from kvmem_llama.store.pool import HostPool
from kvmem_llama.store.raw_k import RawK
from kvmem_llama.store.records import NotStored, Record, RecordRef, StaleRecord
from kvmem_llama.store.system import System

# -- reading many


@pytest.mark.parametrize("host", [2, 10, 100])
def test_fetching_gives_every_record_once_in_batches(tmp_path: Path, host: int) -> None:
    with opened(tmp_path, host=host) as store:
        refs = store.put(*range(50))
        store.tiered.flush()
        asked = [refs[i] for i in (*range(49, -1, -1), 3, 3)]
        found: dict[int, bytes] = {}
        for batch in store.tiered.fetch(asked):
            for i, data in batch:
                assert i not in found
                assert not data.flags.writeable
                found[i] = data.tobytes()
        assert [found[i] for i in range(52)] == [
            record(seed).tobytes() for seed in (*range(49, -1, -1), 3, 3)
        ]
        assert list(store.tiered.fetch([])) == []


def test_fetching_keeps_two_batches_in_memory_and_no_more(tmp_path: Path) -> None:
    made: list[int] = []

    class Counted(HostMemory):
        def allocate(self, nbytes: int) -> Record:
            made.append(nbytes)
            return super().allocate(nbytes)

    with opened(tmp_path, pool=HostPool(2 * NBYTES, memory=Counted())) as store:
        refs = store.put(*range(200))
        store.tiered.flush()
        for _ in range(3):
            assert sum(len(batch) for batch in store.tiered.fetch(refs)) == 200
        assert len(made) <= 2 * 16 + 2 * 3


def test_a_fetch_given_up_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    with opened(tmp_path, host=4) as store:
        refs = store.put(*range(60))
        store.tiered.flush()
        for _ in range(20):
            store.tiered.retrieved(refs[:4])
            reading = store.tiered.fetch(refs)
            next(reading)
            next(reading)
            reading.close()  # type: ignore[attr-defined]
        assert store.pool._reserved_bytes == 0
        assert store.is_sound(refs, *range(60))


def test_prefetched_records_are_in_the_host_when_they_are_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        locations = store.commit(store.put(*range(6)))
    with opened(tmp_path, host=4) as again:
        refs = [again.tiered.attach(location) for location in locations]
        assert again.tiered.prefetch([*refs, refs[0]]) == 4, "as many as fit"
        assert again.is_sound(refs[:4], 0, 1, 2, 3)
        assert again.tiered.tiers().n_reads == 0
        assert again.tiered.prefetch(refs[:4]) == 0
        os.truncate(tmp_path / "000002.gguf", 10)
        again.tiered.retrieved(refs[4:])
        assert again.tiered.prefetch(refs[4:]) == 2
        with pytest.raises(RecordDamaged):
            again.tiered.get_many(refs)
        assert again.pool._reserved_bytes == 0


def test_a_record_freed_and_replaced_while_it_is_read_is_stale_not_damaged(tmp_path: Path) -> None:
    class Slow(System):
        hook = staticmethod(lambda: None)

        def preadv(self, fd: int, buffers: Sequence[np.ndarray], offset: int) -> int:
            if offset:
                self.hook()
            return super().preadv(fd, buffers, offset)

    system = Slow()
    with opened(tmp_path, system=system, host=2) as store:
        refs = store.put(*range(SLOTS))  # so that the only free slot is the one that is freed
        store.tiered.flush()
        gone = next(ref for ref in refs if store.tiered.where(ref) == "disk")

        def replace() -> None:
            system.hook = staticmethod(lambda: None)  # type: ignore[method-assign]
            store.tiered.free(gone)
            store.put(99)
            store.tiered.flush()

        system.hook = staticmethod(replace)  # type: ignore[method-assign]
        with pytest.raises(StaleRecord):
            store.tiered.get(gone)


# -- threads, descriptors, the end


def test_closing_joins_the_worker_and_nothing_grows(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = counts()
    pool = HostPool(4 * NBYTES)
    with opened(tmp_path, pool=pool) as store:
        locations: list[Location] = []
        steady: set[tuple[int, int]] = set()
        for step in range(30):
            refs = store.put(*range(3))
            locations = store.commit(refs)
            store.is_sound(refs, *range(3))
            for ref in refs:
                store.tiered.free(ref)
            store.tiered.settle([], locations)
            if step > 2:
                steady.add(counts())
        assert len({threads for threads, _ in steady}) == 1
        assert len({files for _, files in steady}) == 1
        assert store.disk.n_bytes == 0
        assert len(list(tmp_path.iterdir())) <= 2
        store.put(1)
    store.tiered.close()
    assert counts() == before
    assert pool.n_bytes == 0
    with pytest.raises(WorkspaceClosed):
        store.put(1)
    assert pool.n_bytes == 0


def test_a_budget_too_small_for_two_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="host-budget"):
        Store(tmp_path, pool=HostPool(2 * NBYTES - 1))
    with opened(tmp_path) as store, pytest.raises(ValueError, match="bytes"):
        store.tiered.put(np.zeros(3, np.uint8))


def test_stores_of_one_pool_work_at_once_within_its_budget(tmp_path: Path) -> None:
    pool = HostPool(6 * NBYTES)
    stores = [Store(tmp_path / str(i), pool=pool, disk=20) for i in range(3)]
    failures: list[BaseException] = []

    def work(number: int, store: Store) -> None:
        try:
            rng = np.random.default_rng(number)
            refs: dict[RecordRef, int] = {}
            for step in range(60):
                seed = number * 1000 + step
                refs[store.tiered.put(record(seed))] = seed
                assert pool.n_bytes <= pool.budget
                picked = [list(refs)[i] for i in rng.integers(0, len(refs), 3)]
                if step % 5 == 0:
                    store.commit(list(refs))
                    store.tiered.retrieved(picked)
                store.tiered.prefetch(picked)
                try:
                    assert store.is_sound(picked, *(refs[ref] for ref in picked))
                except NotStored as lost:
                    for ref in lost.refs:
                        store.tiered.restore(ref, record(refs[ref]))
                if len(refs) > 30:
                    gone = picked[0]
                    del refs[gone]
                    store.tiered.free(gone)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.tiered.close()
    assert not failures
    assert pool.n_bytes == 0
    assert pool.peak_bytes <= pool.budget


def test_a_record_restored_while_it_falls_is_not_lost(tmp_path: Path) -> None:
    with opened(tmp_path, disk=3, host=2) as store:
        refs = store.put(0, 1, 2)
        store.commit(refs)
        store.tiered.retrieved(refs[1:])
        falls: list[Location] = []

        def fall(locations: Sequence[Location]) -> None:
            """The catalog is slow: memory finds the record damaged and computes it again meanwhile."""
            if not falls:
                falls.extend(locations)
                store.pool.put(refs[0], record(0))  # the first half of restore

        store.tiered._writer._fall = fall  # type: ignore[misc]
        refs += store.put(3)
        store.tiered.flush()
        assert len(falls) == 1
        with store.tiered._entries.changed:
            store.tiered._writer.queue(refs[0])  # the second half
        store.tiered.flush()
        assert store.is_sound(refs[:1], 0)


@pytest.mark.parametrize("way", ["fetch", "prefetch"])
def test_a_record_that_cannot_be_decoded_is_an_error_and_not_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with opened(tmp_path, host=4) as store:
        refs = store.put(*range(40))
        store.tiered.flush()

        def fail(self: RawK, stored: Record, into: Record | None = None) -> Record:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(RawK, "decode", fail)
            if way == "prefetch":
                store.tiered.retrieved(refs[:2])
                store.tiered.prefetch(refs[:2])
            with pytest.raises(StoreFailed, match="could not be decoded"):
                list(store.tiered.fetch(refs))
        assert store.is_sound(refs, *range(40))
    assert store.pool._reserved_bytes == 0
