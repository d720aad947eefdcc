"""The delta between cells and a target view: what stays, moves, comes back or is rebuilt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.memory.canonical import Part
from kvmem_llama.memory.planner import Hidden, Plan, Resident, Rules, Target, plan
from kvmem_llama.memory.positions import TokenPos, ViewPos
from kvmem_llama.settings import Settings
from kvmem_llama.store import RecordRef

B = 4
RULES = Rules.of(Settings())


def part(start: int, count: int = B) -> Part:
    return Part(TokenPos(start), count)


def at(start: int, position: int, *, count: int = B, cell: int | None = None, moves: int = 0) -> Resident:
    first = start if cell is None else cell
    return Resident(
        part(start, count), ViewPos(position), np.arange(first, first + count, dtype=np.int32), moves
    )


def ref(start: int) -> RecordRef:
    return RecordRef(start, 1)


def planned(
    residents: Sequence[Resident],
    target: Sequence[int | Part],
    *,
    hidden: Sequence[Resident] = (),
    rules: Rules = RULES,
    rebuild: bool = False,
    original: bool = False,
) -> Plan:
    entries = {h.part.start: Hidden(h, ref(h.part.start)) for h in hidden}
    parts = [part(t) if isinstance(t, int) else t for t in target]
    return plan(residents, entries.get, Target.of(parts, original=original), ref, rules, rebuild=rebuild)


def starts(placed: Sequence[object]) -> list[int]:
    return [p.part.start for p in placed]  # type: ignore[attr-defined]


def test_positions_are_packed_or_those_of_the_tokens() -> None:
    parts = [part(0), part(12), part(40, 2)]
    assert [p.position for p in Target.of(parts, original=False).placed] == [0, 4, 8]
    assert [p.position for p in Target.of(parts, original=True).placed] == [0, 12, 40]


def test_a_view_that_is_there_needs_nothing() -> None:
    assert planned([at(0, 0), at(8, 4)], [0, 8]).is_noop


def test_a_block_that_stays_moves_in_place_and_a_new_one_is_written() -> None:
    todo = planned([at(0, 0), at(8, 4)], [0, 4, 8])
    assert (todo.keep, starts(todo.move), starts(todo.write), todo.leave) == ((0,), [8], [4], ())
    assert todo.move[0].position == 8


def test_at_original_positions_nothing_moves() -> None:
    todo = planned([at(0, 0), at(8, 8)], [0, 4, 8], original=True)
    assert (todo.keep, todo.move, starts(todo.write)) == ((0, 8), (), [4])


@pytest.mark.parametrize(("moves", "moved"), [(0, True), (7, True), (8, False)])
def test_after_eight_moves_a_block_is_rebuilt(moves: int, moved: bool) -> None:
    todo = planned([at(8, 8, moves=moves)], [8])
    assert starts(todo.move) == ([8] if moved else []) and starts(todo.write) == ([] if moved else [8])
    assert todo.leave == (() if moved else (8,))


def test_a_block_that_was_moved_eight_times_may_stay_where_it_is() -> None:
    assert planned([at(8, 0, moves=8)], [8]).is_noop


def test_the_canonical_view_holds_nothing_that_was_moved() -> None:
    todo = planned([at(0, 0), at(4, 4, moves=1), at(12, 8)], [0, 4, 8, 12], rebuild=True)
    assert (todo.keep, starts(todo.write), todo.leave) == ((0,), [4, 8, 12], (4, 12))


@pytest.mark.parametrize("options", [{"cache_type_k": "q8_0"}, {"cache_type_k": "q4_0"}, {"max_moves": 0}])
def test_caches_that_would_be_rounded_again_are_always_rebuilt(options: dict[str, object]) -> None:
    rules = Rules.of(Settings(**options))  # type: ignore[arg-type]
    todo = planned([at(0, 0), at(8, 8)], [0, 8], rules=rules)
    assert (todo.keep, starts(todo.write), todo.leave) == ((0,), [8], (8,))
    # Where it lies at its position it may come back all the same.
    assert planned([], [0], hidden=[at(0, 0)], rules=rules).show == (0,)


def test_a_hidden_block_comes_back_at_any_position() -> None:
    todo = planned([at(0, 0)], [0, 8], hidden=[at(8, 40)])
    assert (todo.show, starts(todo.move), todo.write) == ((8,), [8], ())
    todo = planned([at(0, 0)], [0, 8], hidden=[at(8, 4)])
    assert (todo.show, todo.move, todo.write) == ((8,), (), ())


def test_a_hidden_block_of_another_record_is_not_taken() -> None:
    stale = Hidden(at(8, 4), RecordRef(8, 0))
    target = Target.of([part(8)], original=False)
    todo = plan([], {8: stale}.get, target, ref, RULES, rebuild=False)
    assert not todo.show and starts(todo.write) == [8]


def test_a_block_that_has_grown_since_is_written_anew() -> None:
    todo = planned([at(8, 0, count=2)], [8])
    assert starts(todo.write) == [8] and todo.leave == (8,)


def test_without_reuse_everything_is_written() -> None:
    rules = Rules.of(Settings(reuse_resident=False))
    todo = planned([at(0, 0)], [0, 4], hidden=[at(4, 4)], rules=rules)
    assert starts(todo.write) == [0, 4] and todo.leave == (0,) and not todo.show


def test_in_exact_mode_only_a_common_beginning_in_ascending_cells_stays() -> None:
    rules = Rules.of(Settings(exact=True))
    todo = planned([at(0, 0), at(8, 4), at(12, 8)], [0, 8, 10], rules=rules)
    assert (todo.keep, todo.leave, starts(todo.write)) == ((0, 8), (12,), [10])
    todo = planned([at(0, 0, cell=20), at(8, 4, cell=8)], [0, 8], rules=rules)
    assert (todo.keep, todo.leave, starts(todo.write)) == ((0,), (8,), [8])
    assert not planned([at(0, 0), at(8, 8)], [0, 8], rules=rules).move


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8)), unique_by=lambda t: t[0]),
    st.sets(st.integers(0, 9)),
    st.sets(st.integers(0, 9)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_part_of_a_target_comes_from_one_place(
    resident: list[tuple[int, int]],
    hidden: set[int],
    wanted: set[int],
    rebuild: bool,
    exact: bool,
    original: bool,
) -> None:
    residents = [at(B * i, B * i, moves=moves) for i, moves in sorted(resident)]
    away = [at(B * i, 0) for i in sorted(hidden - {i for i, _ in resident})]
    rules = Rules.of(Settings(exact=exact))
    todo = planned(
        residents,
        [B * i for i in sorted(wanted)],
        hidden=away,
        rules=rules,
        rebuild=rebuild,
        original=original,
    )
    here = {r.part.start for r in residents}
    moved = set(starts(todo.move))
    sources = [*todo.keep, *(moved - set(todo.show)), *todo.show, *starts(todo.write)]
    assert sorted(sources) == [B * i for i in sorted(wanted)]
    assert set(todo.keep) | (moved - set(todo.show)) == here - set(todo.leave)
    assert set(todo.show) <= {h.part.start for h in away}
    assert not (rebuild and todo.move)
