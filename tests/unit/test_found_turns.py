"""Questions and answers that are found in a text by what a chat template puts around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_model import END, FakeVocab

from kvmem_llama.found_turns import find_turns

CONTROL = ("u:", "<end>a:")
PLAIN = ("User: ", "\n\nAssistant:")


class Vocab(FakeVocab):
    """Knows its control token in a text."""

    def tokenize(self, text: str | bytes, *, add_bos: bool = False, parse_special: bool = True) -> Any:
        data = text.encode("ascii", "replace") if isinstance(text, str) else text
        ids: list[int] = []
        for i, piece in enumerate(data.split(b"<end>")):
            ids += [END] * (i > 0) + [byte - 32 if byte >= 32 else 95 for byte in piece]
        return np.array(ids, np.int32)

    def piece(self, token: int, *, special: bool = True) -> bytes:
        return b"\n" if token == 95 else super().piece(token, special=special)


def found(text: str, around: tuple[str, str], begun: str = "", *, after_open: bool = False) -> Any:
    """begun: what the text that was there before ends with."""
    vocab: Any = Vocab()
    tokens = vocab.tokenize(text)
    n = len(vocab.tokenize(text[: text.index(begun) + len(begun)]))
    it = find_turns(vocab, tokens, around, n, after_open=after_open)

    def said(start: int, end: int) -> str:
        return str(vocab.detokenize(tokens[start:end]).decode())

    turns = [
        (said(t.start, t.question), said(t.question, t.answer_start), t.answer, said(t.end, len(tokens)))
        for t in it.turns
    ]
    return it.rest_text, turns


def test_each_answer_ends_a_turn_and_the_last_is_open() -> None:
    rest = "u:who<end>a:"
    assert found("s:be<end>u:hi<end>a:so<end>" + rest, CONTROL) == (
        "",
        [("s:be<end>u:", "hi<end>a:", "so", rest), ("u:", "who<end>a:", "", "")],
    )


def test_a_message_whose_beginning_was_there_is_the_whole_turn() -> None:
    assert found("x<end>u:hi there<end>a:", CONTROL, "hi")[1] == [("u:", "hi there<end>a:", "", "")]
    text = "doc User: hi there\n\nAssistant:"
    assert found(text, PLAIN, "User:")[1] == [("User: ", "hi there\n\nAssistant:", "", "")]


def test_the_rest_of_an_answer_is_not_part_of_the_next_turn() -> None:
    text = " and more<end>u:hi<end>a:"
    assert found(text, CONTROL, after_open=True)[0] == " and more"
    assert found(text, CONTROL)[0] == ""


def test_without_control_tokens_an_answer_ends_where_the_next_message_begins() -> None:
    text = "be\n\nUser: hi\n\nAssistant: so\n\nUser: who\n\nAssistant:"
    _, turns = found(text, PLAIN)
    assert [(q, a) for _, q, a, _ in turns] == [
        ("hi\n\nAssistant:", " so\n\n"),
        ("who\n\nAssistant:", ""),
    ]
    cut = found(text[: text.index("er: who")], PLAIN)[1]
    assert cut == [("be\n\nUser: ", "hi\n\nAssistant:", " so\n\n", "Us")]


@pytest.mark.parametrize("around", [CONTROL, PLAIN, ("", "")])
def test_a_text_without_a_message_holds_no_turn(around: tuple[str, str]) -> None:
    assert found("", around) == found("only words", around) == ("", [])
