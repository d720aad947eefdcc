"""Workspaces and streams over a real owner thread and the fake model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import fake_model
import numpy as np
import pytest
from fake_model import END, fake_resources, make_model
from fake_run import FakeTemplate, checked_sessions, faked_template, text

from kvmem_llama.conversation import Asked, Conversation
from kvmem_llama.engine.chat_template import Message
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import (
    Cancelled,
    EngineClosed,
    InputError,
    InvalidOption,
    KvmemError,
    MandatoryTooLarge,
    WorkspaceBusy,
    WorkspaceClosed,
)
from kvmem_llama.memory.report import Finished, Progress, Recalled, TextPiece
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, WorkspaceEngine

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)


class Engine(WorkspaceEngine):
    model: fake_model.FakeModel


@pytest.fixture
def engine() -> Iterator[Engine]:
    with made(n_parallel=2) as it:
        yield it


def made(**options: Any) -> Engine:
    settings = Settings(**{"n_ctx": 256, "block_size": 8, "n_ubatch": 16, "scorer": "reference", **options})
    model = make_model(settings)
    it = Engine(lambda: fake_resources(model, settings))
    it.model = model
    return it


def said(workspace: Workspace, start: int = 0) -> str:
    vocab = fake_model.FakeVocab()
    return vocab.detokenize(workspace.history()[start:]).decode()


def test_a_question_is_asked_in_the_template_and_answered_as_a_stream(engine: Engine) -> None:
    with engine.workspace(system="be brief") as ws:
        engine.model.forced = [40, 41, END]
        events = list(ws.ask("why?", sampling=GREEDY))
        assert [e.text for e in events if isinstance(e, TextPiece)] == ["H", "I"]
        assert isinstance(events[-1], Finished) and events[-1].result.text == "HI"
        assert said(ws) == "(be brief)[why?]:HI<end>"
        engine.model.forced = [42, 43]
        ws.ask("and?", sampling=GREEDY, max_tokens=2).result()
        ws.ask("so?", sampling=GREEDY, max_tokens=0).result()
        assert said(ws) == "(be brief)[why?]:HI<end>[and?]:JK|[so?]:"


def test_documents_are_read_as_history_and_only_the_question_is_the_query(engine: Engine) -> None:
    with engine.workspace() as ws:
        result = ws.ask(
            "why?", [("a.txt", "b" * 600), ("", "c" * 50)], sampling=GREEDY, max_tokens=3
        ).result()
        assert (
            result.n_query == len("why?]:")
            and result.n_read == len("[a.txt:xx" + "b" * 600 + "c" * 50 + "nnnn") - 1
        )
        assert [r.n_candidates > 0 for r in result.recalls] == [True]
        events = list(ws.ask("again?", sampling=GREEDY, max_tokens=3))
        assert any(isinstance(e, Progress) and e.phase == "query" for e in events)
        assert any(isinstance(e, Recalled) for e in events)


def test_a_text_that_was_read_is_known_by_its_words_and_its_name(engine: Engine) -> None:
    first, second = "b" * 20 + "c" * 30 + "d" * 300, "e" * 100 + "f" * 100
    with engine.workspace() as ws:
        assert not ws.has_read(first, "a.txt")
        ws.ask("why?", [("a.txt", first), ("", "c" * 50)], sampling=GREEDY, max_tokens=3).result()
        ws.read(second).result()
        ws.ask("and?", sampling=GREEDY, max_tokens=3).result()
        assert ws.has_read(first, "a.txt") and ws.has_read(second)
        assert not ws.has_read(first, "another.txt")
        assert not ws.has_read(first.replace("cd", "dd"), "a.txt")
        assert not ws.has_read("", "a.txt") and not ws.has_read("c" * 5)


def test_texts_and_tokens_are_read_as_they_are(engine: Engine) -> None:
    with engine.workspace() as ws:
        assert ws.read("plain").result().n_read == 5
        ws.read("named", source="n").result()
        ws.read_tokens([40, 41]).result()
        assert said(ws).startswith("plain") and said(ws).endswith("HI") and ws.n_tokens == len(said(ws))
        result = ws.step([42, 43, 44], sampling=GREEDY, max_tokens=4).result()
        assert result.n_query == 3 and ws.n_tokens == len(said(ws)) and result.n_generated == 4


def test_a_step_without_tokens_is_refused(engine: Engine) -> None:
    with engine.workspace() as ws, pytest.raises(InputError):
        ws.step([], sampling=GREEDY)


def test_a_question_that_does_not_fit_is_refused_and_the_workspace_goes_on(engine: Engine) -> None:
    with engine.workspace() as ws:
        stream = ws.ask("w" * 250, sampling=GREEDY)
        with pytest.raises(MandatoryTooLarge):
            list(stream)
        assert ws.n_tokens == 0 and engine.model.n_calls == 0
        assert ws.ask("why?", sampling=GREEDY, max_tokens=2).result().n_generated == 2
        assert said(ws).startswith("[why?]:")


def test_the_stop_string_of_the_template_ends_an_answer(engine: Engine) -> None:
    with engine.workspace() as ws:
        engine.model.forced = [ord(c) - 32 for c in "so STOP"]
        result = ws.ask("why?", sampling=GREEDY).result()
        assert result.text == "so " and result.finish_reason == "stop"


def hold(engine: Engine) -> threading.Event:
    """Decodes wait for the event."""
    go = threading.Event()
    engine.model.before_decode = lambda batch: go.wait(10) and None
    return go


def test_one_step_at_a_time(engine: Engine) -> None:
    with engine.workspace() as ws:
        go = hold(engine)
        stream = ws.ask("why?", sampling=GREEDY, max_tokens=5)
        for call in (
            lambda: ws.ask("x", sampling=GREEDY),
            lambda: ws.read("x"),
            lambda: ws.truncate(0),
            ws.fork,
            ws.history,
        ):
            with pytest.raises(WorkspaceBusy):
                call()
        go.set()
        stream.result(10)
        assert ws.history().shape == (ws.n_tokens,)


def test_a_cancelled_stream_raises_and_leaves_nothing(engine: Engine) -> None:
    with engine.workspace() as ws:
        go = hold(engine)
        stream = ws.ask("why?", sampling=GREEDY)
        stream.cancel()
        go.set()
        with pytest.raises(Cancelled):
            list(stream)
        with pytest.raises(Cancelled):
            stream.result()
        assert ws.n_tokens == 0 and stream.done
        ws.ask("why?", sampling=GREEDY, max_tokens=1).result()
        assert said(ws).startswith("[why?]:")


def test_an_answer_is_stopped_while_it_is_read(engine: Engine) -> None:
    with engine.workspace() as ws:
        stream = ws.ask("why?", sampling=GREEDY)
        n = 0
        for event in stream:
            n += isinstance(event, TextPiece)
            if n == 5:
                stream.stop()
        result = stream.result()
        assert result.finish_reason == "truncated" and result.n_generated >= 5
        ws.ask("go on", sampling=GREEDY, max_tokens=0).result()
        assert said(ws).endswith("|[go on]:")


def test_truncating_takes_turns_back(engine: Engine) -> None:
    with engine.workspace() as ws:
        for question in ("one", "two"):
            engine.model.forced = [40, END]
            ws.ask(question, sampling=GREEDY).result()
        assert said(ws) == "[one]:H<end>[two]:H<end>"
        ws.truncate(8)
        engine.model.forced = [41, END]
        ws.ask("new", sampling=GREEDY).result()
        assert said(ws) == "[one]:H<end>[new]:I<end>"
        ws.truncate(0)
        ws.ask("first", sampling=GREEDY, max_tokens=0).result()
        assert said(ws) == "[first]:"
        for n in (-1, 9):
            with pytest.raises(InvalidOption):
                ws.truncate(n)


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize(
    ("kept", "goes_on"),
    [
        ("", "(sys)[new]:"),
        ("(sy", "(sys)[new]:"),
        ("(sys)", "[new]:"),
        ("(sys)[on", "[new]:"),
        ("(sys)[one]:", "[new]:"),
        ("(sys)[one]:H", "|[new]:"),
        ("(sys)[one]:HIJ<end>", "[new]:"),
        ("(sys)[one]:HIJ<end>[t", "|[new]:"),
        ("(sys)[one]:HIJ<end>[two]:", "|[new]:"),
        ("(sys)[one]:HIJ<end>[two]:K", "|[new]:"),
    ],
)
def test_a_question_goes_on_after_what_is_left_and_brings_nothing_back(
    engine: Engine, kept: str, goes_on: str, forked: bool
) -> None:
    with engine.workspace(system="sys") as ws:
        for question, answer in (("one", [40, 41, 42, END]), ("two", [43, 44, END])):
            engine.model.forced = answer
            ws.ask(question, sampling=GREEDY).result()
        n = next(n for n in range(ws.n_tokens + 1) if said(ws)[: len(kept)] == said_of(ws, n) == kept)
        ws.truncate(n)
        with ws.fork() if forked else ws as it:
            it.ask("new", sampling=GREEDY, max_tokens=0).result()
            assert said(it) == kept + goes_on
            it.ask("more", sampling=GREEDY, max_tokens=0).result()
            assert said(it) == kept + goes_on + "|[more]:"


def said_of(workspace: Workspace, n: int) -> str:
    """The first `n` tokens as text."""
    return fake_model.FakeVocab().detokenize(workspace.history()[:n]).decode()


def test_only_messages_of_the_history_are_taken_for_its_end() -> None:
    """The rendering begins with the system prompt, as the history does: nothing is missing in between."""
    template = FakeTemplate()
    it = Conversation(fake_model.FakeVocab(), template, "sys")  # type: ignore[arg-type]
    history = fake_model.FakeVocab().tokenize("(sys)[one]:HIJ")
    it.answered(Asked(0, 0, 11), "HIJ", [40, 41, 42], history[:0])
    it.truncate(history[:12], 14)
    it.next_turn("new", (), history[:12])
    text, messages, closed = template.seen[-1]
    assert messages[-2:] == [Message("assistant", "H"), Message("user", "new")] and closed is False
    assert text.endswith("(sys)[one]:H") and not text.startswith("(sys)")


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        ([[1, 2], [3, 4]], r"tokens\[0\]"),
        (np.array([[1, 2], [3, 4]]), r"shape \(2, 2\)"),
        ([1, [2, 3]], r"tokens\[1\]"),
        ([1, 2.0], r"tokens\[1\]"),
        (np.array([1.0, 2.0]), r"tokens\[0\]"),
        ([1, True], r"tokens\[1\]"),
        ([1, 2, -1, 97], r"tokens\[2\] = -1"),
        ([1, 97, -1], r"tokens\[1\] = 97: must be an integer from 0 to 96"),
        (np.array([96, 97]), r"tokens\[1\] = 97"),
        (np.array([2**64 - 1], np.uint64), r"tokens\[0\]"),
        ([5, 2**31], r"tokens\[1\] = 2147483648"),
        ([10**5000], r"tokens\[0\]"),
        ("text", r"tokens\[0\]"),
        (5, "sequence"),
    ],
)
def test_tokens_that_are_no_ids_are_refused_by_name(engine: Engine, tokens: Any, name: str) -> None:
    with engine.workspace() as ws:
        for call in (ws.read_tokens, lambda ids: ws.step(ids, sampling=GREEDY)):
            with pytest.raises(InvalidOption, match=name):
                call(tokens)
        assert ws.read_tokens(np.array([1, 2], np.uint8)).result().n_read == 2
        assert ws.read_tokens([np.int64(96)]).result().n_read == 1
        assert ws.read_tokens([]).result().n_read == ws.read_tokens(np.zeros(0)).result().n_read == 0


def test_marks_and_starts_that_do_not_fit_the_tokens_are_refused(engine: Engine) -> None:
    with engine.workspace() as ws:
        for marks in (np.ones(2, np.bool_), np.ones(3), np.ones((3, 1), np.bool_), [True] * 3):
            with pytest.raises(InvalidOption, match="scored"):
                ws.step([1, 2, 3], scored=marks, sampling=GREEDY)  # type: ignore[arg-type]
        for start in (-1, 4):
            with pytest.raises(InvalidOption, match="query_start"):
                ws.step([1, 2, 3], start, sampling=GREEDY)
        ws.step([1, 2, 3], 3, np.ones(3, np.bool_), sampling=GREEDY, max_tokens=0).result()


def test_forks_go_their_own_ways(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.read_tokens(text(600)).result()
        with ws.fork() as fork, ws.fork() as other:
            answers = [
                w.step(text(20, 1), sampling=GREEDY, max_tokens=30).result().tokens for w in (ws, fork, other)
            ]
            assert answers[0] == answers[1] == answers[2]  # on two sequences: one view had to be rebuilt
            ws.close()
            assert fork.step(text(20, 2), sampling=GREEDY, max_tokens=5).result().n_generated == 5


def test_four_workspaces_share_two_sequences(engine: Engine) -> None:
    spaces = [engine.workspace() for _ in range(4)]
    for seed, ws in enumerate(spaces):
        ws.read_tokens(text(500, seed)).result()
    streams = [ws.step(text(20, 9), sampling=GREEDY, max_tokens=40) for ws in spaces]
    answers = [stream.result().tokens for stream in streams]
    for seed, ws in enumerate(spaces):
        with made() as alone, alone.workspace() as other:
            other.read_tokens(text(500, seed)).result()
            assert other.step(text(20, 9), sampling=GREEDY, max_tokens=40).result().tokens == answers[seed]
        ws.close()
    assert engine.core.pool.n_used == 0


def test_pins_are_of_tokens_that_exist(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.read_tokens(text(100)).result()
        ws.pin(10, 20)
        assert ws.stats().pins == ((10, 20),)
        for start, end in ((-1, 5), (5, 5), (90, 101)):
            with pytest.raises(InvalidOption):
                ws.pin(start, end)
        ws.unpin(10, 20)
        assert ws.stats().pins == ()


def test_the_ends_of_a_pin_are_integers(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.read_tokens(text(100)).result()
        bad: Any
        for bad in ((0.5, 20), (1, 20.0), ("1", "5"), (None, 5), SimpleNamespace(start=0.5, end=3)):
            with pytest.raises(InvalidOption, match="no range of tokens"):
                ws.pin(bad)
        with pytest.raises(InvalidOption, match="no range of tokens"):
            ws.pin(0.5, 20)  # type: ignore[call-overload]
        ws.pin((np.int64(10), np.int32(20)))  # type: ignore[arg-type]
        assert ws.stats().pins == ((10, 20),)
        ws.unpin(10, 20)
        assert ws.stats().pins == ()


def test_what_is_no_text_and_no_number_is_refused_by_name(engine: Engine) -> None:
    with engine.workspace() as it:
        ws: Any = it
        calls: list[tuple[type[KvmemError], Callable[[], object]]] = [
            (InputError, lambda: ws.ask(None)),
            (InvalidOption, lambda: ws.ask("why?", context=["x"])),
            (InvalidOption, lambda: ws.ask("why?", context="xy")),
            (InvalidOption, lambda: ws.ask("why?", context=[("a", None)])),
            (InputError, lambda: ws.chat(None)),
            (InputError, lambda: ws.chat(5)),
            (InputError, lambda: ws.chat([Message("user", cast(str, None))])),
            (InputError, lambda: ws.chat({"role": "user", "content": "why?"})),
            (InvalidOption, lambda: ws.truncate(1.5)),
            (InvalidOption, lambda: ws.add(b"hello")),
        ]
        for kind, call in calls:
            with pytest.raises(kind):
                call()
        assert it.n_tokens == 0
        it.ask("why?", context=[("a", "b")], sampling=GREEDY, max_tokens=2).result()


def test_nothing_is_taken_over_from_a_workspace_that_is_closed_or_busy(engine: Engine) -> None:
    with engine.workspace() as old, engine.workspace() as new:
        go = hold(engine)
        step = old.read_tokens(text(100))
        with pytest.raises(WorkspaceBusy):
            new.take_over(old, 50)
        go.set()
        step.result()
        new.take_over(old, 50)
        old.close()
        with pytest.raises(WorkspaceClosed):
            new.take_over(old, 50)


@pytest.mark.parametrize("policy", ["kvmem", "full_context"])
def test_a_step_by_hand_that_cannot_be_leaves_the_history_as_it_was(policy: str) -> None:
    with made(policy=policy) as engine, engine.workspace() as ws:
        held = text(100)
        ws.read_tokens(held).result()
        go = hold(engine)
        first = engine.workspace()
        busy = first.read_tokens(text(50))
        waiting = ws.step_by_hand([*held[:10], 5])
        waiting.cancel()
        go.set()
        busy.result()
        with pytest.raises(Cancelled):
            waiting.result()
        assert np.array_equal(ws.history(), held)
        if policy == "kvmem":
            with pytest.raises(MandatoryTooLarge):
                ws.step_by_hand([*held[:10], *[5] * 5000], query_start=10).result()
            assert np.array_equal(ws.history(), held)
        step = ws.step_by_hand([*held[:10], 5])
        assert step.logits() is not None
        step.finish()
        assert ws.history().tolist() == [*held[:10].tolist(), 5]
        first.close()


def test_a_closed_workspace_and_a_closed_engine_say_so(engine: Engine) -> None:
    ws = engine.workspace()
    ws.read("abc").result()
    ws.close()
    ws.close()
    for call in (ws.history, ws.stats, ws.fork, lambda: ws.read("x")):
        with pytest.raises(WorkspaceClosed):
            call()
    assert engine.core.pool.n_used == 0
    ws = engine.workspace()
    engine.close()
    with pytest.raises(EngineClosed):
        ws.read("x")
    with pytest.raises(EngineClosed):
        engine.workspace()
    ws.close()


def test_closing_a_workspace_cancels_its_step(engine: Engine) -> None:
    ws = engine.workspace()
    stream = ws.ask("why?", sampling=GREEDY)
    ws.close()
    with pytest.raises(Cancelled):
        stream.result()
    assert engine.core.pool.n_used == 0


def test_the_policy_can_be_chosen_for_each_workspace(engine: Engine) -> None:
    with engine.workspace(policy="sliding_window") as ws, engine.workspace() as other:
        ws.read_tokens(text(600)).result()
        assert ws.stats().policy == "sliding_window" and ws.stats().n_records == 0
        assert ws.step(text(20, 1), sampling=GREEDY, max_tokens=50).result().n_generated == 50
        assert other.stats().policy == "kvmem" and ws.n_view == other.n_view == 256
        assert np.array_equal(ws.history()[:600], text(600))


def test_memory_is_flat_over_many_steps(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.read_tokens(text(600)).result()
        for _ in range(30):
            ws.step(text(20, 1), sampling=GREEDY, max_tokens=20).result()
            ws.truncate(600)
        stats = ws.stats()
        assert stats.n_records == stats.n_blocks == 75 and stats.n_orphans == 0


@pytest.mark.parametrize("score", ["mean_k", "lexical", "fused"])
def test_a_search_finds_what_a_question_recalls_and_leaves_nothing_behind(score: str) -> None:
    with made(score=score) as engine, engine.workspace() as ws, engine.workspace() as other:
        history = text(900, seed=4)
        ws.read_tokens(history).result()
        other.read_tokens(history).result()
        question = said(ws, 300)[:20]
        found = ws.search(question, 1000)
        before = ws.history()
        np.testing.assert_array_equal(before, history)
        ids = fake_model.FakeVocab().tokenize(question)
        asked = ws.step(ids, 0, sampling=GREEDY, max_tokens=3).result()
        (report,) = asked.recalls
        recalled = {block.start: (block.rank, dict(block.channels)) for block in report.blocks if block.rank}
        best = found.blocks[: report.n_selected]
        assert recalled == {b.start: (i + 1, b.ranks) for i, b in enumerate(best)}
        assert len(found.ranking.candidates) == report.n_candidates > report.n_selected > 0
        again = other.step(ids, 0, sampling=GREEDY, max_tokens=3).result()
        assert again.tokens == asked.tokens


def test_a_search_that_cannot_be_is_refused(engine: Engine) -> None:
    with engine.workspace() as ws:
        ws.read_tokens(text(50)).result()
        with pytest.raises(InputError, match="no text"):
            ws.search("")
        with pytest.raises(MandatoryTooLarge):
            ws.search("x" * 300)
        assert ws.search("x").blocks == () and ws.n_tokens == 50
    with engine.workspace(policy="sliding_window") as ws, pytest.raises(InvalidOption, match="no blocks"):
        ws.search("x")
