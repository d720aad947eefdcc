"""A recorded session of a coding agent, turn by turn, through a server whose view is much smaller than it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import ROOT, fast_folder, say

sys.path.insert(0, str(ROOT / "tests" / "compat"))

from servers import AGENT_FLAGS, Request, Server, in_here, our_server

TURNS = ("01", "05", "10", "20", "29")
N_SECOND = 2  # turns of the session in between
RUNS = ((0, 1), (2,), (3, 4))  # turns of each server; between them it is ended and started again
VIEW = 4096
SLACK = 64  # tokens that may be evaluated again where an answer of the recording replaces ours
N_QUERY = 256  # tokens: more than the last message of any turn, which is evaluated for every answer
N_ANSWER = 16
PATIENCE = 600.0  # seconds for the next line of a stream


@dataclass
class Session:
    """One conversation. read: tokens of the prompt of its last turn."""

    name: str
    bodies: list[dict[str, Any]]
    read: list[int]


def run(model: Path) -> None:
    data = os.environ.get("KVMEM_TEST_DATA", "")
    if not data:
        say("left out: KVMEM_TEST_DATA does not name the folder of the recorded session")
        return
    bodies = [json.loads((Path(data) / f"agentic_code_{turn}.json").read_text()) for turn in TURNS]

    first, second = Session("first", bodies, []), Session("second", [_other(b) for b in bodies], [])
    with fast_folder() as folder:
        for turns in RUNS:
            with _served(model, folder) as server:
                for i in turns:
                    _turn(server, first, i)
                    _title(server, i)
                    if i < N_SECOND:
                        _turn(server, second, i)
                        _title(server, i)
                _again(server, first, turns[-1])


@contextmanager
def _served(model: Path, folder: Path) -> Iterator[Server]:
    flags = ["-c", str(VIEW), "--kv-unified", "-ctk", "f16", "-ctv", "f16", *in_here(AGENT_FLAGS)]
    with our_server(model, folder, *flags) as server:
        server.client.timeout = PATIENCE
        yield server


def _other(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same turn of a session in another project: not one token at the beginning is the same."""
    system, *more = body["messages"]
    return {**body, "messages": [{**system, "content": "Another project. " + system["content"]}, *more]}


def _turn(server: Server, session: Session, i: int) -> None:
    """Asks for a turn; AssertionError if more than what is new was evaluated."""
    body = session.bodies[i]
    prompt = _prompt(server, body)
    n_known = _common(session.read, prompt)
    usage, memory = _answer(server, body)
    n, n_cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    say(
        f"{session.name}, turn {TURNS[i]}: {n:,} tokens, {n - n_known:,} new, {n - n_cached:,} evaluated, "
        f"{n_cached:,} cached, {len(memory['recalls'])} recalls"
    )
    assert n == len(prompt), (n, len(prompt))
    assert n_cached >= n_known - SLACK, (n_cached, n_known)
    assert i == 0 or memory["recalls"] or n <= VIEW
    session.read = prompt


def _again(server: Server, session: Session, i: int) -> None:
    """A turn once more: nothing is new, only its query is evaluated."""
    usage, _ = _answer(server, session.bodies[i])
    n, n_cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    say(f"{session.name}, turn {TURNS[i]} again: {n - n_cached:,} of {n:,} tokens evaluated")
    assert n - n_cached <= N_QUERY


def _title(server: Server, i: int) -> None:
    """What agents ask in between."""
    messages = [
        {"role": "system", "content": "Write a title of at most five words for what the user asks."},
        {"role": "user", "content": f"Refactor part {i} of the parser and run its tests."},
    ]
    answer = server.ask(
        Request("title", "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8})
    )
    assert answer.status == 200, answer.body


def _prompt(server: Server, body: Mapping[str, Any]) -> list[int]:
    """The tokens of the prompt that the server makes of a request."""
    text = server.client.post("/apply-template", json=body).json()["prompt"]
    found = server.client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    tokens: list[int] = found
    return tokens


def _answer(server: Server, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Usage and memory of a streamed answer; AssertionError for an error, also in the stream."""
    wanted = {**body, "max_tokens": N_ANSWER, "stream": True, "kvmem": {"report": True}}
    usage: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    n_pieces = 0
    with server.client.stream("POST", "/v1/chat/completions", json=wanted) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                usage, memory = event.get("usage") or usage, event.get("kvmem") or memory
                n_pieces += bool(event["choices"])
    assert n_pieces > 1, "nothing was streamed"
    return usage, memory


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
