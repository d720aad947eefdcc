"""The view over the fake model's cells: taking cells, going to a target, slack, moves, compaction."""

from __future__ import annotations

from typing import Any

import fake_model
import numpy as np
import pytest

from kvmem_llama.engine.cells import CellPool
from kvmem_llama.memory.canonical import Part
from kvmem_llama.memory.planner import Target
from kvmem_llama.memory.positions import TokenPos
from kvmem_llama.memory.view import View
from kvmem_llama.settings import Settings
from kvmem_llama.store import RecordRef
from kvmem_llama.store.records import NotStored

B = 8


class Source:
    """Blocks of a history whose tokens are their positions, modulo the vocabulary."""

    block = B

    def __init__(self, model: fake_model.FakeModel) -> None:
        self.model = model
        self.n_complete = 1000  # blocks with a stored record
        self.generation = 1
        self.lost: set[int] = set()  # first tokens of blocks in the tokens tier

    def tokens(self, start: int = 0, end: int | None = None) -> Any:
        assert end is not None
        return (np.arange(start, end, dtype=np.int32) * 7) % 90

    def fetch(self, starts: Any) -> Any:
        if self.lost & set(starts):
            raise NotStored([RecordRef(start, 1) for start in self.lost])
        yield [(i, self.rows(start)) for i, start in enumerate(starts)]

    def rows(self, start: int) -> Any:
        record = np.zeros(self.model.layout.nbytes, np.uint8)
        for i in range(len(fake_model.LAYERS)):
            self.model._record_k(record, i)[:, 6] = self.tokens(start, start + B)
            self.model._record_v(record, i)[:, 0] = self.tokens(start, start + B)
        return record

    def ref(self, start: int) -> RecordRef | None:
        return RecordRef(start, self.generation) if start // B < self.n_complete else None


class World:
    def __init__(self, n_cells: int = 128, **options: Any) -> None:
        settings = Settings(**{"block_size": B, "n_ctx": 96, **options})
        self.model = fake_model.FakeModel(n_cells, 16, B)
        self.pool = CellPool(n_cells)
        self.source = Source(self.model)
        n_slack = int(settings.slack * 96)
        self.view = View(self.pool, self.model, self.source, settings, n_slack)  # type: ignore[arg-type]
        self.view.seq = 0
        self.n_foreign = 0  # cells of neighbours

    def go(self, *blocks: int, original: bool = False, rebuild: bool = False) -> Any:
        """To the view of these block numbers -> the plan."""
        target = Target.of([Part(TokenPos(b * B), B) for b in blocks], original=original)
        todo = self.view.plan(target, rebuild=rebuild)
        self.view.apply(target, todo)
        self.check()
        return todo

    def check(self) -> None:
        expected = []
        for r in self.view:
            tokens = self.source.tokens(r.part.start, r.part.end).tolist()
            expected += list(zip(range(r.position, r.position + r.part.count), tokens, strict=True))
            assert np.all(self.model.n_moves[r.cells] <= r.moves), "moves are counted"
        assert self.model.visible(0) == expected
        n_hidden = self.view.slack.n_tokens
        assert (
            n_hidden <= self.view.n_slack
            and self.pool.n_used == self.view.n_tokens + n_hidden + self.n_foreign
        )

    def moves(self, block: int) -> int:
        return next(r.moves for r in self.view if r.part.start == block * B)


def test_a_view_takes_the_lowest_cells() -> None:
    world = World()
    world.go(0, 5, 7)
    assert [r.cells[0] for r in world.view] == [0, 8, 16]
    world.go(0, 7)
    world.view.slack.forget()
    world.go(0, 6, 7)
    assert next(r for r in world.view if r.part.start == 48).cells[0] == 8


def test_tokens_join_the_block_they_continue() -> None:
    world = World()
    world.source.n_complete = 0
    world.view.extend(0, world.view.take_cells(5))
    world.view.extend(5, world.view.take_cells(6))
    assert [(r.part.start, r.part.count, r.position) for r in world.view] == [(0, 8, 0), (8, 3, 8)]
    world.view.drop_from(2)
    assert [(r.part.count, len(r.cells)) for r in world.view] == [(2, 2)] and world.pool.n_used == 2
    with pytest.raises(AssertionError):
        world.view.extend(5, world.view.take_cells(1))


def test_after_a_gap_positions_are_packed_or_those_of_the_tokens() -> None:
    for original, position in ((False, 16), (True, 72)):
        world = World()
        world.go(0, 5, original=original)
        assert world.view.position_of(72) == position


def test_a_block_comes_back_from_slack_without_a_write() -> None:
    world = World()
    world.go(0, 3, 5)
    world.go(0, 5)
    n = len(world.model.writes)
    todo = world.go(0, 3, 5)
    assert todo.show == (24,) and len(world.model.writes) == n and world.model.n_shown == B


def test_slack_holds_the_newest_of_what_left_and_no_more_than_its_share() -> None:
    world = World()  # 11 tokens of slack: one block
    world.go(0, 2, 3, 4)
    world.go(0)
    assert [h.resident.part.start for h in world.view.slack] == [32]
    world.go(0, 9)
    world.go(0)
    assert [h.resident.part.start for h in world.view.slack] == [72]


def test_without_slack_nothing_is_hidden() -> None:
    world = World(slack=0.0)
    world.go(0, 2)
    world.go(0)
    assert world.pool.n_used == B


def test_slack_gives_way_when_cells_run_out() -> None:
    world = World(n_cells=4 * B)
    world.go(0, 1, 2)
    world.go(0, 1)
    world.go(0, 1, 3, 4)
    assert not list(world.view.slack)


def test_a_hidden_block_whose_record_was_freed_is_not_shown() -> None:
    world = World()
    world.go(0, 3)
    world.go(0)
    world.source.generation = 2
    todo = world.go(0, 3)
    assert not todo.show and world.model.n_shown == 0


def test_blocks_move_eight_times_and_are_then_rebuilt() -> None:
    world = World()
    world.go(0, 1, 5)
    counts = []
    for i in range(20):
        world.go(*([0, 5] if i % 2 == 0 else [0, 1, 5]))
        counts.append(world.moves(5))
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8, 0] * 2 + [1, 2]


def test_the_canonical_view_rebuilds_what_was_moved() -> None:
    world = World()
    world.go(0, 1, 5)
    world.go(0, 5)
    assert world.moves(5) == 1
    world.go(0, 5, rebuild=True)
    assert world.moves(5) == 0


def test_cells_are_compacted_when_the_highest_exceeds_the_used_by_a_quarter() -> None:
    world = World()
    world.go(*range(10))
    world.go(0, 8, 9)
    assert world.view.highest_cell < 1.25 * world.pool.n_used
    assert not list(world.view.slack) and [r.cells[0] for r in world.view] == [0, 8, 16]


def test_only_blocks_in_high_cells_are_rebuilt_to_compact() -> None:
    world = World()
    world.go(*range(10))
    n = len(world.model.writes)
    world.go(*range(4), 9, original=False)
    # block 9 is moved to its new position, then rebuilt in a low cell
    assert world.model.writes[n:] == [B] and world.moves(9) == 0


def test_compacting_says_which_rows_are_lost_and_leaves_nothing() -> None:
    world = World()
    world.go(*range(10))
    world.source.lost = {9 * B}
    with pytest.raises(NotStored):
        world.go(*range(4), 9)
    assert not list(world.view) and world.pool.n_used == 0
    world.source.lost = set()
    world.go(*range(4), 9)


def test_tidying_up_without_the_rows_leaves_the_view_to_the_next_step() -> None:
    world = World()
    neighbour = world.pool.alloc(64)
    world.n_foreign = 64
    world.go(0, 1)
    world.pool.free(neighbour)
    world.n_foreign = 0
    world.source.lost = {0}
    world.view.tidy()
    assert not list(world.view) and world.pool.n_used == 0 and not world.model.visible(0)


def test_a_neighbour_that_left_makes_the_next_step_compact() -> None:
    world = World()
    neighbour = world.pool.alloc(64)
    world.n_foreign = 64
    world.go(0, 1)
    world.pool.free(neighbour)
    world.n_foreign = 0
    world.view.tidy()
    world.check()
    assert world.view.highest_cell == 15


def test_in_exact_mode_cells_ascend_in_view_order() -> None:
    world = World(exact=True)
    world.go(0, 5, 7)
    world.go(0, 6, 7)
    world.go(0, 2, 3, 7)
    cells = [c for r in world.view for c in r.cells.tolist()]
    assert cells == sorted(cells) and not list(world.view.slack) and world.model.n_moved == 0


def test_in_exact_mode_a_view_that_is_stuck_below_others_starts_over_in_low_cells() -> None:
    world = World(n_cells=8 * B, exact=True)
    low = world.pool.alloc(16)
    world.n_foreign = 16
    world.go(0, 1)  # cells 16 .. 31
    world.pool.alloc(32)  # a neighbour takes all above
    world.pool.free(low)
    world.n_foreign = 32
    world.go(0, 1, 2)
    cells = world.view.take_cells(8)
    assert cells.tolist() == sorted(cells.tolist())
    shown = [c for r in world.view for c in r.cells.tolist()]
    assert shown + cells.tolist() == sorted(shown + cells.tolist())


def test_packing_off_writes_one_block_a_call() -> None:
    world = World(packing=False)
    world.go(0, 1, 2)
    assert world.model.writes == [B, B, B]
    packed = World()
    packed.go(0, 1, 2)
    assert packed.model.writes == [3 * B]


def test_clearing_empties_what_llama_cpp_still_shows() -> None:
    world = World()
    world.go(0, 1, 2)
    world.go(0, 1)
    world.model.remove(0, 8)  # as after a failed decode
    world.view.clear()
    assert world.pool.n_used == 0 and not world.model.visible(0) and not list(world.view)


def test_a_hook_that_fails_loses_no_cells() -> None:
    world = World()
    world.go(0, 1, 2)

    def refuse(*args: Any) -> None:
        raise RuntimeError("refused")

    for name in ("write_blocks", "move", "free"):
        before = getattr(world.model, name)
        setattr(world.model, name, refuse)
        with pytest.raises(RuntimeError):
            world.go(0, 5, 2, 7) if name == "write_blocks" else world.go(0, 2)
        setattr(world.model, name, before)
        world.view.clear()
        assert world.pool.n_used == 0
        world.go(0, 1, 2)
