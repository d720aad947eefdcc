"""Which tokens of a step are scored: all of a short one, of a long one the user's newest and the ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InvalidOption
from kvmem_llama.memory.query import Query, StepRequest, query_of, runs, token_ids
from kvmem_llama.settings import Settings

LONG = Settings(n_query=60, query_ends=10, query_user=8)


def query(text: str, settings: Settings = LONG, query_start: int = 0, marks: bool = True) -> Query:
    """Of a step: `u` is a token of a user's text, `t` of a tool's, `.` of the template."""
    scored = np.array([c != "." for c in text])
    user = np.array([c == "u" for c in text]) if marks else None
    ids = np.arange(len(text), dtype=np.int32)
    return query_of(StepRequest(ids, query_start, scored, SamplingParams(), user=user), settings)


def test_of_a_short_step_every_text_token_is_scored() -> None:
    found = query("..uuu..tttt..")
    assert found.start == 0 and found.indices.tolist() == [2, 3, 4, 7, 8, 9, 10]
    assert found.user == (2, 5) and not len(found.earlier)


def test_of_a_long_result_the_users_newest_words_and_both_ends_are_scored() -> None:
    found = query("." + "u" * 20 + "." * 40 + "t" * 200 + "..")
    assert found.start == 201 and len(found.scored) == 62  # the newest 60 text tokens are replayed
    assert found.indices.tolist() == [*range(13, 21), *range(61, 71), *range(251, 261)]
    assert found.earlier.tolist() == [*range(13, 21), *range(61, 71)]
    assert runs(found.earlier) == [(13, 21), (61, 71)]
    assert found.user == (1, 21)


def test_a_question_after_a_long_result_is_scored_with_its_ends() -> None:
    found = query("t" * 200 + ".." + "u" * 20)
    assert found.indices.tolist() == [*range(10), *range(190, 200), *range(214, 222)]


@pytest.mark.parametrize("marks", [True, False])
def test_of_a_long_text_of_a_user_both_ends_are_scored(marks: bool) -> None:
    found = query("u" * 200, marks=marks)
    assert found.indices.tolist() == [*range(10), *range(190, 200)] and found.user == (0, 200)


def test_only_the_newest_text_of_a_user_counts() -> None:
    found = query("u" * 20 + "t" * 50 + "u" * 5 + "t" * 50)
    assert found.user == (70, 75)
    assert set(range(70, 75)) <= set(found.indices.tolist())


def test_the_newest_tokens_are_an_option() -> None:
    text = "u" * 20 + "t" * 200
    found = query(text, Settings(n_query=60, query_long="newest"))
    assert found.indices.tolist() == list(range(160, 220)) and found.user == (0, 20)
    assert query(text, Settings(n_query=60, query_tokens="all")).indices.tolist() == list(range(220))


def test_a_step_of_a_tool_alone_has_no_user() -> None:
    assert query("..tttt").user is None and query("......").user is None
    assert query("t" * 200, Settings(n_query=60, query_user=0)).user is None


@given(
    st.lists(st.sampled_from("ut."), min_size=1, max_size=300).map("".join),
    st.integers(1, 80),
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(0, 300),
    st.sampled_from(["ends", "newest"]),
)
def test_what_is_scored_is_text_and_not_too_much_of_it(
    text: str, n_query: int, n_ends: int, n_user: int, start: int, kind: str
) -> None:
    options = Settings(n_query=n_query, query_ends=n_ends, query_user=n_user, query_long=kind)
    start = min(start, len(text))
    found = query(text, options, start)
    kept = [i for i in range(start, len(text)) if text[i] != "."]
    if not kept:
        return
    indices = found.indices.tolist()
    assert set(indices) <= set(kept) and 0 < len(indices) <= max(n_query, 3)
    assert sum(text[i] != "." for i in range(found.start, len(text))) <= n_query
    assert indices == sorted(indices) and all(i < found.start for i in found.earlier)
    if len(kept) <= n_query:
        assert indices == kept
    assert kept[-1] in indices


def test_one_text_to_stop_at_is_not_taken_for_its_letters() -> None:
    ids, marks = np.arange(3, dtype=np.int32), np.ones(3, np.bool_)
    given: Any = {"stop": "two", "max_tokens": np.int64(5)}
    made = StepRequest(ids, 0, marks, SamplingParams(), **given)
    assert type(StepRequest(ids, np.int64(1), marks, SamplingParams()).query_start) is int  # type: ignore[arg-type]
    assert made.stop == ("two",) and type(made.max_tokens) is int
    assert StepRequest(ids, 0, marks, SamplingParams(), stop=["a", "b"]).stop == ("a", "b")
    bad: list[tuple[str, Any]] = [("max_tokens", "3"), ("max_tokens", 1.5), ("stop", [3]), ("stop", b"a")]
    for option, value in bad:
        with pytest.raises(InvalidOption, match=option):
            StepRequest(ids, 0, marks, SamplingParams(), **{option: value})


@pytest.mark.parametrize("data", [b"hello", bytearray(b"hello"), memoryview(b"hello")])
def test_bytes_are_no_token_ids(data: Any) -> None:
    with pytest.raises(InvalidOption, match="tokens"):
        token_ids(data, 1000)
