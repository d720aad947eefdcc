"""Answers of the server over the real model: every API, streams, disconnects, histories beyond the window."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from families import FOLDER
from server_run import ServerRun, settings_of

from kvmem_llama.server import histories

USER = {"role": "user", "content": "Say hi."}
WORDS = ("river", "lantern", "copper", "orchard", "velvet", "harbour", "thistle", "granite")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}
TEMPLATE = FOLDER / "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja"
"""It renders tools; the small model's own does not."""


def text(n: int, seed: int) -> str:
    return " ".join(f"{WORDS[(i * 7 + seed) % len(WORDS)]} {i * seed % 97}" for i in range(n))


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerRun]:
    folder = tmp_path_factory.mktemp("server")
    template = str(TEMPLATE) if TEMPLATE.exists() else ""
    settings = settings_of(smollm2, folder / "data", chat_template_file=template, n_ctx=768)
    with ServerRun(settings, alias="smol", slot_save_path=str(folder / "slots")) as run:
        yield run


def events(lines: Iterator[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def chat(run: ServerRun, *messages: dict[str, Any], **body: Any) -> Any:
    return run.post("/v1/chat/completions", messages=list(messages), **body)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_stream_adds_up_to_the_answer_as_a_whole(server: ServerRun) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 12, "return_tokens": True, "n_probs": 2}
    whole = server.post("/completion", **body)
    parts = events(server.lines("/completion", **body))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["tokens_predicted"] for part in parts] == [*range(1, 13), 12]
    assert len(whole["completion_probabilities"]) == 12
    assert (parts[-1]["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 12)
    assert parts[-1]["timings"]["cache_n"] == whole["tokens_evaluated"] - 1


def test_the_same_chat_through_every_api(server: ServerRun) -> None:
    whole = chat(server, USER, max_tokens=8)
    said = whole["choices"][0]["message"]["content"]
    assert said
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 8)

    lines = list(server.lines("/v1/chat/completions", messages=[USER], max_tokens=8))
    assert lines[-1] == "data: [DONE]"
    deltas = [event["choices"][0]["delta"] for event in events(iter(lines))]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == said

    message = server.post("/v1/messages", messages=[USER], max_tokens=8)
    assert message["content"] == [{"type": "text", "text": said}]
    assert message["stop_reason"] == "max_tokens"
    names = [
        line[7:] for line in server.lines("/v1/messages", messages=[USER], max_tokens=8) if line[0] == "e"
    ]
    assert (names[0], names[1], names[-1]) == ("message_start", "content_block_start", "message_stop")

    response = server.post("/v1/responses", input="Say hi.", max_output_tokens=8)
    assert response["output"][0]["content"][0]["text"] == said
    done = events(server.lines("/v1/responses", input="Say hi.", max_output_tokens=8))
    assert [event["type"] for event in (done[0], done[-1])] == ["response.created", "response.completed"]
    assert done[-1]["response"]["usage"]["output_tokens"] == 8


def test_the_official_clients_understand_it(server: ServerRun) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    oai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    said = oai.chat.completions.create(model="smol", messages=[USER], max_tokens=8).choices[0].message.content
    chunks = oai.chat.completions.create(model="smol", messages=[USER], max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
    assert oai.responses.create(model="smol", input="Say hi.", max_output_tokens=16).output_text.startswith(
        said
    )
    assert oai.completions.create(model="smol", prompt="Once", max_tokens=4).choices[0].text
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    with claude.messages.stream(model="smol", messages=[USER], max_tokens=8) as stream:
        assert stream.get_final_text() == said


@pytest.mark.skipif(not TEMPLATE.exists(), reason="llama.cpp's source is not here")
def test_a_tool_that_must_be_called_is_called(server: ServerRun) -> None:
    body = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    before: list[dict[str, Any]] = []  # without examples the small model talks instead
    for number, city in enumerate(("Oslo", "Rome")):
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        made = {"id": f"call{number}", "type": "function", "function": function}
        before += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": "rain"},
            {"role": "assistant", "content": "It rains."},
        ]
    asked = [*before, {"role": "user", "content": "Weather in Oslo?"}]
    choice = chat(server, *asked, **body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    parts = [
        part
        for event in events(server.lines("/v1/chat/completions", messages=asked, **body))
        for part in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert parts[0]["function"]["name"] == "get_weather"
    arguments = "".join(part["function"].get("arguments", "") for part in parts)
    assert json.loads(arguments) == json.loads(call["function"]["arguments"])
    answer = {"role": "assistant", "content": None, "tool_calls": choice["message"]["tool_calls"]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
    body["tool_choice"] = "auto"
    after = chat(server, *asked, answer, result, **body | {"max_tokens": 4})["usage"]
    assert after["completion_tokens"] == 4
    assert after["prompt_tokens"] - after["prompt_tokens_details"]["cached_tokens"] < 60


def test_an_answer_keeps_to_its_schema(server: ServerRun) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    found = chat(server, USER, response_format=wanted, max_tokens=40)["choices"][0]["message"]["content"]
    assert isinstance(json.loads(found)["a"], bool)
    assert server.post("/completion", prompt="A", grammar='root ::= "yes"', n_predict=5)["content"] == "yes"


def test_several_answers_and_several_prompts(server: ServerRun) -> None:
    found = server.post("/v1/completions", prompt=["One", "Two"], n=2, max_tokens=2)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in found["choices"]]
    assert texts[0] == texts[1] and texts[2] == texts[3]  # greedy
    seeds = server.post("/completion", prompt="The", n=2, n_predict=8, temperature=1.5, seed=1)
    assert seeds[0]["content"] != seeds[1]["content"]


def test_what_ends_an_answer_is_told(server: ServerRun) -> None:
    body = {"prompt": "One two three four five six", "n_predict": 30}
    free = server.post("/completion", **body)["content"]
    word = free.split()[3]
    stopped = server.post("/completion", **body, stop=[word])
    assert stopped["content"] == free[: free.index(word)]
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    parts = events(server.lines("/completion", **body, stop=[word]))
    assert "".join(part["content"] for part in parts) == stopped["content"]
    assert (parts[-1]["stop_type"], "timings" in parts[-1]) == ("word", True)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_before_a_stream_begins(server: ServerRun, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": text(20, 3)}], "stream": stream}
    pinned = {"kvmem": {"workspace": "full"}}
    first = chat(server, {"role": "user", "content": text(140, 5)}, max_tokens=1, **pinned)
    assert first["kvmem"]["workspace"] == "full"
    with server.slots.borrow("full") as workspace:
        workspace.pin(0, 640)
    try:
        answer = server.client.post("/v1/chat/completions", json=body | pinned)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "exceed_context_size_error")
        assert error["n_ctx"] == 768
        assert error["n_prompt_tokens"] > error["n_workspace"] > 640
    finally:
        with server.slots.borrow("full") as workspace:
            workspace.unpin(0, 640)
    bad = server.client.post("/completion", json={"prompt": "a", "grammar": "root ::= (", "stream": stream})
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_client_that_goes_away_frees_its_slot(server: ServerRun) -> None:
    lines = server.lines("/completion", prompt="Count: 1 2 3", n_predict=5000)
    next(lines)
    assert server.slots.n_idle == 1
    lines.close()  # type: ignore[attr-defined]
    until(lambda: server.slots.n_idle == 2)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/completion", json={"prompt": text(200, 11), "n_predict": 1}, timeout=0.3)
    until(lambda: server.slots.n_idle == 2)
    again = server.post("/completion", prompt=text(200, 11), n_predict=1)
    assert again["timings"]["cache_n"] > 0  # what was read before it went is not read again


def test_requests_wait_for_a_slot_and_all_are_answered(server: ServerRun) -> None:
    alone = server.post("/completion", prompt="The sea", n_predict=6)["content"]
    held = [server.lines("/completion", prompt=f"Count: {i}", n_predict=4000) for i in range(2)]
    for lines in held:
        next(lines)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/completion", json={"prompt": "The sea", "n_predict": 6}, timeout=0.2)
    assert server.slots.load()[0] == 2
    for lines in held:
        lines.close()  # type: ignore[attr-defined]
    assert server.post("/completion", prompt="The sea", n_predict=6)["content"] == alone
    until(lambda: server.slots.load() == (0, 0))


def test_a_slot_is_saved_erased_and_restored(server: ServerRun) -> None:
    body = {"prompt": text(40, 7), "n_predict": 4, "id_slot": 1}
    n = server.post("/completion", **body)["tokens_evaluated"]
    saved = server.post("/slots/1?action=save", filename="a.bin")
    assert (saved["id_slot"], saved["n_saved"]) == (1, n + 4)
    assert server.post("/slots/1?action=erase")["n_erased"] == n + 4
    assert server.post("/completion", **body)["timings"]["cache_n"] == 0
    assert server.post("/slots/0?action=restore", filename="a.bin")["n_restored"] == n + 4
    assert server.post("/completion", **body | {"id_slot": 0})["timings"]["cache_n"] == n - 1
    for path, name in (("/slots/1", "../a"), ("/slots/x", "a"), ("/slots/7", "a"), ("/slots/1", "no.bin")):
        answer = server.client.post(f"{path}?action=restore", json={"filename": name})
        assert answer.status_code == 400


def test_a_slot_of_another_model_is_not_restored(server: ServerRun, gemma3: Path, tmp_path: Path) -> None:
    saved = Path(server.state.options.slot_save_path)
    with ServerRun(settings_of(gemma3, tmp_path, n_ctx=256), slot_save_path=str(saved)) as other:
        other.post("/completion", prompt=text(20, 7), n_predict=1, id_slot=1)
        other.post("/slots/1?action=save", filename="gemma.bin")
    answer = server.client.post("/slots/1?action=restore", json={"filename": "gemma.bin"})
    assert answer.status_code == 400
    server.post("/completion", prompt=[2, 5, 6], n_predict=1)


def test_what_is_in_a_slot_no_more_is_neither_saved_nor_erased(
    server: ServerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "N_IN_RAM", 1)
    server.post("/completion", prompt="Of one slot", n_predict=1, id_slot=1)
    for i in range(3):
        server.post("/completion", prompt=f"{i} of another", n_predict=1, id_slot=0)
    answer = server.client.post("/slots/1?action=save", json={"filename": "gone.bin"})
    assert answer.status_code == 400 and "holds nothing" in answer.text
    server.post("/completion", prompt="A text", n_predict=1, id_slot=1, kvmem={"workspace": "kept"})
    assert server.post("/slots/1?action=erase")["n_erased"] == 0
    assert server.client.get("/kvmem/v1/workspaces/kept").status_code == 200


def test_a_conversation_beyond_the_window_reads_only_what_is_new(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, and with other requests in between."""
    monkeypatch.setattr(histories, "MIN_STORED", 256)
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(90, 3)}]

    def turn(run: ServerRun, i: int) -> dict[str, Any]:
        question = {"role": "user", "content": f"{text(6, i + 2)}. What is number {i}?"}
        found = chat(run, *messages, question, max_tokens=4, kvmem={"report": True})
        messages.extend((question, found["choices"][0]["message"]))
        side = chat(run, {"role": "user", "content": f"Title of: {text(5, i)}"}, max_tokens=2)
        assert side["usage"]["prompt_tokens_details"]["cached_tokens"] < 60
        usage: dict[str, Any] = found["usage"]
        n_new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert n_new == found["kvmem"]["n_evaluated"]
        return {"n": usage["prompt_tokens"], "n_new": n_new, "recalls": found["kvmem"]["recalls"]}

    settings = settings_of(smollm2, tmp_path, n_ctx=256)
    with ServerRun(settings) as run:
        first = turn(run, 0)
        second = turn(run, 1)
    with ServerRun(settings) as run:
        third = turn(run, 2)
        named = chat(run, USER, max_tokens=2, kvmem={"workspace": "other"})
        assert named["kvmem"]["n_cached"] == 0
    assert first["n_new"] == first["n"] > 256
    for later in (second, third):
        assert later["n"] > first["n"]
        assert later["n_new"] < 70
        assert later["recalls"]
