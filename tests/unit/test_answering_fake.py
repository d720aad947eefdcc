"""What an answer tells of its tokens, and the caller's functions that have a say in it, on the fake model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from fake_model import END, N_VOCAB
from fake_run import Run, asked, checked_sessions, records, request, text
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InvalidOption
from kvmem_llama.memory.query import StepRequest
from kvmem_llama.memory.report import StepResult, TextPiece
from kvmem_llama.memory.session import Session

pytestmark = pytest.mark.usefixtures("checked")
checked = checked_sessions

PROBS = SamplingParams(temp=0, n_probs=2)


def told(run: Run, session: Session, req: StepRequest) -> tuple[StepResult, list[TextPiece]]:
    """The result of a step and its pieces of text."""
    events: list[Any] = []
    task = run.start_step(session, req)
    task._on_event = events.append
    run.drive(task)
    return task.result(0), [e for e in events if isinstance(e, TextPiece)]


def answered(
    said: list[int], n: int = 100, stop: tuple[str, ...] = (), **fields: Any
) -> tuple[StepResult, list[TextPiece]]:
    """The answer to a question whose tokens are forced."""
    run, session = asked(100)
    run.model.forced = list(said)  # all fits the view: the query is evaluated once
    req = request(text(20, 1), n, stop=stop)
    return told(run, session, dataclasses.replace(req, **{"sampling": PROBS, **fields}))


def tokens_of(pieces: list[TextPiece]) -> list[list[int]]:
    return [[p.token for p in piece.probs] for piece in pieces]


def test_a_token_is_told_with_the_text_that_it_became() -> None:
    result, pieces = answered([40, 5, 6, 41, END])
    assert [p.text for p in pieces] == ["H", "é", "I"]
    assert tokens_of(pieces) == [[40], [5, 6], [41]]
    assert [p.token for p in result.probs] == [40, 5, 6, 41]
    assert [p.piece for p in result.probs] == [b"H", "é".encode()[:1], "é".encode()[1:], b"I"]
    assert result.end_probs is not None and result.end_probs.token == END and result.end_probs.piece == b""
    assert result.stop_type == "eos" and result.stopping_word == ""
    for probs in result.probs:
        assert len(probs.top) == 2 and probs.top[0][0] == probs.token  # greedy
        assert probs.top[0][2] == probs.logprob >= probs.top[1][2]


def test_tokens_held_back_for_a_stop_string_are_told_once_it_is_none() -> None:
    result, pieces = answered([40, 42, 43, 40, END], stop=("JKL",))
    assert [p.text for p in pieces] == ["H", "JKH"]
    assert tokens_of(pieces) == [[40], [42, 43, 40]]
    assert result.stop_type == "eos"


def test_tokens_of_a_stop_string_are_not_told() -> None:
    result, pieces = answered([40, 41, 42, 43, 44, 45], stop=("X", "JKL"))
    assert tokens_of(pieces) == [[40], [41]]
    assert [p.token for p in result.probs] == [40, 41] == list(result.tokens)
    assert result.stop_type == "word" and result.stopping_word == "JKL" and result.end_probs is None


@pytest.mark.parametrize(("n", "stop", "held"), [(3, ("JKL",), [42, 43]), (2, ("JKL",), [42])])
def test_what_is_held_back_when_the_answer_is_long_enough_comes_last(
    n: int, stop: tuple[str, ...], held: list[int]
) -> None:
    result, pieces = answered([40, 42, 43], n, stop)
    assert tokens_of(pieces) == [[40], held] and pieces[-1].token is None
    assert result.stop_type == "limit" and result.finish_reason == "length"


def test_half_a_character_at_the_end_is_told_with_its_replacement() -> None:
    _, pieces = answered([40, 5], 2)
    assert [p.text for p in pieces] == ["H", "\ufffd"] and tokens_of(pieces) == [[40], [5]]


def test_without_n_probs_nothing_is_computed() -> None:
    result, pieces = answered([40, 41, END], sampling=SamplingParams(temp=0))
    assert result.probs == () and result.end_probs is None and all(p.probs == () for p in pieces)


@given(st.lists(st.sampled_from([5, 6, 40, 42, 43, 44]), max_size=12), st.booleans())
def test_the_pieces_have_every_token_of_the_answer_once(said: list[int], ends: bool) -> None:
    result, pieces = answered([*said, *([END] if ends else [])], len(said) + ends, ("JKL", "KK"))
    kept = [t for t in result.tokens if t != END]
    assert [t for ids in tokens_of(pieces) for t in ids] == [p.token for p in result.probs] == kept
    assert "".join(p.text for p in pieces) == result.text


def test_a_preserved_control_token_is_text() -> None:
    result, pieces = answered([40, END], preserved=frozenset({END}))
    assert result.text == "H<end>" and result.tokens == (40, END)
    assert [p.text for p in pieces] == ["H", "<end>"] and result.stop_type == "eos"
    assert result.end_probs is not None and result.end_probs.piece == b"<end>"


# -- processors of logits and stopping criteria


def test_processors_see_all_tokens_and_change_what_is_chosen() -> None:
    seen: list[list[int]] = []

    def shift(tokens: Any, logits: Any) -> Any:
        seen.append(tokens.tolist())
        logits[50 + len(seen)] = 1e9  # its own copy
        return logits

    def same(tokens: Any, logits: Any) -> Any:
        assert logits.dtype == np.float32 and logits.shape == (N_VOCAB,)
        return logits.astype(np.float64)

    run, session = asked(600)
    req = dataclasses.replace(request(text(20, 1), 3), logits_processors=(shift, same), sampling=PROBS)
    result, _ = told(run, session, req)
    assert result.tokens == (51, 52, 53)
    history = [*text(600).tolist(), *text(20, 1).tolist()]
    assert seen == [history, [*history, 51], [*history, 51, 52]]
    assert [p.logprob for p in result.probs] == pytest.approx([0, 0, 0])  # of what they returned


def test_a_criterion_ends_the_answer_before_the_token_that_it_refuses() -> None:
    lengths: list[int] = []

    def long_enough(tokens: Any, logits: Any) -> bool:
        lengths.append(len(tokens))
        return len(tokens) >= 622

    run, session = asked(600)
    req = dataclasses.replace(request(text(20, 1), 50), stopping_criteria=(long_enough,))
    result, _ = told(run, session, req)
    assert lengths == [620, 621, 622] and len(result.tokens) == 2
    assert result.finish_reason == "stop" and result.stop_type == "none"


class Refused(Exception):
    pass


def refuse(tokens: Any, logits: Any) -> Any:
    if len(tokens) > 621:
        raise Refused("not this one")
    return logits


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"logits_processors": (refuse,)}, Refused),
        ({"stopping_criteria": (lambda tokens, logits: refuse(tokens, logits) is None,)}, Refused),
        ({"logits_processors": (lambda tokens, logits: logits[:-1],)}, InvalidOption),
        ({"logits_processors": (lambda tokens, logits: logits * np.nan,)}, InvalidOption),
        ({"logits_processors": (lambda tokens, logits: logits - np.inf,)}, InvalidOption),
    ],
)
def test_an_error_of_theirs_fails_the_step_and_nothing_of_it_stays(
    fields: dict[str, Any], error: type[Exception]
) -> None:
    run, session = asked(600)
    before = records(run, session)
    task = run.start_step(session, dataclasses.replace(request(text(20, 1), 9), **fields))
    run.drive(task)
    assert isinstance(task.error, error)
    assert session.history.n_committed == session.history.n_tokens == 600
    assert records(run, session) == before
    twin, other = asked(600)
    question = request(text(20, 2), 5)
    assert run.step(session, question).tokens == twin.step(other, question).tokens


def test_a_step_stores_its_sampling_without_the_functions() -> None:
    run, session = asked(100)
    stored: list[str] = []
    commit = session.history.commit
    session.history.commit = lambda facts: (stored.append(facts.options), commit(facts))[1]  # type: ignore[method-assign]
    sampling = SamplingParams(temp=0, logit_bias=((5, -np.inf),), samplers=("temperature",))
    req = dataclasses.replace(request(text(20, 1), 2), sampling=sampling, logits_processors=(refuse,))
    run.step(session, req)
    options = json.loads(stored[0])
    assert options["sampling"]["samplers"] == ["temperature"] and options["sampling"]["logit_bias"] == [
        [5, -np.inf]
    ]
