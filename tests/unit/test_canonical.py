"""The canonical view is a function of the history's length, the sink, the pins and the view size alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.memory.canonical import Canonical, Part, ceil_to, floor_to, parts_of, pin_blocks
from kvmem_llama.memory.positions import TokenPos

BLOCKS = st.sampled_from([1, 7, 32, 64])


@st.composite
def canonicals(draw: st.DrawFn) -> Canonical:
    block = draw(BLOCKS)
    n_sink = draw(st.integers(0, 2))
    n_pins = draw(st.integers(0, 3))
    n_view = draw(st.integers(n_sink + n_pins + 1, 40))
    n_read = draw(st.integers(n_sink + n_pins + 1, n_view))
    pins = draw(st.sets(st.integers(n_sink, 30), min_size=n_pins, max_size=n_pins))
    return Canonical(
        n_view=n_view * block,
        n_read=n_read * block,
        block=block,
        n_sink=n_sink * block,
        pins=tuple(TokenPos(pin * block) for pin in sorted(pins)),
    )


def test_parts_are_cut_at_multiples_of_the_block() -> None:
    assert parts_of(8, 5, 20) == [Part(TokenPos(5), 3), Part(TokenPos(8), 8), Part(TokenPos(16), 4)]
    assert parts_of(8, 5, 5) == []


@given(BLOCKS, st.integers(0, 10_000))
def test_rounding_brackets_a_number(block: int, n: int) -> None:
    assert floor_to(block, n) <= n <= ceil_to(block, n) < floor_to(block, n) + 2 * block
    assert floor_to(block, n) % block == ceil_to(block, n) % block == 0


def test_the_numbers_of_a_worked_example() -> None:
    canonical = Canonical(n_view=256, n_read=256, block=32, n_sink=32)
    assert canonical.quantum == 64
    assert [canonical.tail_start(t) for t in (0, 10, 255, 256, 319, 320, 400)] == [
        0,
        10,
        32,
        96,
        96,
        160,
        224,
    ]
    assert [canonical.next_room(t) for t in (0, 255, 256, 319, 320)] == [256, 256, 320, 320, 384]
    view = canonical.view(330)
    assert view[0] == Part(TokenPos(0), 32) and view[1].start == 160 and view[-1] == Part(TokenPos(320), 10)


def test_a_view_that_is_no_multiple_of_four_blocks_makes_room_at_its_size_first() -> None:
    canonical = Canonical(n_view=224, n_read=224, block=32, n_sink=32)
    assert canonical.quantum == 32
    canonical = Canonical(n_view=288, n_read=288, block=32, n_sink=32)
    assert (canonical.quantum, canonical.next_room(287), canonical.next_room(288)) == (64, 288, 320)


@given(canonicals(), st.integers(0, 5000))
def test_a_view_never_outgrows_its_size_before_room_is_made(canonical: Canonical, t: int) -> None:
    room = canonical.next_room(t)
    assert t < room <= canonical.epoch_end(t)
    n = sum(part.count for part in canonical.view(t))
    assert n + room - t <= canonical.n_read


@given(canonicals(), st.integers(0, 5000))
def test_a_view_is_sink_pins_and_a_tail_in_history_order(canonical: Canonical, t: int) -> None:
    view = canonical.view(t)
    assert all(a.end <= b.start for a, b in pairwise(view))
    tokens = {token for part in view for token in range(part.start, part.end)}
    assert tokens >= set(range(min(canonical.n_sink, t)))
    assert tokens >= {
        token for pin in canonical.pins for token in range(pin, pin + canonical.block) if token < t
    }
    assert tokens >= set(range(canonical.tail_start(t), t)) and tokens <= set(range(t))


@given(canonicals(), st.integers(0, 3000))
def test_between_two_rooms_a_view_only_grows(canonical: Canonical, t: int) -> None:
    starts = {canonical.tail_start(u) for u in range(max(t, canonical.n_sink), canonical.next_room(t))}
    assert len(starts) <= 1


@given(canonicals(), st.integers(0, 3000), st.integers(1, 400))
def test_a_first_pass_drops_no_more_than_its_query_needs(canonical: Canonical, t: int, n_query: int) -> None:
    n_open = t - floor_to(canonical.block, t)
    if canonical.n_fixed + n_open + n_query > canonical.n_view:
        return  # refused before (Budget.check_step)
    start = canonical.first_pass_start(t, n_query)
    view = canonical.view(t, start)
    assert sum(part.count for part in view) + n_query <= canonical.n_view
    own = canonical.tail_start(t)
    assert start >= own
    if start > own:  # one block more would not fit, were it no pin
        assert canonical.n_fixed + canonical.block + t - start + n_query > canonical.n_view


@pytest.mark.parametrize(
    ("ranges", "starts"),
    [([], []), ([(0, 5)], []), ([(9, 10)], [8]), ([(6, 17), (20, 21)], [8, 16]), ([(8, 16), (8, 9)], [8])],
)
def test_pins_are_whole_blocks_outside_the_sink(ranges: list[tuple[int, int]], starts: list[int]) -> None:
    assert list(pin_blocks(8, 8, ranges)) == starts


def test_heavy_pins_make_room_more_often() -> None:
    pins = tuple(TokenPos(start) for start in range(32, 192, 32))
    canonical = Canonical(n_view=256, n_read=256, block=32, n_sink=32, pins=pins)
    assert canonical.quantum == 64
    pins = (*pins, TokenPos(192))
    assert Canonical(n_view=256, n_read=256, block=32, n_sink=32, pins=pins).quantum == 32
