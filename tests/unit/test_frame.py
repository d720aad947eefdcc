"""Budgets: the hard set, what a recall keeps, and how much it may select."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvmem_llama.errors import InvalidOption, MandatoryTooLarge
from kvmem_llama.memory.budget import Budget
from kvmem_llama.memory.canonical import floor_to
from kvmem_llama.memory.frame import Frame, frame_of_answer, frame_of_query
from kvmem_llama.settings import Settings

NONE = np.zeros(0, np.int64)


def budget(n_view: int = 256, **options: object) -> Budget:
    return Budget.of(Settings(**{"block_size": 8, **options}), n_view, 10_000)  # type: ignore[arg-type]


def n_kept(frame: Frame) -> int:
    return sum(part.count for part in frame.parts(NONE))


def test_the_defaults_follow_the_view() -> None:
    it = Budget.of(Settings(), 2050, 8192)
    assert (it.n_view, it.n_read, it.n_sink, it.n_recent, it.n_reserve) == (2048, 2048, 32, 512, 256)
    assert it.n_slack == 245
    it = Budget.of(Settings(), 130, 8192)
    assert (it.n_view, it.n_recent, it.n_reserve) == (128, 32, 32)


def test_sizes_are_whole_blocks() -> None:
    it = budget(n_sink=16, n_recent=20, n_reserve=9, n_prefill_view=100)
    assert (it.n_sink, it.n_recent, it.n_reserve, it.n_read) == (16, 16, 16, 96)
    assert budget(n_sink=0, n_reserve=0, n_prefill_view=500).n_read == 256


def test_no_size_exceeds_the_view() -> None:
    huge = 10**9
    it = budget(n_recent=huge, n_reserve=huge, n_query=huge, n_query_tail=huge, n_prefill_view=huge)
    assert {it.n_recent, it.n_reserve, it.n_query, it.n_query_tail, it.n_read} == {256}
    with pytest.raises(MandatoryTooLarge):
        it.check_step(it.canonical([]), 0, 1)
    it = budget(n_sink=8 * huge)
    assert it.n_sink == 256
    with pytest.raises(MandatoryTooLarge):
        it.check_read(it.canonical([]))


def test_a_view_for_reading_without_a_block_beside_the_sink_is_refused() -> None:
    for n in (1, 7, 8, 15):
        with pytest.raises(InvalidOption, match=f"--n-prefill-view = {n}: reading needs at least 16"):
            budget(n_prefill_view=n)
    assert budget(n_prefill_view=16).n_read == 16
    assert budget(n_prefill_view=7, n_sink=0, block_size=7).n_read == 7
    assert budget(n_prefill_view=0).n_read == 256
    with pytest.raises(MandatoryTooLarge, match="--n-prefill-view"):
        it = budget(n_prefill_view=16)
        it.check_read(it.canonical([(100, 101)]))


def test_a_view_of_no_block_is_refused() -> None:
    with pytest.raises(InvalidOption):
        budget(7)


def test_the_hard_set_is_counted_to_the_token() -> None:
    it = budget(n_reserve=32)
    canonical = it.canonical([(100, 104)])  # one block
    # sink 8 + pin 8 + open 4 + query + reserve 32
    it.check_step(canonical, 1004, 204)
    with pytest.raises(MandatoryTooLarge) as raised:
        it.check_step(canonical, 1004, 205)
    assert (raised.value.n_needed, raised.value.n_view) == (257, 256)


def test_query_tokens_in_the_sink_count_once() -> None:
    it = budget(n_reserve=32)
    it.check_step(it.canonical([]), 0, 224)
    with pytest.raises(MandatoryTooLarge):
        it.check_step(it.canonical([]), 0, 225)


def test_a_view_that_cannot_be_read_over_is_refused() -> None:
    it = budget(16)
    it.check_read(it.canonical([]))
    with pytest.raises(MandatoryTooLarge):
        it.check_read(it.canonical([(8, 9)]))


def test_recent_shrinks_by_whole_blocks_oldest_first() -> None:
    it = budget(n_recent=64, n_reserve=32)
    wide = frame_of_query(it, it.canonical([]), 1004, 20)
    tight = frame_of_query(it, it.canonical([]), 1004, 180)
    recent = [[s for s, why in f.why.items() if why == "recent"] for f in (wide, tight)]
    assert recent == [list(range(936, 1000, 8)), list(range(968, 1000, 8))]
    assert tight.why[1000] == "query", "the block that the query begins in"
    assert tight.n_select == 0 and n_kept(tight) + 180 + 32 <= 256


def test_a_recall_keeps_sink_pins_recent_and_the_open_block() -> None:
    it = budget(n_recent=16, n_reserve=32)
    frame = frame_of_query(it, it.canonical([(100, 104)]), 1004, 20)
    assert [(p.start, p.count) for p in frame.parts(NONE)] == [(0, 8), (96, 8), (984, 8), (992, 8), (1000, 4)]
    assert frame.n_select == (256 - 36 - 20 - 32) // 8
    candidates = frame.candidates()
    assert len(candidates) == 125 - 4 and not {0, 12, 123, 124, 125} & set(candidates.tolist())
    chosen = frame.parts(np.array([1, 2]))
    assert [p.start for p in chosen] == [0, 8, 16, 96, 984, 992, 1000]


def test_a_recall_in_mid_answer_keeps_the_query_and_replays_the_newest_tokens() -> None:
    it = budget(n_recent=64, n_reserve=32, n_query_tail=24)
    frame = frame_of_answer(it, it.canonical([]), (1004, 1020), 1200)
    whys = {why: [s for s, w in frame.why.items() if w == why] for why in ("sink", "query", "recent")}
    assert whys == {"sink": [0], "query": [1000, 1008, 1016], "recent": list(range(1136, 1200, 8))}
    assert frame.replay_start == 1176
    assert frame.parts(NONE)[-1].end == 1176


def test_the_replay_in_mid_answer_never_reaches_into_the_query() -> None:
    it = budget(n_recent=64, n_reserve=32)
    assert frame_of_answer(it, it.canonical([]), (1004, 1020), 1048).replay_start == 1020


@given(st.integers(0, 200), st.integers(0, 40), st.integers(0, 150), st.integers(0, 60), st.integers(0, 2))
def test_recent_is_the_longest_that_fits(
    t: int, recent: int, n_query: int, n_answer: int, n_pins: int
) -> None:
    it = budget(n_recent=recent * 8, n_reserve=32)
    pins = [(i * 24, i * 24 + 1) for i in range(1, n_pins + 1) if i * 24 < t]
    end = t + n_query
    for frame, at, n_after, query in (
        (frame_of_query(it, it.canonical(pins), t, n_query), t, n_query, (t, t)),
        (frame_of_answer(it, it.canonical(pins), (t, end), end + n_answer), end + n_answer, 0, (t, end)),
    ):
        fixed = {*range(0, min(8, at), 8), *(p // 8 * 8 for p, _ in pins)}
        fixed |= set(range(query[0] // 8 * 8, query[1], 8))
        for n_recent in range(recent * 8, -1, -8):  # by the definition: the largest that fits
            kept = fixed | set(range(max(at // 8 * 8 - n_recent, 0), at, 8))
            n_free = 256 - sum(min(8, at - start) for start in kept) - n_after - 32
            if n_free >= 0:
                break
        assert set(frame.why) == kept and frame.n_select == max(n_free, 0) // 8


def test_the_search_for_recent_is_not_quadratic() -> None:
    n = 2**13
    it = budget(n, block_size=1, n_sink=1, n_recent=n, n_reserve=1)
    began = time.process_time()
    frame = frame_of_query(it, it.canonical([]), 2 * n, n - 2)
    assert len(frame.why) == 1 and frame.n_select == 0
    assert time.process_time() - began < 1


@given(
    st.sampled_from([1, 7, 32]),
    st.integers(4, 40),
    st.integers(0, 40),
    st.integers(1, 12),
    st.integers(0, 3000),
    st.integers(1, 600),
    st.integers(0, 2000),
    st.integers(0, 3),
)
def test_a_step_that_is_not_refused_can_be_answered_without_end(
    block: int, n_blocks: int, recent: int, reserve: int, start: int, n_query: int, n_answer: int, n_pins: int
) -> None:
    it = budget(
        n_blocks * block, block_size=block, n_sink=block, n_recent=recent * block, n_reserve=reserve * block
    )
    pins = [(i * 5 * block, i * 5 * block + 1) for i in range(1, n_pins + 1) if i * 5 * block < start]
    canonical = it.canonical(pins)
    try:
        it.check_read(canonical)
        it.check_step(canonical, start, n_query)
    except MandatoryTooLarge:
        assume(False)
    end = start + n_query
    first = frame_of_query(it, canonical, start, n_query)
    assert n_kept(first) + n_query + first.n_select * block + it.n_reserve <= it.n_view
    t = end + n_answer
    frame = frame_of_answer(it, canonical, (start, end), t)
    assert end <= frame.replay_start <= t or frame.replay_start == end
    n = n_kept(frame) + (t - frame.replay_start)
    assert n + frame.n_select * block < it.n_view, "no room for a token after a recall in mid-answer"
    if t == floor_to(block, t):  # a full view: a whole reserve is free again
        assert n + frame.n_select * block + it.n_reserve <= it.n_view
