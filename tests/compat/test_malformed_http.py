"""Requests that are odd beneath or beside their JSON: verbs, encodings, chunks, sizes, extreme values."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from servers import Server
from test_malformed import ROUTES

from kvmem_llama.server.schema import FIELDS

ROUTE = "/tokenize"
GOOD = b'{"content": "a"}'


@pytest.fixture(autouse=True)
def goes_on(ours: Server) -> Iterator[None]:
    """Whatever it was asked, the server answers, and no slot is left behind."""
    yield
    assert ours.client.get("/health").status_code == 200
    assert not any(slot["is_processing"] for slot in ours.client.get("/slots").json())


def raw(server: Server, data: bytes, *, ends: bool = False) -> tuple[int, bytes]:
    """Status and body of the answer to these bytes, after which the server closes; 0: there was none.

    ends: the client says that it will send no more.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
        one.sendall(data)
        if ends:
            one.shutdown(socket.SHUT_WR)
        found = b""
        while part := one.recv(65536):
            found += part
    head, _, body = found.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if found else (0, b"")


def post(*headers: bytes, body: bytes = b"", path: str = ROUTE) -> bytes:
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@pytest.mark.parametrize("verb", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "BREW", "get"])
def test_a_verb_that_a_route_does_not_have_is_not_found(ours: Server, verb: str) -> None:
    for route in ROUTES:
        answer = ours.client.request(verb, route, content=GOOD)
        assert answer.status_code == 404, (verb, route)
        assert verb == "HEAD" or answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "kind",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/json; charset=utf-16", "x" * 5000, "\u00e9/\u00e9", "application/octet-stream"],
)  # fmt: skip
def test_what_a_body_says_it_is_does_not_matter(ours: Server, kind: str) -> None:
    """As in llama-server: it is read as JSON, and is refused if it is none."""
    head = {"content-type": kind.encode("utf-8")} if kind else {}
    assert ours.client.post(ROUTE, content=GOOD, headers=head).status_code == 200  # type: ignore[arg-type]
    for body in (
        b"content=a",
        b'--x\r\nContent-Disposition: form-data; name="content"\r\n\r\na\r\n--x--\r\n',
    ):
        for route in ROUTES:
            answer = ours.client.post(route, content=body, headers=head)  # type: ignore[arg-type]
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400), route


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x"])
def test_a_compressed_body_is_no_json(ours: Server, encoding: str) -> None:
    head = {"content-encoding": encoding, "content-type": "application/json"}
    answer = ours.client.post(ROUTE, content=gzip.compress(GOOD), headers=head)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("body", "n_tokens"), [(b'{"content": 5, "content": "a"}', 1), (b'{"content": "a", "content": 5}', None)]
)
def test_of_two_fields_with_one_name_the_last_one_counts(
    ours: Server, body: bytes, n_tokens: int | None
) -> None:
    answer = ours.client.post(ROUTE, content=body)
    assert answer.status_code == (400 if n_tokens is None else 200)
    if n_tokens is not None:
        assert len(answer.json()["tokens"]) == n_tokens


def test_a_body_in_chunks_is_read(ours: Server) -> None:
    chunked = b"Transfer-Encoding: chunked"
    pieces = b"".join(b"1\r\n" + GOOD[i : i + 1] + b"\r\n" for i in range(len(GOOD)))
    assert raw(ours, post(chunked, body=pieces + b"0\r\n\r\n"))[0] == 200
    assert raw(ours, post(chunked, body=b"0\r\n\r\n"))[0] == 400


@pytest.mark.parametrize(
    "data",
    [
        post(b"Transfer-Encoding: chunked", body=b"x\r\n{}\r\n0\r\n\r\n"),
        post(b"Transfer-Encoding: chunked", body=b"-1\r\n{}\r\n0\r\n\r\n"),
        post(b"Transfer-Encoding: chunked", body=b"fffffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
        post(b"Transfer-Encoding: x", b"Content-Length: 16", body=GOOD),
        post(b"Content-Length: -1", body=GOOD),
        post(b"Content-Length: 1e3", body=GOOD),
        post(b"Content-Length: " + b"9" * 5000, body=GOOD),
        post(b"Content-Length: 16", b"Content-Length: 17", body=GOOD),
        post(b"Content-Length: 99999999999", body=GOOD),
        post(b"X: " + b"a" * 200_000),
        post(*[b"X-%d: a" % i for i in range(20_000)]),
        post(b"no colon"),
        post(b"X: a\x00b"),
        post(path="/" + "a" * 200_000),
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\n\r\n",
    ],
    ids=lambda data: ascii(data[:70]),
)
def test_what_is_no_http_is_refused_or_ends_the_connection(ours: Server, data: bytes) -> None:
    try:
        status, _ = raw(ours, data, ends=True)
    except OSError:  # it was closed while the rest was sent
        status = 0
    assert status == 0 or 400 <= status < 500, status


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_that_ends_too_early_is_no_request(ours: Server, route: str) -> None:
    good = json.dumps(ROUTES[route]).encode()
    for head, body in (
        (b"Content-Length: 1000", good),
        (b"Content-Length: 1000", b""),
        (b"Transfer-Encoding: chunked", b"%x\r\n%s\r\n" % (len(good), good)),
        (b"Transfer-Encoding: chunked", b"ff\r\n" + good),
    ):
        status, _ = raw(ours, post(head, body=body, path=route), ends=True)
        assert status == 0 or 400 <= status < 500, (route, head)


def test_a_body_is_refused_before_it_is_sent_if_it_says_that_it_is_too_large(ours: Server) -> None:
    status, body = raw(ours, post(b"Content-Length: 99999999999"))
    assert (status, json.loads(body)["error"]["type"]) == (413, "invalid_request_error")


@pytest.mark.parametrize(
    "query", ["?", "?a=1&a=2", "?%00", "?action=%ff", "?" + "a" * 3000, "?text=maybe&start=-1"]
)
def test_an_odd_query_is_no_server_error(ours: Server, query: str) -> None:
    for verb, route in (("POST", ROUTE), ("GET", "/slots"), ("GET", "/kvmem/v1/workspaces/w/blocks"),
                        ("POST", "/slots/0")):  # fmt: skip
        answer = ours.client.request(verb, route + query, content=GOOD if verb == "POST" else None)
        assert answer.status_code < 500 or answer.status_code == 501, answer.text


EXTREME: list[Any] = [
    0, -1, -(2**31), 2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, -1e308, 1e-320, 0.5, -0.0, True, None,
    "1", "", [], {}, [1], {"a": 1}, "\x00", "\U0001f600" * 50,
]  # fmt: skip
TEXTS = (
    "stop", "samplers", "logit_bias", "grammar", "json_schema", "response_fields", "dry_sequence_breakers",
    "id_slot", "lora", "grammar_triggers", "grammar_lazy", "preserved_tokens", "reasoning_format",
    "stream_options", "kvmem", "tools", "tool_choice", "response_format", "chat_template_kwargs",
    "thinking", "system", "metadata", "reasoning", "instructions", "parallel_tool_calls", "top_logprobs",
    "logprobs", "continue_final_message", "model", "user", "generation_prompt", "reasoning_budget_tokens",
    "stop_sequences", "previous_response_id", "reasoning_effort",
)  # fmt: skip
LIMITS = {"n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens", "n_cmpl", "n"}


def test_extreme_values_of_fields_are_clamped_or_refused(ours: Server) -> None:
    random_ = random.Random(11)
    names = sorted({name for field in FIELDS for name in field.names} - LIMITS | set(TEXTS))
    generating = ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
    statuses = []
    for i in range(120):
        route = generating[i % len(generating)]
        body = ROUTES[route] | {random_.choice(names): random_.choice(EXTREME)}
        answer = ours.client.post(route, json=body)
        statuses.append(answer.status_code)
        assert answer.status_code in (200, 400), (route, body, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
    assert statuses.count(200) > 50 and statuses.count(400) > 10


@pytest.mark.parametrize("name", sorted(LIMITS - {"n_cmpl", "n"}))
@pytest.mark.parametrize("value", [-2, -(2**63), "x", [], {}, True, 1e300])
def test_extreme_numbers_of_tokens_are_clamped_or_refused(ours: Server, name: str, value: Any) -> None:
    route = "/v1/responses" if name == "max_output_tokens" else "/completion"
    body = {name: value, "prompt": "a", "input": "a", "t_max_predict_ms": 1, "stop": ["a", "e", " ", "\n"]}
    answer = ours.client.post(route, json=body)
    assert answer.status_code in (200, 400), answer.text
