"""The host tier: a budget that is kept, and records that leave in the order of their heat."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.store.heat import Heat, LeastRecentlyUsed, Policy, Uses, coldest
from kvmem_llama.store.pool import HostFull, HostPool, State
from kvmem_llama.store.records import Record, RecordRef, StaleRecord

N = 1000  # bytes of a record


def record(seed: int = 0) -> Record:
    return np.full(N, seed, np.uint8)


def put(pool: HostPool, seed: int = 0, state: State = State.EVICTABLE) -> RecordRef:
    ref = pool.name()
    pool.put(ref, record(seed))
    pool.mark([ref.slot], state)
    return ref


def read(pool: HostPool, ref: RecordRef, seed: int = 0) -> bool:
    """Gets a record as a store does -> whether it had to be read from disk."""
    if pool.get(ref.slot) is not None:
        return False
    if pool.admit(ref, N):
        pool.fill(ref, record(seed))
    return True


def test_records_are_kept_while_they_fit_and_the_budget_is_never_exceeded() -> None:
    pool = HostPool(10 * N + N // 2)
    refs = [put(pool, i) for i in range(25)]
    assert pool.n_bytes == pool.peak_bytes == 10 * N
    assert pool.n_evicted == 15
    assert [ref.slot in pool for ref in refs] == [False] * 15 + [True] * 10
    found = pool.get(refs[20].slot)
    assert found is not None
    assert not found.flags.writeable
    assert found[0] == 20


def test_pending_and_stuck_records_are_never_evicted() -> None:
    pool = HostPool(3 * N)
    pending, stuck = put(pool, 1, State.PENDING), put(pool, 2, State.STUCK)
    for i in range(5):
        put(pool, i)
    assert pending.slot in pool
    assert stuck.slot in pool
    put(pool, 9, State.STUCK)
    pool.mark([pending.slot], State.STUCK)
    with pytest.raises(HostFull):
        put(pool, 10)
    with pytest.raises(HostFull):
        pool.put(pool.name(), np.zeros(4 * N, np.uint8))


def test_a_put_waits_for_the_writer_and_hurries_it() -> None:
    pool = HostPool(2 * N)
    first, second = put(pool, 1, State.PENDING), put(pool, 2, State.PENDING)
    hurried = threading.Event()
    pool.join(hurried.set)
    thread = threading.Thread(target=put, args=(pool, 3))
    thread.start()
    assert hurried.wait(10)
    pool.mark([second.slot], State.EVICTABLE)
    thread.join(10)
    assert not thread.is_alive()
    assert first.slot in pool
    assert second.slot not in pool
    pool.part(hurried.set)


def test_a_waiting_put_ends_when_nothing_can_be_written_any_more() -> None:
    pool = HostPool(N)
    only = put(pool, 1, State.PENDING)
    waiting = threading.Event()
    pool.join(waiting.set)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            put(pool, 2)
        except HostFull as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert waiting.wait(10)
    pool.mark([only.slot], State.STUCK)
    thread.join(10)
    assert len(errors) == 1


def test_a_name_is_good_for_one_record() -> None:
    pool = HostPool(10 * N)
    old = put(pool, 1)
    assert pool.admit(old, N) is False, "it is here"
    gone = pool.name()
    assert pool.admit(gone, N)
    pool.retire(gone)
    new = pool.name()
    assert new.slot == gone.slot
    assert new.generation != gone.generation
    pool.fill(gone, record(7))  # the reader was slow
    assert pool.get(new.slot) is None
    assert pool.n_bytes == N
    with pytest.raises(StaleRecord):
        pool.put(gone, record(7))


def test_what_is_being_read_counts_against_the_budget() -> None:
    pool = HostPool(2 * N)
    refs = [pool.name() for _ in range(3)]
    assert [pool.admit(ref, N) for ref in refs] == [True, True, False]
    pool.cancel(refs[0])
    assert pool.admit(refs[2], N)
    pool.fill(refs[2], record(2))
    pool.fill(refs[1], record(1))
    assert pool.n_bytes == 2 * N


def test_only_a_warmer_record_is_let_in() -> None:
    pool = HostPool(2 * N)
    refs = [put(pool, i) for i in range(3)]
    pool.retrieved([ref.slot for ref in refs[1:]])
    assert read(pool, refs[0])
    assert refs[0].slot not in pool, "it is the coldest"
    pool.retrieved([refs[0].slot])
    pool.retrieved([refs[0].slot])
    assert read(pool, refs[0])
    assert refs[0].slot in pool


def test_heat_of_an_earlier_process_counts() -> None:
    pool = HostPool(2 * N)
    warm, cold = pool.name(3.0, 40), pool.name(0.0, 0)
    assert pool.heat(warm.slot) == (3.0, 40)
    for ref in (cold, warm):
        pool.admit(ref, N)
        pool.fill(ref, record())
    put(pool)
    assert warm.slot in pool
    assert cold.slot not in pool


def test_retrievals_count_half_after_a_half_life() -> None:
    uses = Uses(half_life=4)
    for slot in range(2):
        uses.born(slot, recent=0.0)
    uses.retrieved([0])
    for _ in range(4):
        uses.retrieved([])
    at = np.array([0, 1])
    assert uses.recent(at).tolist() == [0.5, 0]
    assert uses.total(at).tolist() == [1, 0]


def test_the_coldest_come_first_and_of_equals_the_one_used_longest_ago() -> None:
    uses = Uses()
    for slot in range(300):
        uses.born(slot)
    uses.retrieved([5, 7])
    uses.used(0)
    assert coldest(Heat(), uses, np.arange(300), 3) == [1, 2, 3]
    assert coldest(Heat(), uses, np.arange(300), 300)[-3:] == [0, 5, 7]
    assert coldest(LeastRecentlyUsed(), uses, np.arange(300), 300)[-3:] == [5, 7, 0]
    assert coldest(Heat(), uses, np.arange(0), 3) == []


def n_reads(policy: Policy, recalls: list[list[int]], n_blocks: int, n_fit: int) -> int:
    pool = HostPool(n_fit * N, policy)
    refs = [put(pool) for _ in range(n_blocks)]
    reads = 0
    for selected in recalls:
        pool.retrieved([refs[block].slot for block in selected])
        reads += sum(read(pool, refs[block]) for block in selected)
    return reads


def test_heat_keeps_what_is_wanted_again_and_again_where_lru_is_flushed_by_a_scan() -> None:
    rng = np.random.default_rng(0)
    recalls = [[*range(6), *(int(b) for b in rng.integers(6, 400, 30))] for _ in range(60)]
    heat, lru = (n_reads(policy, recalls, 400, 18) for policy in (Heat(), LeastRecentlyUsed()))
    assert lru > heat + 60  # at least one of the six favourites in each recall


def test_two_stores_share_one_budget() -> None:
    pool = HostPool(8 * N)

    def work(seed: int) -> None:
        for i in range(200):
            ref = put(pool, seed)
            assert pool.n_bytes <= 8 * N
            if i % 3 == 0:
                pool.retire(ref)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.n_bytes <= 8 * N
    assert pool.peak_bytes <= 8 * N


@given(st.lists(st.tuples(st.sampled_from("nprgemsad"), st.integers(0, 9)), max_size=80), st.booleans())
def test_the_pool_keeps_its_books(operations: list[tuple[str, int]], is_lru: bool) -> None:
    pool = HostPool(5 * N, LeastRecentlyUsed() if is_lru else Heat())
    names: list[RecordRef] = []
    held: dict[RecordRef, int] = {}  # what must be there: pending and stuck
    reading: list[RecordRef] = []
    for operation, pick in operations:
        ref = names[pick % len(names)] if names else None
        if operation == "n":
            names.append(pool.name())
        elif operation == "p" and ref is not None and len(held) < 4 and ref not in reading:
            try:
                pool.put(ref, record(pick))
                held[ref] = pick
            except HostFull:
                assert len(held) + len(reading) >= 4
        elif operation == "r" and ref is not None:
            names.remove(ref)
            held.pop(ref, None)
            pool.retire(ref)
        elif operation == "g" and ref is not None:
            found = pool.get(ref.slot)
            assert ref not in held or (found is not None and found[0] == held[ref])
        elif operation in "em" and ref in held:
            pool.mark([ref.slot], State.EVICTABLE if operation == "e" else State.STUCK)
            if operation == "e":
                del held[ref]
        elif operation == "s":
            pool.retrieved([name.slot for name in names[:pick]])
        elif operation == "a" and ref is not None and len(held) + len(reading) < 4 and pool.admit(ref, N):
            reading.append(ref)
        elif operation == "d" and reading:
            done = reading.pop(pick % len(reading))
            (pool.fill if pick % 2 else lambda ref, _: pool.cancel(ref))(done, record(pick))
        assert pool.n_bytes <= 5 * N
        assert pool.n_bytes == N * (pool.n_records + len(reading))
        assert all(ref.slot in pool for ref in held)
