"""Whole lists of messages: what is new or changed is read, the rest is there (fake model)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_model import END, FakeSampler, FakeVocab
from fake_run import checked_sessions

from kvmem_llama.engine import core
from kvmem_llama.engine.chat_template import Message, Turn, as_json
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.engine.turn_tokens import tokenize_turn
from kvmem_llama.errors import InputError
from kvmem_llama.messages import messages_of, tokenize_messages, user_marks
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "whole")
checked = checked_sessions
GREEDY = SamplingParams(temp=0)
N_TURNS = 10
OPTIONS: dict[str, Any] = {"n_ctx": 640, "n_reserve": 240}  # room for a whole answer
SAID: list[int] = []
"""Tokens that the model says next."""


class WholeTemplate:
    """`s:system<end>u:question<end>a:answer<end>`."""

    @classmethod
    def open(cls, model: Any, settings: Any) -> Any:
        return cls()

    def close(self) -> None: ...

    def around(self) -> tuple[str, str]:
        return "u:", "<end>a:"

    def turn(
        self, history: str, messages: Sequence[Any], *, closed: bool | None = None, options: Any = None
    ) -> Turn:
        text, spans, found = "", [], [as_json(message) for message in messages]
        for message in found:
            start = len(text) + 2
            text += f"{message['role'][0]}:{message['content']}<end>"
            spans.append((start, start + len(message["content"])))
        roles = [message["role"] for message in found]
        n_old = max((i + 1 for i, role in enumerate(roles) if role == "assistant"), default=0)
        return Turn(text + "a:", tuple(spans[n_old:]), tuple(roles[n_old:]))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template above, in a vocabulary that knows its control token in a text."""
    plain = FakeVocab.tokenize

    def tokenize(self: Any, text: str | bytes, **options: Any) -> Any:
        data = text.encode("ascii", "replace") if isinstance(text, str) else text
        ids = [plain(self, piece) for piece in data.split(b"<end>")]
        parts = [part for piece in ids for part in (piece, np.array([END], np.int32))]
        return np.concatenate(parts[:-1])

    monkeypatch.setattr(FakeVocab, "tokenize", tokenize)
    monkeypatch.setattr(core, "ChatTemplate", WholeTemplate)
    monkeypatch.setattr(FakeSampler, "sample", lambda self, logits: SAID.pop(0))


@pytest.fixture(params=[None, "notes"])
def ws(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workspace]:
    with engine_on(tmp_path / "data", **OPTIONS) as engine, engine.workspace(request.param) as workspace:
        yield workspace


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def words(n: int, seed: int) -> str:
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z"), n)
    return "".join(map(chr, letters))


class Chat:
    """A conversation that is passed as a whole list each time; answers have 120 characters."""

    def __init__(self, ws: Workspace) -> None:
        self.ws = ws
        self.model = engine_of(ws).model
        self.messages: list[dict[str, str]] = [{"role": "system", "content": words(90, 99)}]

    def ask(self, question: str, *, answer: str = "") -> Any:
        """Checks that the model evaluated what the result says, and that the list is the history."""
        before, n_batches = self.ws.n_tokens, len(self.model.batches)
        self.messages.append(user(question))
        said = answer or words(120, len(self.messages))
        SAID[:] = [*(ord(c) - 32 for c in said), END]
        result = self.ws.chat(self.messages, sampling=GREEDY).result()
        assert result.text == said
        replayed = sum(not report.noop for report in result.recalls) * result.n_query
        evaluated = sum(len(batch) for batch in self.model.batches[n_batches:])
        assert evaluated == result.n_evaluated + replayed + result.n_generated
        assert result.n_prompt + result.n_generated == self.ws.n_tokens
        text = WholeTemplate().turn("", messages_of(self.messages)).text
        held = FakeVocab().detokenize(self.ws.history()).decode()
        assert held == text + result.text + "<end>"
        assert before >= result.n_cached
        self.messages.append({"role": "assistant", "content": result.text})
        return result


def engine_of(ws: Workspace) -> Engine:
    return ws._engine  # type: ignore[return-value]


def new(question: str) -> int:
    """Tokens of a question and the template around it."""
    return len("u:" + question + "a:") + 1


def test_a_list_that_grows_is_read_once(ws: Workspace) -> None:
    chat = Chat(ws)
    first = chat.ask(words(200, 0))
    assert (first.n_cached, first.n_carried) == (0, 0)
    for i in range(1, N_TURNS):
        question, held = words(50 + 10 * i, i), ws.n_tokens
        result = chat.ask(question)
        assert (result.n_cached, result.n_carried, result.n_evaluated) == (held, 0, new(question))
        assert result.n_query == len(question + "a:") + 1
    assert any(result.recalls for result in [chat.ask("and?")])


def test_an_edited_last_message_is_evaluated_as_a_whole(ws: Workspace) -> None:
    chat = Chat(ws)
    for i in range(N_TURNS):
        chat.ask(words(100, i))
    held, last = ws.n_tokens, chat.messages[-2:]
    del chat.messages[-2:]
    edited = last[0]["content"][:40] + words(70, 77)
    result = chat.ask(edited)
    assert result.n_cached == held - len(last[0]["content"] + last[1]["content"] + "a:") - 2
    assert result.n_evaluated == result.n_query == len(edited + "a:") + 1 and result.n_carried == 0
    again = chat.ask("next")
    assert again.n_evaluated == new("next")


def test_a_reminder_in_an_old_message_costs_its_own_tokens(ws: Workspace) -> None:
    chat = Chat(ws)
    for i in range(N_TURNS):
        chat.ask(words(100, i))
        if i % 3 == 2:
            held = ws.n_tokens
            chat.messages[2 * i - 3]["content"] += "(" + words(30, 50 + i) + ")"
            question = words(60, 70 + i)
            result = chat.ask(question)
            assert result.n_evaluated == new(question) + 32
            assert result.n_cached + result.n_carried == held and result.n_carried > 100


def test_stripped_reasoning_costs_nothing(ws: Workspace) -> None:
    chat = Chat(ws)
    for i in range(N_TURNS):
        question = words(100, i)
        thought = "<think>" + words(80, 40 + i) + "</think>"
        held = ws.n_tokens
        result = chat.ask(question, answer=thought + words(100, 20 + i))
        if i:
            assert result.n_evaluated == new(question)
            assert result.n_cached + result.n_carried == held - len(thought)
        chat.messages[-1]["content"] = result.text.removeprefix(thought)


def test_short_spans_between_changes_count_as_changed(ws: Workspace) -> None:
    chat = Chat(ws)
    for i in range(4):
        chat.ask(words(100, i))
    held = ws.n_tokens
    content = chat.messages[1]["content"]
    chat.messages[1]["content"] = "X" + content[1:40] + "Y" + content[41:]
    result = chat.ask("so?")
    assert result.n_evaluated == new("so?") + 41 and result.n_carried == held - result.n_cached - 41


def test_an_old_list_again_answers_it_again(ws: Workspace) -> None:
    chat = Chat(ws)
    for i in range(3):
        chat.ask(words(100, i))
    result = chat.ask("what?")
    del chat.messages[-2:]
    again = chat.ask("what?")
    assert again.n_cached == result.n_cached + result.n_read and again.n_evaluated == result.n_query


def test_only_the_query_of_a_long_message_is_evaluated_again(tmp_path: Path) -> None:
    options = OPTIONS | {"n_query": 100, "query_long": "newest"}
    with engine_on(tmp_path / "data", **options) as engine, engine.workspace("notes") as ws:
        chat = Chat(ws)
        chat.ask("first")
        long = words(900, 1)
        result = chat.ask(long)
        assert (result.n_query, result.n_evaluated) == (100 + len("a:") + 1, new(long))
        del chat.messages[-2:]
        again = chat.ask(long)
        assert again.n_evaluated == again.n_query == result.n_query and again.n_carried == 800
        assert [b.start for b in again.recalls[0].blocks] == [b.start for b in result.recalls[0].blocks]
        del chat.messages[-2:]
        edited = chat.ask(long[:500] + "!" + long[501:])
        assert edited.n_evaluated == 1 + edited.n_query and edited.n_carried == 799


def test_a_durable_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with engine_on(folder, **OPTIONS) as engine, engine.workspace("notes") as ws:
        chat = Chat(ws)
        for i in range(4):
            chat.ask(words(100, i))
        chat.messages[1]["content"] += words(20, 50)
        chat.ask("so?")
        messages, held = chat.messages, ws.n_tokens
    with engine_on(folder, **OPTIONS) as engine, engine.workspace("notes") as ws:
        chat = Chat(ws)
        chat.messages = messages
        result = chat.ask("and?")
        assert result.n_cached == held and result.n_evaluated == new("and?")
        turn = ws.ask("then?", sampling=GREEDY, max_tokens=0).result()
        assert turn.n_cached == held + new("and?") + result.n_generated


def test_the_system_prompt_of_the_workspace_comes_first(tmp_path: Path) -> None:
    with engine_on(tmp_path / "data") as engine, engine.workspace(system="be brief") as ws:
        ws.chat([user("why?")], sampling=GREEDY, max_tokens=0).result()
        assert FakeVocab().detokenize(ws.history()) == b"s:be brief<end>u:why?<end>a:"
        ws.chat([{"role": "system", "content": "x"}, user("why?")], sampling=GREEDY, max_tokens=0).result()
        assert FakeVocab().detokenize(ws.history()) == b"s:x<end>u:why?<end>a:"


def seen(ws: Workspace) -> list[tuple[str, str]]:
    return [(turn.question, turn.answer) for turn in ws.turns()]


def list_of(*said: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]


def answered(ws: Workspace, messages: list[dict[str, str]], answer: str, **options: Any) -> None:
    SAID[:] = [*(ord(c) - 32 for c in answer), END]
    ws.chat(messages, sampling=GREEDY, **options).result()


def test_each_answer_of_a_list_is_a_turn_that_can_be_taken_back(tmp_path: Path) -> None:
    folder, system = tmp_path / "data", {"role": "system", "content": "brief"}
    with engine_on(folder, **OPTIONS) as engine, engine.workspace("notes") as ws:
        answered(ws, [system, *list_of("who", "me", "what", "that", "why")], "so")
        whole = ws.turns()
        assert seen(ws) == [("who", "me"), ("what", "that"), ("why", "so")]
        assert [turn.start for turn in whole] == [0, whole[0].end, whole[1].end]
        assert whole[-1].end == ws.n_tokens
        ws.truncate(whole[1].start)
        assert ws.turns() == whole[:1]
        answered(ws, [system, *list_of("who", "me", "then")], "now")
        assert seen(ws) == [("who", "me"), ("then", "now")]
        answered(ws, [system, *list_of("who", "me", "then")], "again")
        live = ws.turns()
        assert seen(ws) == [("who", "me"), ("then", "again")] and live[1].start == live[0].end
    with engine_on(folder, **OPTIONS) as engine, engine.workspace("notes") as ws:
        assert ws.turns() == live
        ws.truncate(live[1].start)
        assert ws.turns() == live[:1]
        ws.truncate(live[0].answer_start + 1)
        assert seen(ws) == [("who", "m")]


EDITS = (
    list_of("who", "me", "whatever it is", "that", "why"),  # another end of a question
    list_of("who", "mine", "what is it", "that", "why"),  # another answer
    list_of("how", "me", "what is it", "that", "why"),
    list_of("who", "me", "what is it", "that", "why", "so", "and"),
    list_of("who", "me", "what is it", "it", "x" * 90, "that", "why"),
    list_of("who", "me", "what is it"),
    list_of("who"),
)


@pytest.mark.parametrize("edited", EDITS)
@pytest.mark.parametrize("cut", [0, 2])
def test_a_list_that_differs_leaves_its_own_turns(edited: Any, cut: int, tmp_path: Path) -> None:
    folder, first = tmp_path / "data", list_of("who", "me", "what is it", "that", "why")
    with engine_on(folder, **OPTIONS) as engine, engine.workspace("notes") as ws:
        for n in (1, 3, 5):
            answered(ws, first[:n], (*("me", "that"), "so")[n // 2], max_tokens=cut if cut else -1)
        answered(ws, edited, "yes")
        live = ws.turns()
        said = [message["content"] for message in edited] + ["yes"]
        assert seen(ws) == list(zip(said[::2], said[1::2], strict=True))
        assert live[0].start == 0
        assert [turn.start for turn in live[1:]] == [turn.end for turn in live[:-1]]
    with engine_on(folder, **OPTIONS) as engine, engine.workspace("notes") as ws:
        assert ws.turns() == live


def test_a_store_gives_back_the_turns_that_there_were(tmp_path: Path) -> None:
    """Lists, questions, texts and cuts at random; every other time the workspace is opened again."""
    rng = np.random.default_rng(4)
    folder, said = tmp_path / "data", list_of(*(words(6, i) for i in range(9)))
    with engine_on(folder, **OPTIONS) as engine:
        ws = engine.workspace("notes")
        for i in range(60):
            n = ws.n_tokens
            match rng.integers(6):
                case 0:
                    ws.truncate(int(rng.integers(n + 1)))
                case 1 if ws.turns():
                    ws.truncate(ws.turns()[-1].start)
                case 2:
                    ws.add(words(7, i)).result()
                case _:
                    at = int(rng.integers(9))
                    said[at] = said[at] | {"content": words(int(rng.integers(2, 12)), i)}
                    answered(
                        ws,
                        said[: 1 + 2 * int(rng.integers(5))],
                        words(5, i),
                        max_tokens=int(rng.integers(1, 9)),
                    )
            live, n = ws.turns(), ws.n_tokens
            edges = [0, *(edge for turn in live for edge in (turn.start, turn.answer_start, turn.end)), n]
            assert edges == sorted(edges)
            if i % 2:
                ws.close()
                ws = engine.workspace("notes")
                assert ws.turns() == live


def test_the_last_of_several_messages_is_the_question(ws: Workspace) -> None:
    answered(ws, [user("one"), user("two"), *list_of("three", "so", "four")], "yes")
    assert seen(ws) == [("three", "so"), ("four", "yes")] and ws.turns()[0].start == 0
    ws.add("a text").result()
    n = ws.n_tokens
    SAID[:] = [END]
    ws.prompt(ws.history().tolist() + FakeVocab().tokenize("u:five<end>a:").tolist()).result()
    assert len(ws.turns()) == 2 and n < ws.n_tokens  # it was no chat


@pytest.mark.parametrize(
    "bad",
    [
        [],
        ["hi"],
        [None],
        [user("?"), {"role": "assistant", "content": "!"}],
        [{"content": "?"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image"}]}],
    ],
)
def test_messages_that_cannot_be_answered_are_refused(bad: list[Any]) -> None:
    with pytest.raises(InputError):
        messages_of(bad)


def test_contents_may_be_lists_of_texts_or_missing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    empty = {"role": "assistant", "content": None}
    found = messages_of([user("?"), empty, {"role": "user", "content": parts}])
    assert found == [user("?"), {"role": "assistant", "content": ""}, {"role": "user", "content": parts}]
    assert messages_of([Message("user", "a\ud800")]) == [user("a?")]


def ids(text: str) -> Any:
    return FakeVocab().tokenize(text)


def sampled(text: str) -> Any:
    """Other tokens with the same bytes: 94 and 95 stand for a space and an exclamation mark, too."""
    found = ids(text)
    return np.where(found == 0, 94, np.where(found == 1, 95, found)).astype(np.int32)


WHOLE = "s:be brief<end>u:hi ! ! there<end>a:so ! !<end>u:what ! now<end>a:"
TURN = Turn(WHOLE, ((WHOLE.index("what"), WHOLE.index("<end>a:", 40)),))


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        ("", ()),
        (WHOLE[:44], (0, 1)),  # it ends with the first half of what stands for a control token
        ("other<end>u:hi ! ! there<end>a:so ! !", (1, 2)),
        (WHOLE + "more ! !", (0, 1, 2, 3)),
        (WHOLE.replace("hi", "ho"), (0, 2, 3)),
    ],
)
def test_stored_ids_are_used_where_the_bytes_are_equal(stored: str, kept: tuple[int, ...]) -> None:
    vocab: Any = FakeVocab()
    found = tokenize_messages(vocab, TURN, sampled(stored))
    pieces = [sampled(piece) if i in kept else ids(piece) for i, piece in enumerate(WHOLE.split("<end>"))]
    expected = [part for piece in pieces for part in (piece, [END])][:-1]
    assert np.array_equal(found.tokens, np.concatenate(expected))
    plain = tokenize_turn(vocab, WHOLE, TURN.spans)
    assert found.question == plain.question and np.array_equal(found.scored, plain.scored)


def test_a_tools_text_is_not_a_users() -> None:
    vocab: Any = FakeVocab()
    messages = messages_of([user("hi"), {"role": "assistant", "content": "so"}, user("do it")])
    turn = WholeTemplate().turn("", messages)
    assert user_marks(vocab, turn, ids(turn.text)) is None
    messages.append({"role": "tool", "content": "done", "tool_call_id": "1"})
    turn = WholeTemplate().turn("", messages)
    tokens = tokenize_messages(vocab, turn, ids("")).tokens
    marks = user_marks(vocab, turn, tokens)
    assert marks is not None and vocab.detokenize(tokens[marks]) == b"do it"


def test_bos_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_model.FakeVocab, "bos", 7)
    monkeypatch.setattr(fake_model.FakeVocab, "add_bos", True)
    plain = FakeVocab.tokenize

    def tokenize(self: Any, text: Any, *, add_bos: bool = False, **options: Any) -> Any:
        found = plain(self, text, **options)
        return np.concatenate([np.array([7], np.int32), found]) if add_bos else found

    monkeypatch.setattr(FakeVocab, "tokenize", tokenize)
    vocab: Any = FakeVocab()
    stored = np.concatenate([[7], sampled(WHOLE[:30])]).astype(np.int32)
    for held in (stored, stored[:0], stored[1:]):
        found = tokenize_messages(vocab, TURN, held)
        assert found.tokens[0] == 7 and vocab.detokenize(found.tokens[1:]).decode() == WHOLE
        assert not found.scored[0]
    kept = tokenize_messages(vocab, TURN, stored).tokens
    assert np.array_equal(kept[: len("s:be brief<end>") - 3], stored[: len("s:be brief<end>") - 3])
