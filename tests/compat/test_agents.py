"""What coding agents send: accepted, and answered as a stock llama-server answers it.

agent_claude_code.json and agent_codex.json are requests of our own, written from the references of
Anthropic's Messages and OpenAI's Responses API in the shape that these agents send: every one is one that
the stock server takes. It refuses items of the Responses API that it has no type for (custom_tool_call,
local_shell_call, reasoning that is only encrypted) and `previous_response_id`; those are not here. The
answers of the stock server were recorded with record.py.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from comparing import HERE, allowed_differences, differences
from servers import (
    AGENT_FLAGS,
    FLAGS,
    Answer,
    Request,
    Server,
    in_here,
    our_server,
    requests_of,
    stock_server,
)

# The reference of the Messages API has it, and clients want it; the stock server leaves it out.
BEGINNING_OF_INPUT = re.compile(r"/events/\d+/1/content_block/input")

NAMES = ("claude_code", "codex")
CASES = [(name, request) for name in NAMES for request in requests_of(HERE / f"agent_{name}.json")]


@pytest.fixture(scope="module")
def agents_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with our_server(smollm2, tmp_path_factory.mktemp("agents"), *in_here(AGENT_FLAGS)) as server:
        yield server


@pytest.fixture(scope="module")
def recorded(smollm2: Path) -> dict[str, dict[str, Answer]]:
    found = {}
    for name in NAMES:
        data = json.loads((HERE / "recorded" / f"{name}.json").read_text(encoding="utf-8"))
        pin = tomllib.loads((HERE.parents[1] / "vendor" / "pin.toml").read_text())
        assert data["flags"] == [*FLAGS, *AGENT_FLAGS], "recorded with other flags: run record.py"
        assert data["llama_cpp_commit"] == pin["llama_cpp_commit"], "run record.py"
        text = json.dumps(data["answers"]).replace("<model>", json.dumps(str(smollm2))[1:-1])
        found[name] = {id: Answer.from_json(row) for id, row in json.loads(text).items()}
    return found


def whole_counts(value: Any) -> Any:
    """`value` with tokens of prompts counted whole: the two servers keep different conversations to reuse."""
    if isinstance(value, list):
        return [whole_counts(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: whole_counts(item) for key, item in value.items()}
    if "cache_read_input_tokens" in value:
        value["input_tokens"] += value.pop("cache_read_input_tokens")
    if "cache_n" in value:
        value["prompt_n"] += value.pop("cache_n")
    value.pop("cached_tokens", None)
    return value


@pytest.mark.parametrize(("name", "request_"), CASES, ids=[f"{name}: {one.id}" for name, one in CASES])
def test_a_request_of_an_agent_is_answered_as_the_stock_server_does(
    name: str, request_: Request, agents_server: Server, recorded: dict[str, dict[str, Answer]]
) -> None:
    stock, ours = recorded[name][request_.id], agents_server.ask(request_)
    assert (stock.status, ours.status) == (200, 200)
    one, other = (Answer.from_json(whole_counts(answer.as_json())) for answer in (stock, ours))
    path = request_.path.partition("?")[0]
    rules = allowed_differences()
    found = [
        str(difference)
        for difference in differences(request_, one, other)
        if not BEGINNING_OF_INPUT.fullmatch(difference.place)
        and not any(rule.holds(path, difference.place) for rule in rules)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", NAMES)
def test_the_stock_server_takes_every_request(
    name: str, stock_program: Path, smollm2: Path, tmp_path: Path, recorded: dict[str, dict[str, Answer]]
) -> None:
    with stock_server(stock_program, smollm2, tmp_path, *in_here(AGENT_FLAGS)) as server:
        answers = {one.id: server.ask(one) for one in requests_of(HERE / f"agent_{name}.json")}
    assert list(answers) == list(recorded[name])
    assert {id: answer.status for id, answer in answers.items()} == dict.fromkeys(answers, 200)


def test_tokens_are_counted_while_an_answer_is_written(agents_server: Server) -> None:
    """Agents count a dozen prompts at once; it needs no slot and leaves no trace."""
    requests = {one.id: one for name, one in CASES if name == "claude_code"}
    counts = [requests[id] for id in ("count the tools", "count the system prompt", "count the conversation")]
    turn = requests["result of a tool"]
    before = agents_server.client.get("/kvmem/v1/workspaces").json()
    with (
        ThreadPoolExecutor(13) as pool,
        agents_server.client.stream(
            "POST",
            "/completion",
            json={"prompt": "Once", "n_predict": 100, "ignore_eos": True, "stream": True},
        ) as story,
    ):
        lines = story.iter_lines()
        next(lines)
        found = list(pool.map(agents_server.ask, counts * 4))
        assert "data" in next(line for line in lines if line)  # it goes on
    assert [answer.status for answer in found] == [200] * 12
    for i, request in enumerate(counts):
        assert {answer.body["input_tokens"] for answer in found[i::3]} == {found[i].body["input_tokens"]}
        assert found[i].body["input_tokens"] > 50, request.id
    assert agents_server.client.get("/kvmem/v1/workspaces").json() == before
    assert agents_server.ask(turn).status == 200


def test_a_conversation_of_an_agent_is_read_once(agents_server: Server) -> None:
    """Each turn sends all of the conversation; only what is new is evaluated."""
    requests = {one.id: one for name, one in CASES if name == "claude_code"}
    ids = ("first turn, with thoughts", "result of a tool", "two results, one an error")
    usages = [events_of_usage(agents_server.ask(requests[id])) for id in (*ids, *ids)]
    again = usages[len(ids) :]
    assert all(usage["input_tokens"] < 64 < usage["cache_read_input_tokens"] for usage in again), again


def events_of_usage(answer: Answer) -> dict[str, int]:
    assert answer.events is not None
    usage: dict[str, int] = answer.events[0][1]["message"]["usage"]
    return usage
