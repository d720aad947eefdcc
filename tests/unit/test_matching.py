"""What a stored history and a wanted one have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.matching import MIN_SPAN, Plan, Span, match

Tokens = np.ndarray[Any, np.dtype[np.int32]]


def text(n: int, seed: int = 0, n_vocab: int = 50_000) -> Tokens:
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def rebuilt(plan: Plan, stored: Tokens, wanted: Tokens) -> Tokens:
    """The wanted tokens: what the plan takes from the stored ones, and the missing ones."""
    made = np.full(plan.n_wanted, -1, np.int32)
    made[: plan.prefix] = stored[: plan.prefix]
    for span in plan.spans:
        made[span.new : span.new_end] = stored[span.old : span.old_end]
    for start, end in plan.missing():
        assert np.all(made[start:end] == -1), "a token is both taken and missing"
        made[start:end] = wanted[start:end]
    return made


def check(stored: Tokens, wanted: Tokens) -> Plan:
    plan = match(stored, wanted)
    assert plan == match(stored.copy(), wanted.copy())
    assert np.array_equal(rebuilt(plan, stored, wanted), wanted)
    n, m = len(stored), len(wanted)
    p = plan.prefix
    assert p == min(n, m) or stored[p] != wanted[p], "the prefix could be longer"
    bounds = [Span(p, p, 0), *plan.spans, Span(n, m, 0)]
    for before, span, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        assert span.count >= MIN_SPAN
        old, new = span.old - 1, span.new - 1
        assert old >= before.old_end - 1 and new >= before.new_end - 1
        is_free = old >= before.old_end and new >= before.new_end
        assert not is_free or stored[old] != wanted[new], "a span could begin earlier"
        old, new = span.old_end, span.new_end
        is_free = old < after.old and new < after.new
        assert not is_free or stored[old] != wanted[new], "a span could end later"
    return plan


EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 300), st.integers(0, 300)), max_size=5
)  # where, tokens cut, tokens put in


@given(n=st.integers(0, 1500), n_vocab=st.sampled_from([2, 30, 50_000]), edits=EDITS)
def test_a_plan_gives_the_wanted_tokens_and_its_spans_cannot_grow(
    n: int, n_vocab: int, edits: list[tuple[float, int, int]]
) -> None:
    stored = wanted = text(n, n, n_vocab)
    for i, (where, cut, put) in enumerate(edits):
        at = int(where * len(wanted))
        wanted = np.concatenate([wanted[:at], text(put, i + 1, n_vocab), wanted[at + cut :]])
    check(stored, wanted)


@given(
    order=st.lists(st.integers(0, 5), max_size=12),
    other=st.lists(st.integers(0, 5), max_size=12),
    size=st.sampled_from([40, 64, 100]),
)
def test_texts_that_come_again_are_matched_in_one_order(
    order: list[int], other: list[int], size: int
) -> None:
    parts = [text(size, seed) for seed in range(6)]
    nothing = np.zeros(0, np.int32)
    check(
        np.concatenate([nothing, *(parts[i] for i in order)]),
        np.concatenate([nothing, *(parts[i] for i in other)]),
    )


@given(n=st.integers(0, 600), m=st.integers(0, 600), period=st.integers(1, 90), shift=st.integers(0, 90))
def test_periodic_texts_are_matched(n: int, m: int, period: int, shift: int) -> None:
    endless = np.tile(text(period), 900 // period + 2)
    check(endless[:n], np.concatenate([text(1, 9), endless[shift : shift + m]]))


def test_edits_are_found_where_they_are() -> None:
    stored = text(2000)
    wanted = np.concatenate([stored[:300], text(10, 1), stored[320:900], stored[1000:]])
    plan = check(stored, wanted)
    assert plan.prefix == 300
    assert plan.spans == (Span(320, 310, 580), Span(1000, 890, 1000))
    assert plan.missing() == [(300, 310)] and plan.n_carried == 1580


@pytest.mark.parametrize(("n", "found"), [(MIN_SPAN - 1, 0), (MIN_SPAN, 1)])
def test_a_short_span_is_not_carried(n: int, found: int) -> None:
    stored = text(500)
    wanted = np.concatenate([stored[:100], text(5, 1), stored[200 : 200 + n], text(5, 2)])
    plan = check(stored, wanted)
    assert len(plan.spans) == found and plan.missing()[0][0] == 100


def test_of_two_orders_the_one_with_more_tokens_is_kept() -> None:
    short, long = text(100, 1), text(400, 2)
    wanted = np.concatenate([text(1, 3), long, short])
    plan = check(np.concatenate([short, long]), wanted)
    assert plan.spans == (Span(100, 1, 400),)


def test_a_reminder_that_comes_again_and_again_does_not_hide_what_lies_between() -> None:
    reminder, parts = text(80, 1), [text(200, 10 + i) for i in range(5)]
    stored = np.concatenate([x for part in parts for x in (part, reminder)])
    wanted = np.concatenate([text(3, 2), *(x for part in parts for x in (part, reminder))])
    assert check(stored, wanted).n_carried == len(stored)
    without = np.concatenate([text(3, 2), *parts])
    assert check(stored, without).n_carried == 1000


def test_a_prefix_can_be_cut_into_a_span() -> None:
    plan = Plan(1000, 300, (Span(400, 310, 100),))
    assert plan.with_prefix(300) is plan and plan.with_prefix(400) is plan
    assert plan.with_prefix(200) == Plan(1000, 200, (Span(200, 200, 100), Span(400, 310, 100)))
    assert plan.with_prefix(250) == Plan(1000, 250, (Span(400, 310, 100),))


def test_reuse_can_be_limited_to_the_prefix() -> None:
    stored = text(1000)
    wanted = np.concatenate([stored[:300], text(10, 1), stored[300:]])
    assert match(stored, wanted, spans=False) == Plan(1010, 300, ())
    assert match(stored, stored) == Plan(1000, 1000, ()) and match(stored, stored).missing() == []
