"""A thousand bodies that are no requests: each is answered with the error object and a status of 4xx."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fuzzing import fuzz
from servers import Server

ROUTES = {  # and a body that would be good
    "/completion": {"prompt": "a", "n_predict": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses/input_tokens": {"input": "a"},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
    "/kvmem/v1/workspaces/w/fork": {"name": "a"},
    "/kvmem/v1/workspaces/w/search": {"query": "a"},
    "/kvmem/v1/workspaces/w/pin": {"start": 0, "end": 1, "a": "a"},
    "/slots/1?action=save": {"filename": "a"},
}
N_BODIES = 1000

WRONG: list[Any] = [
    5, -1, 1e300, True, "x", [], {}, [[]], [None], {"a": 1}, [{"role": 5}], [{"role": "user"}], [5, {}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}], [[1, "a", {}]],
]  # fmt: skip
NEEDED = {"prompt", "messages", "input", "content", "tokens", "name", "query", "start", "filename"}


def broken(random_: random.Random, good: bytes) -> Iterator[bytes]:
    """Bytes that are no JSON."""
    yield good[: random_.randrange(len(good))]
    yield good + random_.choice([b"}", b"x", b"{}", b","])
    yield good.replace(b'"', random_.choice([b"'", b"", b"\x00"]), random_.randrange(1, 4))
    yield good.replace(
        b'"a"', random_.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"1" * 5000])
    )
    yield good.replace(
        b'"a"', random_.choice([b'"\xff"', b'"\xc3"', b'"\\ud800"', b'"\\x"', b'"\n"', b'"\x01"'])
    )
    yield good.decode().encode(random_.choice(["utf-16", "utf-32"]))
    depth = random_.choice([100, 1000, 100_000])
    yield good.replace(
        b'"a"', random_.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
    )
    yield random_.randbytes(random_.randrange(1, 200))
    yield random_.choice([b"", b" ", b"null", b"5", b'"a"', b"[]", b"[1]", b"true", b"\xef\xbb\xbf"])


def wrong_types(random_: random.Random, route: str) -> bytes | None:
    """A body without what the route needs, or with something else in its place."""
    body: dict[str, Any] = json.loads(json.dumps(ROUTES[route]))
    name = next(name for name in body if name in NEEDED)
    body[name] = random_.choice(WRONG)
    return json.dumps(body).encode()


def bodies() -> Iterator[tuple[str, bytes]]:
    random_ = random.Random(7)
    routes = list(ROUTES)
    for i in range(N_BODIES):
        route = routes[i % len(routes)]
        choices = list(broken(random_, json.dumps(ROUTES[route]).encode()))
        yield route, choices[i % len(choices)]


def test_a_thousand_malformed_bodies_are_told_what_is_wrong(ours: Server) -> None:
    types = set()
    for route, body in bodies():
        answer = ours.client.post(route, content=body, headers={"content-type": "application/json"})
        good = json.dumps(ROUTES[route]).encode()
        if body == good or json_equal(body, good):
            continue
        assert 400 <= answer.status_code < 500, (route, body[:200], answer.text)
        error = answer.json()["error"]
        assert error["code"] == answer.status_code and error["message"], (route, body[:200])
        types.add(error["type"])
    assert types <= {"invalid_request_error", "not_found_error"}
    assert ours.client.get("/health").status_code == 200
    assert not any(slot["is_processing"] for slot in ours.client.get("/slots").json())


def test_values_of_another_type_never_break_the_server(ours: Server) -> None:
    """Some of them are good requests; what is not is a 4xx."""
    random_ = random.Random(8)
    for i in range(150):
        route = list(ROUTES)[i % len(ROUTES)]
        body = wrong_types(random_, route)
        answer = ours.client.post(route, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (route, body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == answer.status_code


def json_equal(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def test_a_body_without_end_is_a_400(ours: Server) -> None:
    """The client goes away in the middle of its body; the server goes on."""
    import socket

    with socket.create_connection(("127.0.0.1", ours.port)) as raw:
        raw.sendall(
            b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"content": "a'
        )
    assert ours.client.get("/health").status_code == 200


def test_schemathesis_finds_no_server_error(ours: Server) -> None:
    pytest.importorskip("schemathesis")
    fuzz(ours, seconds=60, patience=120)
