"""Text of an answer: whole characters, no stop strings, and which tokens came before one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.memory.answer import AnswerText


def pushed(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], AnswerText]:
    answer = AnswerText(stop)
    out = []
    for piece in pieces:
        out.append(answer.push(piece))
        if answer.stopped:
            break
    return [*out, answer.finish()], answer


def test_a_character_is_released_by_its_last_byte() -> None:
    data = "aé€😀".encode()
    out, _ = pushed([data[i : i + 1] for i in range(len(data))])
    assert [t for t in out if t] == ["a", "é", "€", "😀"]


def test_a_character_that_is_cut_at_the_end_is_replaced() -> None:
    assert pushed([b"a", "€".encode()[:2]])[0] == ["a", "", "\ufffd"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert "".join(pushed([b"\xff", b"a"])[0]) == "\ufffda"


@pytest.mark.parametrize(
    ("pieces", "text", "n_kept"),
    [
        ([b"one ", b"STOP", b" two"], "one ", 1),
        ([b"one", b" S", b"T", b"OP"], "one ", 2),  # the token of the space holds text that is shown
        ([b"one", b"S", b"T", b"OP"], "one", 1),
        ([b"one STOP two"], "one ", 1),
        ([b"STOP"], "", 0),
        ([b"ST", b"ST", b"OP", b"x"], "ST", 1),
        ([b"", b"STOP"], "", 0),
    ],
)
def test_text_ends_before_a_stop_string(pieces: list[bytes], text: str, n_kept: int) -> None:
    out, answer = pushed(pieces, ("STOP",))
    assert "".join(out) == answer.text == text
    assert answer.stopped and answer.n_kept == n_kept


def test_what_might_have_become_a_stop_string_is_released_when_it_does_not() -> None:
    out, answer = pushed([b"a ST", b"AR", b" ST"], ("STOP",))
    assert out == ["a ", "STAR", " ", "ST"] and not answer.stopped and answer.n_kept == 3


def test_the_first_of_several_stop_strings_counts() -> None:
    _, answer = pushed([b"a\nUser: b###"], ("###", "\nUser:", ""))
    assert answer.text == "a"


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=4), st.data())
def test_any_split_into_tokens_gives_the_same_text(text: str, stop: str, data: st.DataObject) -> None:
    pieces, rest = [], text.encode()
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:n])
        rest = rest[n:]
    out, answer = pushed(pieces, (stop,))
    assert "".join(out) == text.partition(stop)[0]
    assert answer.stopped == (stop in text)


@pytest.mark.parametrize(
    ("pieces", "released"),
    [
        ([b"one", b" ST", b"AR"], [1, 2, 3]),  # the space of the second is released with it
        ([b"one", b"ST", b"AR"], [1, 1, 3]),
        (["é".encode()[:1], "é".encode()[1:], b"x"], [0, 2, 3]),
        ([b"", b"x"], [0, 2]),
        ([b"one", b"", b"S", b"TOP"], [1, 1, 1, 1]),
    ],
)
def test_a_token_is_released_with_the_first_character_that_it_begins(
    pieces: list[bytes], released: list[int]
) -> None:
    answer = AnswerText(("STOP",))
    told = []
    for piece in pieces:
        answer.push(piece)
        told.append(answer.n_released)
    assert told == released


@given(st.text(alphabet="ab", max_size=30), st.text(alphabet="ab", min_size=1, max_size=4), st.data())
def test_tokens_are_released_in_order_and_never_more_than_are_kept(
    text: str, stop: str, data: st.DataObject
) -> None:
    answer, told = AnswerText((stop,)), [0]
    rest = text.encode()
    while rest and not answer.stopped:
        n = data.draw(st.integers(1, len(rest)))
        for piece in (rest[:n], b""):  # and a control token
            if not answer.stopped:
                answer.push(piece)
        rest = rest[n:]
        told.append(answer.n_released)
    assert told == sorted(told) and told[-1] <= answer.n_kept
    assert answer.stopping_word == (stop if answer.stopped else "")
