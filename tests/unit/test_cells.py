from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmem_llama.engine.cells import Cell, CellPool, PoolExhausted


def test_the_lowest_free_cells_come_first_and_ascending() -> None:
    pool = CellPool(10)
    assert pool.alloc(4).tolist() == [0, 1, 2, 3]
    pool.free([1, 3])
    assert pool.alloc(3).tolist() == [1, 3, 4]
    assert pool.n_free == 5
    assert pool.highest_used == 4


def test_cells_are_int32_because_the_hooks_take_them_so() -> None:
    pool = CellPool(4)
    assert pool.alloc(2).dtype == np.int32
    assert pool.alloc(0).dtype == np.int32


def test_cells_above_a_cell_are_strictly_above_it() -> None:
    pool = CellPool(10)
    assert pool.alloc_above(2, Cell(4)).tolist() == [5, 6]
    assert pool.alloc_above(2, Cell(4)).tolist() == [7, 8]
    assert pool.alloc(3).tolist() == [0, 1, 2]


def test_an_empty_pool_has_no_highest_used_cell() -> None:
    pool = CellPool(3)
    assert pool.highest_used == -1
    pool.free(pool.alloc(3))
    assert pool.highest_used == -1


def test_a_refused_allocation_takes_nothing() -> None:
    pool = CellPool(8)
    pool.alloc(2)
    with pytest.raises(PoolExhausted, match="7 cells asked for, 6 of 8"):
        pool.alloc(7)
    with pytest.raises(PoolExhausted, match="above cell 5"):
        pool.alloc_above(3, Cell(5))
    assert pool.n_free == 6
    assert pool.alloc(6).tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("cells", [[0], [5], [2, 2], [-1], [8], [2, 8]])
def test_freeing_a_free_repeated_or_foreign_cell_is_refused_and_changes_nothing(cells: list[int]) -> None:
    pool = CellPool(8)
    used = pool.alloc(4)
    pool.free(used[:1])
    with pytest.raises(ValueError, match="cell"):
        pool.free(cells)
    assert pool.n_free == 5
    assert pool.highest_used == 3


def test_used_cells_are_told_from_free_and_foreign_ones() -> None:
    pool = CellPool(8)
    used = pool.alloc(3)
    assert pool.is_used(used)
    assert pool.is_used(np.empty(0, dtype=np.int32))
    assert not pool.is_used(np.array([2, 3], dtype=np.int32))
    assert not pool.is_used(np.array([-1], dtype=np.int32))
    assert not pool.is_used(np.array([8], dtype=np.int32))


class PoolAgainstASet(RuleBasedStateMachine):
    """The pool behaves as a set of integers from which the smallest are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 1300  # three chunks, the last one not full
        self.pool = CellPool(self.n)
        self.model = set(range(self.n))

    @rule(n=st.integers(0, 700), above=st.integers(-1, 1299))
    def alloc(self, n: int, above: int) -> None:
        expected = sorted(c for c in self.model if c > above)[:n]
        if len(expected) < n:
            with pytest.raises(PoolExhausted):
                self.pool.alloc_above(n, Cell(above))
        else:
            assert self.pool.alloc_above(n, Cell(above)).tolist() == expected
            self.model -= set(expected)

    @precondition(lambda self: len(self.model) < self.n)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        used = sorted(set(range(self.n)) - self.model)
        step = data.draw(st.integers(1, 50))
        chosen = used[data.draw(st.integers(0, step - 1)) :: step][::-1]
        self.pool.free(chosen)
        self.model |= set(chosen)

    @invariant()
    def counts_agree(self) -> None:
        used = set(range(self.n)) - self.model
        assert self.pool.n_free == len(self.model)
        assert self.pool.n_used == len(used)
        assert self.pool.highest_used == max(used, default=-1)


PoolAgainstASet.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPoolAgainstASet = PoolAgainstASet.TestCase


@given(st.integers(1, 2000))
def test_every_cell_of_a_pool_of_any_size_is_handed_out_once(n_cells: int) -> None:
    pool = CellPool(n_cells)
    assert pool.alloc(n_cells).tolist() == list(range(n_cells))
    with pytest.raises(PoolExhausted):
        pool.alloc(1)
