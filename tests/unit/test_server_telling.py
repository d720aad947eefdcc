"""From the events of a step to what a client is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvmem_llama.engine.answer_parser import MessageDelta
from kvmem_llama.engine.sampling_params import SamplingParams
from kvmem_llama.engine.token_probs import TokenProbs
from kvmem_llama.memory.report import Finished, MessagePiece, Progress, StepResult, TextPiece
from kvmem_llama.memory.usage import Timings
from kvmem_llama.server.formats.answer import AnswerState, Head, Piece
from kvmem_llama.server.schema import Generation
from kvmem_llama.server.telling import Teller, Told, View
from kvmem_llama.server.timing import Clock

END = 200
PIECES = {1: b"a", 2: b"b", 3: b"\xc3", 4: b"\xbc", 5: b"\n", 6: b" ", END: b"<end>"}


def result(**changes: Any) -> StepResult:
    fields: dict[str, Any] = {
        "text": "", "tokens": (), "finish_reason": "stop", "n_read": 3, "n_query": 2, "n_generated": 1,
        "n_reused": 0, "timings": Timings({}), "n_cached": 5, "stop_type": "limit",
    }  # fmt: skip
    return StepResult(**fields | changes)


class Run:
    """One answer, and what was told of it."""

    def __init__(self, *, parses: bool = False, n_probs: int = 0, **options: Any) -> None:
        vocab = SimpleNamespace(piece=PIECES.__getitem__, is_eog=lambda token: token == END)
        server: Any = SimpleNamespace(
            engine=SimpleNamespace(core=SimpleNamespace(model=SimpleNamespace(vocab=vocab)))
        )
        generation = Generation(
            SamplingParams(n_probs=n_probs), stream=options.pop("stream", True), **options
        )
        self.told: list[Told] = []
        self.n_stops = 0
        self.view = View(generation, 10)
        self.view.begin(np.arange(10, dtype=np.int32), 5)
        head = Head(generation, "m", "b0", parses=parses)
        self.teller = Teller(
            server, head, AnswerState(0), self.view, Clock(), self.told.append, self._stopped
        )

    def _stopped(self) -> None:
        self.n_stops += 1

    def take(self, *events: Any) -> Run:
        for event in events:
            self.teller.take(event)
        return self

    @property
    def pieces(self) -> list[Piece]:
        return [told.piece for told in self.told if told.piece is not None]

    @property
    def texts(self) -> list[tuple[str, int, int]]:
        return [(piece.text, piece.token, piece.n_decoded) for piece in self.pieces]


def text(said: str, token: int | None, *probs: TokenProbs) -> TextPiece:
    return TextPiece(said, token, probs)


def test_every_token_is_told_also_one_without_text() -> None:
    run = Run().take(text("a", 1), text("", 2), text("bb", 2), Finished(result()))
    assert run.texts == [("a", 1, 1), ("", 2, 2), ("bb", 2, 3)]
    assert run.pieces[0].is_first and not run.pieces[1].is_first


def test_half_a_character_is_not_told() -> None:
    run = Run().take(text("", 3), text("ü", 4), Finished(result()))
    assert run.texts == [("ü", 4, 2)]
    assert run.teller.tokens == [3, 4]


def test_an_answer_that_ends_within_a_character_is_told_without_it() -> None:
    run = Run().take(text("a", 1), text("", 3), text("\ufffd", None), Finished(result()))
    assert "".join(piece.text for piece in run.pieces) == "a"
    assert (run.teller.whole("a\ufffd"), run.teller.whole("b")) == ("a", "b")
    delta = MessagePiece(MessageDelta(content="\ufffd"))
    parsed = Run(parses=True).take(text("a", 1), MessagePiece(MessageDelta(content="a")), text("", 3), delta)
    assert [piece.delta.content for piece in parsed.pieces if piece.delta] == ["a"]
    done = Run().take(text("", 3), text("\xfc", 4), Finished(result()))
    assert done.teller.whole("\ufffd") == "\ufffd"


def test_text_that_was_held_back_belongs_to_the_last_token() -> None:
    run = Run().take(text("", 1), text("", END), text("a", None), Finished(result(stop_type="eos")))
    assert run.texts == [("", 1, 1), ("a", END, 2)]


def test_the_piece_that_completes_a_stop_string_has_the_times() -> None:
    run = Run().take(text("a", 1), text("", 2), Finished(result(stop_type="word")))
    assert [piece.timings is not None for piece in run.pieces] == [False, True]


def test_times_of_each_token_where_they_are_asked_for() -> None:
    run = Run(timings_per_token=True).take(text("a", 1), text("b", 2), Finished(result()))
    times: list[Any] = [piece.timings for piece in run.pieces]
    assert [one["predicted_n"] for one in times] == [1, 2]


def test_the_end_token_has_its_probability() -> None:
    some, end = TokenProbs(1, b"a", -1.0, ()), TokenProbs(END, b"", -2.0, ())
    run = Run(n_probs=1).take(
        text("a", 1, some), text("", END), Finished(result(stop_type="eos", end_probs=end))
    )
    assert [piece.probs for piece in run.pieces] == [some, end]


def test_deltas_of_a_message_follow_the_piece_they_come_of() -> None:
    some = TokenProbs(1, b"a", -1.0, ())
    run = Run(parses=True, n_probs=1).take(
        text("a", 1, some), MessagePiece(MessageDelta(content="a")), text("", END), Finished(result())
    )
    assert [piece.delta for piece in run.pieces] == [None, MessageDelta(content="a"), None]
    assert run.pieces[1].probs == some
    assert not Run().take(text("a", 1), MessagePiece(MessageDelta(content="a"))).pieces[1:]


def test_nothing_but_the_beginning_is_told_without_a_stream() -> None:
    run = Run(stream=False).take(Progress("read", 3, 5), text("a", 1), Finished(result()))
    assert run.pieces == []
    assert len(run.told) == 1


def test_progress_goes_from_what_is_stored_to_all() -> None:
    run = Run(return_progress=True).take(
        Progress("read", 2, 3),
        Progress("read", 3, 3),
        Progress("query", 2, 2),
        Progress("replay", 2, 2),
        text("a", 1),
    )
    told: list[Any] = [piece.progress for piece in run.pieces if piece.progress is not None]
    assert [one["processed"] for one in told] == [5, 7, 8, 10]
    assert {(one["total"], one["cache"]) for one in told} == {(10, 5)}
    assert run.texts[-1] == ("a", 1, 1)
    assert run.pieces[0].timings is None


def test_progress_has_timings_where_every_token_has() -> None:
    run = Run(return_progress=True, timings_per_token=True).take(
        Progress("read", 2, 3), Progress("read", 3, 3)
    )
    first, *more = [piece.timings for piece in run.pieces if piece.timings is not None]
    assert (first["prompt_n"], first["prompt_ms"], first["predicted_n"], first["cache_n"]) == (0, 0.0, 0, 5)
    assert [one["prompt_n"] for one in more] == [2, 3]
    assert all(one["prompt_ms"] > 0 and one["predicted_ms"] == 0 for one in more)


def test_what_was_not_evaluated_was_stored() -> None:
    run = Run().take(Progress("query", 2, 2), text("a", 1))
    state: AnswerState = run.told[-1].state
    assert (state.n_prompt, state.n_cached) == (10, 8)


def test_the_other_answers_to_a_prompt_cost_no_reading() -> None:
    view = Run().view
    view.done(result())
    view.begin(np.arange(11, dtype=np.int32), 11)
    view.evaluated(4)
    view.done(result(n_cached=9))
    assert (view.n_prompt, view.n_cached, view.n_evaluated) == (10, 5, 5)


@pytest.mark.parametrize(("limit", "n_stops"), [(-1, 0), (10**9, 0), (1, 1)])
def test_an_answer_that_takes_too_long_ends_at_a_new_line(limit: int, n_stops: int) -> None:
    run = Run(t_max_predict_ms=limit)
    run.take(text("a", 1))
    cast(Any, run.teller)._clock._prompt -= 1.0  # a second ago
    run.take(text("b", 2))
    assert run.n_stops == 0
    run.take(text("\n", 5))
    assert run.n_stops == n_stops


def test_an_answer_ends_at_a_line_that_is_not_indented_enough() -> None:
    run = Run(n_indent=2)
    run.take(text("a", 1), text("\n", 5), text("  b", 2), text("\n", 5), text(" ", 6))
    assert run.n_stops == 0
    run.take(text("b", 2))
    assert (run.n_stops, run.teller.cut) == (1, len("a\n  b\n "))
