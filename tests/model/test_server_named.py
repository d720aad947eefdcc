"""A workspace that a client has named: what goes on with it, what comes after it, and what is read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_run import ServerRun, settings_of

from kvmem_llama.server import histories

Message = dict[str, str]
SYSTEM = {"role": "system", "content": "Speak like a sailor."}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRun]:
    with ServerRun(settings_of(smollm2, tmp_path_factory.mktemp("named"), n_ctx=2048)) as run:
        yield run


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(run: ServerRun, name: str, *messages: Message, n: int = 12) -> tuple[Message, dict[str, Any]]:
    """The answer, and what the report says of the memory."""
    whole = run.post(
        "/v1/chat/completions", messages=messages, max_tokens=n, kvmem={"workspace": name, "report": True}
    )
    said: Message = whole["choices"][0]["message"]
    return {"role": "assistant", "content": said["content"]}, whole["kvmem"]


def text_of(run: ServerRun, name: str) -> str:
    rows = run.client.get(f"/kvmem/v1/workspaces/{name}/blocks", params={"text": True}).json()
    return "".join(block["text"] for block in rows["blocks"])


def test_a_short_message_without_its_past_comes_after_it(server: ServerRun) -> None:
    first, _ = ask(server, "short", user("Tell me a story."))
    _, report = ask(server, "short", user("And?"))
    assert report["n_cached"] > 40
    held = text_of(server, "short")
    assert held.index("Tell me a story.") < held.index(first["content"]) < held.index("And?")
    assert held.count("<|im_start|>system") == 1


def test_a_conversation_after_a_text_is_not_read_again_with_every_message(server: ServerRun) -> None:
    server.post("/completion", prompt="A list of ships. " * 30, n_predict=4, kvmem={"workspace": "ships"})
    talk = [user("Which ships are there, and where do they sail?")]
    n_evaluated = []
    for question in ("And the harbour?", "Who is the captain?", "How many sails does it have?", ""):
        answer, report = ask(server, "ships", *talk)
        n_evaluated.append(report["n_evaluated"])
        talk += [answer, user(question)]
    assert max(n_evaluated[1:]) < 30
    held = text_of(server, "ships")
    assert held.startswith("A list of ships.") and held.count("Which ships are there") == 1
    assert [held.count(message["content"]) for message in talk[2:-1:2]] == [1, 1, 1]


def test_a_model_whose_texts_begin_with_a_token_has_it_at_the_beginning_only(
    gemma3: Path, tmp_path: Path
) -> None:
    settings = settings_of(gemma3, tmp_path, n_ctx=512, chat_template="gemma", jinja=False)
    with ServerRun(settings) as run:
        run.post("/completion", prompt="Ships of the north.", n_predict=2, kvmem={"workspace": "w"})
        talk = [user("Hi")]
        for question in ("Go on.", "Go on.", ""):
            answer, report = ask(run, "w", *talk, n=4)
            assert report["n_evaluated"] < 16
            talk += [answer, user(question)]
        held = text_of(run, "w")
        assert held.count("<bos>") <= 1 and held.count("Hi<end_of_turn>") == 1
        assert held.count("<start_of_turn>user") == 3


def test_a_message_in_between_costs_one_reading_of_the_conversation_and_loses_nothing(
    server: ServerRun,
) -> None:
    talk = [user("Where is the river, and how wide is it in the summer?")]
    answer, _ = ask(server, "between", *talk)
    talk += [answer, user("And in winter?")]
    ask(server, "between", user("Give this talk a title."))
    answer, again = ask(server, "between", *talk)
    assert again["n_evaluated"] > 50
    talk += [answer, user("And at night?")]
    answer, report = ask(server, "between", *talk)
    assert report["n_evaluated"] < 30
    talk += [answer, user("Why?")]
    assert ask(server, "between", *talk)[1]["n_evaluated"] < 30
    assert "Give this talk a title." in text_of(server, "between")


def test_a_name_is_the_same_in_every_form_of_its_letters(server: ServerRun) -> None:
    ask(server, "cafe\u0301", user("Good morning to you."))
    _, report = ask(server, "caf\xe9", user("And to you."))
    assert report["n_cached"] > 30
    answer = server.client.post("/kvmem/v1/workspaces/cafe\u0301/search", json={"query": "morning"})
    assert answer.status_code == 200


def test_a_date_at_the_beginning_costs_only_itself(server: ServerRun) -> None:
    text = " ".join(f"{i} sheep went over hill {i * 7 % 91}." for i in range(105))
    for day, most in (("Monday", 2000), ("Tuesday", 200)):
        system = {"role": "system", "content": f"It is {day}. {text}"}
        body = {"messages": [system, user("How many sheep went?")], "max_tokens": 4}
        timings = server.post("/v1/chat/completions", **body)["timings"]
        assert timings["prompt_n"] < most
    assert timings["cache_n"] > 900


def test_who_asks_again_after_going_away_waits_for_what_is_read(server: ServerRun) -> None:
    prompt = " ".join(f"{i} boats lay in harbour {i * 7 % 91}." for i in range(90))
    lines = server.lines("/completion", prompt=prompt, n_predict=4, return_progress=True)
    for _ in range(4):
        assert "prompt_progress" in next(lines)
    lines.close()  # type: ignore[attr-defined]
    timings = server.post("/completion", prompt=prompt, n_predict=4)["timings"]
    assert timings["cache_n"] > 250


def test_a_read_that_was_interrupted_goes_on_after_a_restart(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MIN_STORED", 256)
    settings = settings_of(smollm2, tmp_path, n_ctx=512, commit_blocks=4)
    prompt = " ".join(f"{i} sheep went over the hill." for i in range(140))
    body = {"prompt": prompt, "n_predict": 1}
    with ServerRun(settings) as run:
        lines = run.lines("/completion", return_progress=True, **body)
        for _ in range(6):
            assert "prompt_progress" in next(lines)
        lines.close()  # type: ignore[attr-defined]
    with ServerRun(settings) as run:
        timings = run.post("/completion", **body, kvmem={"report": True})
        assert timings["timings"]["prompt_n"] < timings["tokens_evaluated"] - 400
        rows = run.client.get("/kvmem/v1/workspaces").json()["workspaces"]
        assert [row["name"] for row in rows] == [timings["kvmem"]["workspace"]]


@pytest.mark.parametrize("n", [3, 200])
def test_what_comes_after_an_answer_comes_after_its_end(server: ServerRun, n: int) -> None:
    name = f"ends-{n}"
    ask(server, name, SYSTEM, user("Say one word."), n=n)
    ask(server, name, SYSTEM, user("Say another one."), n=n)
    ask(server, name, user("A third."), {"role": "assistant", "content": "Aye."}, user("Last."), n=n)
    held = text_of(server, name)
    assert held.count("<|im_start|>") - held.count("<|im_end|>\n<|im_start|>") == 1  # the very first one
    assert held.count("You are a helpful AI assistant") == 0
    assert held.count(SYSTEM["content"]) == 2
