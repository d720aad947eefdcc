"""Blocks, their table, their records, and the history that a step grows, commits or rolls back."""

from __future__ import annotations

from typing import Any

import fake_model
import numpy as np
import pytest

from kvmem_llama.memory.blocks import Block, BlockTable
from kvmem_llama.memory.history import History
from kvmem_llama.memory.index import MeanKIndex
from kvmem_llama.memory.indexes import Indexes
from kvmem_llama.memory.positions import TokenPos
from kvmem_llama.memory.texts import BlockTexts
from kvmem_llama.store import HostStore, RecordRef, StaleRecord

LAYOUT = fake_model.RecordLayout.of(fake_model.LAYERS, 8, "f32")


def block(start: int, count: int = 8, slot: int = 0) -> Block:
    return Block(TokenPos(start), count, RecordRef(slot, 1))


def record(value: int = 1) -> Any:
    return np.full(LAYOUT.nbytes, value, np.uint8)


# -- store


def test_a_record_is_read_back_until_its_last_reference_is_freed() -> None:
    store = HostStore()
    ref = store.put(record(3))
    store.share(ref)
    assert store.refcount(ref) == 2 and store.get(ref)[0] == 3
    store.free(ref)
    assert store.get(ref)[0] == 3
    store.free(ref)
    assert store.refcount(ref) == 0
    for call in (store.get, store.free, store.share):
        with pytest.raises(StaleRecord):
            call(ref)


def test_a_slot_that_is_used_again_is_not_read_through_an_old_reference() -> None:
    store = HostStore()
    old = store.put(record(1))
    store.free(old)
    new = store.put(record(2))
    assert new.slot == old.slot and new.generation > old.generation
    with pytest.raises(StaleRecord):
        store.get(old)
    with pytest.raises(StaleRecord):
        store.get(RecordRef(99, 1))


def test_a_stored_record_cannot_be_written_to() -> None:
    store = HostStore()
    ref = store.put(record())
    with pytest.raises(ValueError, match="read-only"):
        store.get(ref)[0] = 9


def test_bytes_are_counted() -> None:
    store = HostStore()
    refs = [store.put(record()) for _ in range(3)]
    store.free(refs[1])
    stats = store.stats()
    assert (stats.n_records, stats.n_bytes, stats.peak_bytes) == (2, 2 * LAYOUT.nbytes, 3 * LAYOUT.nbytes)


# -- table


def test_only_the_last_block_of_a_table_may_be_partial() -> None:
    table = BlockTable(8)
    table.append(block(0))
    table.append(block(8, 3))
    assert (len(table), table.n_tokens, table.n_complete) == (2, 11, 1)
    for bad in (block(11), block(8), block(16)):
        with pytest.raises(ValueError):
            table.append(bad)
    table.replace_last(block(8, 8))
    table.append(block(16, 1))
    with pytest.raises(ValueError):
        table.replace_last(block(8))
    assert [b.start for b in table.truncate(1)] == [8, 16]


def test_blocks_are_found_by_their_first_token() -> None:
    table = BlockTable(8, [block(0, slot=4), block(8, 3, slot=5)])
    assert table.at(8) == block(8, 3, slot=5)
    assert table.at(4) is None and table.at(16) is None
    with pytest.raises(IndexError):
        table[-1]


def test_a_block_of_no_or_too_many_tokens_is_refused() -> None:
    for count in (0, 9):
        with pytest.raises(ValueError):
            BlockTable(8).append(block(0, count))


# -- history


class Rows:
    """Capture rows whose raw K is their token."""

    def __init__(self, history: History) -> None:
        self.history = history

    def stage_out(self, target: Any, slot0: int, rows: Any, cells: Any) -> None:
        for i, row in enumerate(rows.tolist()):
            for layer in range(len(fake_model.LAYERS)):
                k = LAYOUT.k_offsets[layer] + (slot0 + i) * 32
                target[k : k + 32].view(np.float32)[:] = self.history.tokens(row, row + 1)[0]

    def read_q(self, rows: Any, layers: Any = None) -> Any:
        raise AssertionError


def history() -> History:
    texts = BlockTexts(lambda ids: " ".join(map(str, ids)), 8)
    return History(HostStore(), Indexes(MeanKIndex(fake_model.LAYERS, LAYOUT)), texts, 8, LAYOUT.nbytes)


def grow(it: History, n: int, *, final: bool = True) -> None:
    start = it.n_tokens
    it.extend(np.arange(start, start + n))
    positions = np.arange(start, start + n, dtype=np.int32)
    it.stage(Rows(it), start, positions, positions)
    if final:
        it.complete(it.n_tokens)


def tokens_in(it: History) -> list[list[float]]:
    out = []
    for b in it.table:
        rows = LAYOUT.raw_k(it.store.get(b.ref), 0, fake_model.LAYERS[0], b.count)
        out.append(rows[:, 0, 0].tolist())
    return out


def means(it: History) -> Any:
    return it.indexes.mean_k.means(0)


def test_complete_blocks_are_listed_at_once_and_the_partial_one_at_the_commit() -> None:
    it = history()
    grow(it, 19)
    assert (len(it.table), len(it.indexes.mean_k), it.n_committed) == (2, 2, 0)
    it.commit()
    assert (len(it.table), len(it.indexes.mean_k), it.n_committed) == (3, 3, 19)
    assert tokens_in(it)[2] == [16, 17, 18]


def test_provisional_rows_are_neither_stored_nor_indexed_nor_counted() -> None:
    it = history()
    grow(it, 30, final=False)
    assert not len(it.table) and not len(it.indexes.mean_k) and not it.store.stats().n_records
    it.rollback(keep_until=0)
    assert it.n_tokens == 0 and not it.store.stats().n_records


def test_a_grown_partial_block_gets_a_record_of_its_own_and_the_old_one_stays_until_the_commit() -> None:
    it = history()
    grow(it, 19)
    it.commit()
    old = it.table[2].ref
    grow(it, 3)
    assert it.table[2].ref == old and it.ref(16) is None
    grow(it, 4)
    assert it.table[2].ref != old and it.store.refcount(old) == 1 and it.ref(16) == it.table[2].ref
    it.commit()
    assert it.store.refcount(old) == 0 and it.store.stats().n_records == 4
    assert tokens_in(it)[2:] == [[16, 17, 18, 19, 20, 21, 22, 23], [24, 25]]


@pytest.mark.parametrize("first", [16, 19])
@pytest.mark.parametrize("more", [1, 5, 6, 30])
def test_a_rollback_restores_table_index_and_records(first: int, more: int) -> None:
    it = history()
    grow(it, first)
    it.commit()
    before, mean_before = list(it.table), means(it)
    grow(it, more)
    it.rollback(keep_until=0)
    assert list(it.table) == before and np.array_equal(means(it), mean_before)
    assert it.store.stats().n_records == len(before) and it.n_tokens == first
    assert tokens_in(it)[-1][-1] == first - 1


def test_blocks_of_a_cancelled_step_are_adopted_as_far_as_the_tokens_agree() -> None:
    it = history()
    grow(it, 19)
    it.commit()
    grow(it, 30)  # 19 .. 48: blocks end at 24, 32, 40, 48
    it.rollback(keep_until=44)
    assert len(it.orphans) == 3
    it.extend([19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 99, 99, 99, 99, 99, 99, 99, 99])
    assert it.adopt(40) == 13 and len(it.orphans) == 1
    it.rollback(keep_until=40)
    assert len(it.orphans) == 3, "what was adopted, and what it goes on with, is kept again"
    it.extend([19, 99])
    assert it.adopt(21) == 0
    positions = np.array([19, 20], np.int32)
    it.stage(Rows(it), 19, positions, positions)
    it.commit()
    assert not len(it.orphans) and it.store.stats().n_records == len(it.table)


def test_an_orphan_beyond_the_history_part_is_left_for_later() -> None:
    it = history()
    grow(it, 40)
    it.rollback(keep_until=40)
    it.extend(np.arange(40))
    assert it.adopt(30) == 24


@pytest.mark.parametrize("n", [0, 5, 8, 16, 18, 19])
def test_a_truncated_history_is_that_of_its_first_tokens(n: int) -> None:
    it, other = history(), history()
    grow(it, 19)
    it.pins = [(2, 5), (17, 19)]
    it.commit()
    it.truncate(n)
    grow(other, n)
    other.commit()
    assert tokens_in(it) == tokens_in(other) and np.array_equal(means(it), means(other))
    assert it.store.stats().n_records == len(it.table)
    assert all(end <= n for _, end in it.pins)


def test_a_mean_is_bit_equal_after_truncating_and_appending_again() -> None:
    it = history()
    grow(it, 40)
    it.commit()
    before = means(it)
    it.truncate(13)
    grow(it, 27)
    it.commit()
    assert np.array_equal(means(it), before)


def test_a_fork_lives_on_after_its_parent_is_closed() -> None:
    it = history()
    grow(it, 19)
    it.commit()
    fork = it.fork()
    grow(it, 8)
    it.commit()
    it.close()
    assert tokens_in(fork)[2] == [16, 17, 18] and fork.n_tokens == 19
    assert fork.store.stats().n_records == 3
    fork.close()
    assert fork.store.stats().n_records == 0


def test_a_block_whose_rows_are_final_cannot_be_written_again() -> None:
    it = history()
    grow(it, 8)
    with pytest.raises(AssertionError, match="final"):
        it.stage(Rows(it), 4, np.array([4], np.int32), np.array([4], np.int32))


def test_cutting_unfinished_tokens_opens_their_block_again() -> None:
    it = history()
    grow(it, 24)
    it.cut(13)
    assert len(it.table) == 1 and it.n_tokens == 13
    grow(it, 6)
    it.commit()
    assert tokens_in(it)[1:] == [list(range(8, 16)), [16, 17, 18]]
