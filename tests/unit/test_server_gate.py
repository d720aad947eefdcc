"""What a request passes before its route: other origins, the wait for the model, keys, sizes, the log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from kvmem_llama.errors import InvalidName, InvalidOption, KvmemError
from kvmem_llama.server.app import create_app
from kvmem_llama.server.auth import Keys, check_bind, owner_of, shown_name, stored_name
from kvmem_llama.server.errors import STATUSES, ApiError, api_error, error_body, status_of
from kvmem_llama.server.flags import ServerOptions
from kvmem_llama.server.limits import parse_json
from kvmem_llama.server.responses import json_bytes
from kvmem_llama.server.state import ServerState
from kvmem_llama.settings import Settings

LOCAL = "http://127.0.0.1:8080"
KEY = {"Authorization": "Bearer secret"}


class Ready(ServerState):
    """A server whose model is there, as far as the gate can see."""

    is_ready = True  # type: ignore[assignment]


def ask(
    options: ServerOptions, *requests: tuple[str, str, dict[str, str]], ready: bool = True, **more: Any
) -> Any:
    state = (Ready if ready else ServerState)(Settings(), options)
    app = create_app(state)

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            return [await client.request(verb, path, headers=head, **more) for verb, path, head in requests]

    found = asyncio.run(run())
    return found[0] if len(found) == 1 else found


def test_until_the_model_is_there_every_route_answers_503() -> None:
    for path in ("/health", "/v1/models", "/nope"):
        answer = ask(ServerOptions(), ("GET", path, {}), ready=False)
        assert answer.status_code == 503
        assert answer.json() == {
            "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        }
        assert (b"Content-Type", b"application/json; charset=utf-8") in answer.headers.raw


def test_the_wait_for_the_model_comes_before_the_key_and_the_origin_before_both() -> None:
    options = ServerOptions(api_key="secret", cors_origins="localhost")
    origin = {"Origin": "http://localhost:3000"}
    loading = ask(options, ("GET", "/v1/models", origin), ready=False)
    assert (loading.status_code, loading.headers["access-control-allow-origin"]) == (503, origin["Origin"])
    refused = ask(options, ("GET", "/v1/models", origin))
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin["Origin"])
    asked = ask(options, ("OPTIONS", "/v1/models", origin), ready=False)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, origin["Origin"])


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "secre"}, {"Authorization": "Bearer "},
                {"Authorization": "Bearer sécret"}],
)  # fmt: skip
def test_without_the_right_key_there_is_no_answer(headers: dict[str, str]) -> None:
    encoded: Any = {name: value.encode("utf-8") for name, value in headers.items()}
    for path in ("/lora-adapters", "/kvmem/v1/workspaces", "/unknown"):
        answer = ask(ServerOptions(api_key="secret"), ("GET", path, encoded))
        assert answer.status_code == 401
        assert answer.json() == {
            "error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}
        }


def test_a_key_may_come_in_either_header_and_health_needs_none() -> None:
    options = ServerOptions(api_key="other,secret")
    given = (KEY, {"X-Api-Key": "secret"}, {"Authorization": "secret"}, {"X-Api-Key": "other"})
    assert [ask(options, ("GET", "/lora-adapters", head)).status_code for head in given] == [200] * 4
    assert ask(options, ("GET", "/health", {})).status_code == 200


def test_a_key_may_have_any_letters() -> None:
    head: Any = {"Authorization": "Bearer schlüssel🔑".encode()}
    assert ask(ServerOptions(api_key="schlüssel🔑"), ("GET", "/lora-adapters", head)).status_code == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr("hmac.compare_digest", compare)
    answer = ask(ServerOptions(api_key="secret,other"), ("GET", "/lora-adapters", KEY))
    assert answer.status_code == 200
    assert compared == [
        (b"secret", b"secret"),
        (b"secret", b"other"),
    ]  # all of them, though the first one fits


def test_other_origins_are_closed_by_default() -> None:
    other = {"Origin": "http://evil.example"}
    get, post, options = ask(
        ServerOptions(),
        ("GET", "/health", other),
        ("POST", "/lora-adapters", other),
        ("OPTIONS", "/health", other),
    )
    assert (get.status_code, post.status_code, options.status_code) == (403, 403, 200)
    assert not any("access-control-allow-origin" in answer.headers for answer in (get, post, options))
    own = ask(ServerOptions(), ("GET", "/health", {"Origin": LOCAL}))
    assert own.status_code == 200


@pytest.mark.parametrize(
    ("allowed", "origin", "reflected"),
    [
        ("localhost", "http://localhost:3000", "http://localhost:3000"),
        ("localhost", "http://[::1]:3000", "http://[::1]:3000"),
        ("localhost", "http://localhost.evil.example", None),
        ("localhost", "http://notlocalhost", None),
        ("*", "http://a.example", "*"),
        ("http://a.example,http://b.example", "http://b.example", "http://b.example"),
        ("http://a.example", "http://a.example.evil", None),
        ("localhost", "http://[", None),
    ],
)
def test_origins_that_were_named_may_use_the_server(allowed: str, origin: str, reflected: str | None) -> None:
    options = ServerOptions(cors_origins=allowed)
    answer = ask(options, ("OPTIONS", "/completion", {"Origin": origin}))
    assert answer.status_code == 200
    assert answer.headers.get("access-control-allow-origin") == reflected
    assert ask(options, ("GET", "/health", {"Origin": origin})).status_code == (200 if reflected else 403)


def test_a_name_that_somebody_made_point_here_is_no_name_of_ours() -> None:
    assert ask(ServerOptions(), ("GET", "/health", {"Host": "evil.example:8080"})).status_code == 403
    assert ask(ServerOptions(api_key="k"), ("GET", "/health", {"Host": "box.example"})).status_code == 200
    for host in ("localhost:8080", "127.0.0.1", "[::1]:80"):
        assert ask(ServerOptions(), ("GET", "/health", {"Host": host})).status_code == 200


def test_an_address_that_others_reach_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "box.example"):
        with pytest.raises(InvalidOption, match="there is no API key"):
            ServerState(Settings(), ServerOptions(host=f"127.0.0.1,{host}"))
        check_bind([host], Keys(["k"]))
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.53"):
        check_bind([host], Keys())


def test_unknown_paths_and_verbs_are_not_found() -> None:
    for verb, path in (("GET", "/nope"), ("GET", "/tokenize"), ("PUT", "/health")):
        answer = ask(ServerOptions(), (verb, path, {}))
        assert answer.status_code == 404
        assert answer.json()["error"] == {"code": 404, "message": "File Not Found", "type": "not_found_error"}


def test_head_is_get_without_a_body() -> None:
    get, head = ask(ServerOptions(), ("GET", "/health", {}), ("HEAD", "/health", {}))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_routes_may_have_a_prefix() -> None:
    options = ServerOptions(api_prefix="/llm", api_key="secret")
    inside, outside = ask(options, ("GET", "/llm/health", {}), ("GET", "/health", KEY))
    assert (inside.status_code, outside.status_code) == (200, 404)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_what_watchers_ask_is_not_logged(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvmem.server")
    ask(ServerOptions(api_prefix=prefix), ("GET", f"{prefix}/health", {}), ("GET", f"{prefix}/nothing", {}))
    assert ["nothing" in line for line in caplog.messages] == [True]


def test_a_body_that_is_too_large_is_refused() -> None:
    answer = ask(
        ServerOptions(max_body=2048), ("POST", "/tokenize", {}), content=b'{"a":"' + b"x" * 4096 + b'"}'
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, 413)

    async def parts() -> Any:
        for _ in range(8):
            yield b"x" * 512

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(Ready(Settings(), ServerOptions(max_body=2048))))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            return await client.post("/tokenize", content=parts())  # its length is not told

    assert asyncio.run(run()).status_code == 413


def test_the_log_holds_no_word_of_a_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "a secret text"

    def fails(*_: object) -> None:
        raise RuntimeError(told)

    monkeypatch.setattr("kvmem_llama.server.limits.parse_json", fails)
    with caplog.at_level(logging.INFO, "kvmem.server"):
        answer = ask(ServerOptions(), ("POST", "/tokenize?q=1", {}), content=json_bytes({"content": told}))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error: RuntimeError"
    assert told not in caplog.text
    monkeypatch.undo()
    with caplog.at_level(logging.INFO, "kvmem.server"):
        ask(ServerOptions(log_prompts=True), ("POST", "/tokenize", {}), content=json_bytes({"content": told}))
    assert told in caplog.text
    assert "POST /tokenize 500" in caplog.text


# -- JSON


def refused(data: bytes, **options: int) -> str:
    with pytest.raises(ApiError) as caught:
        parse_json(data, ServerOptions(**options))
    assert caught.value.code == 400
    return caught.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"{'a':1}", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":1e999}',
        b'{"a":01}',
        b"\xff\xfe", b'{"a":"\xc3"}', b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'{"a":"\x00"}', b'{"a":1}x',
        b"9" * 5000, b"\x1f\x8b\x08", b'{"a":+1}', b'{"a":.5}',
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(data: bytes) -> None:
    assert refused(data).startswith("the body is not")


def test_depth_has_a_limit() -> None:
    nested = b'{"a":' * 10 + b"1" + b"}" * 10
    assert parse_json(nested, ServerOptions(max_json_depth=10)) is not None
    assert "10 levels" in refused(b"[" + nested + b"]", max_json_depth=10)
    assert "64 levels" in refused(b"[" * 100_000 + b"]" * 100_000)
    assert parse_json(b'{"a":"\\ud83d\\ude00"}', ServerOptions()) == {"a": "\U0001f600"}


def test_whole_numbers_beyond_64_bits_are_floats() -> None:
    found = parse_json(b"[18446744073709551615, 18446744073709551616, -9223372036854775809]", ServerOptions())
    assert [type(number) for number in found] == [int, float, float]


def test_answers_are_compact_json_of_whole_characters() -> None:
    assert json_bytes({"a": ["é", "\ud800"]}) == '{"a":["é","?"]}'.encode()
    with pytest.raises(ValueError):
        json_bytes({"a": float("nan")})


# -- errors and owners


def descendants(cls: type[KvmemError]) -> set[type[KvmemError]]:
    return {cls}.union(*(descendants(below) for below in cls.__subclasses__()))


def test_every_error_has_a_status_and_a_type() -> None:
    for cls in descendants(KvmemError):
        error = cls.__new__(cls)
        assert 400 <= status_of(error) < 600
    assert all(400 <= status < 600 for status in STATUSES.values())
    told = error_body(ApiError(400, "x", "t", {"n": 1}))
    assert told == {"error": {"code": 400, "message": "x", "type": "t", "n": 1}}
    assert api_error(ValueError("secret")).message == "internal error: ValueError"


def test_an_owner_is_part_of_the_name_in_the_store() -> None:
    ann, bob = owner_of(b"a"), owner_of(b"b")
    assert ann != bob and len(ann) == 24
    kept = stored_name(ann, "work/main")
    assert (shown_name(ann, kept), shown_name(bob, kept), shown_name("", kept)) == ("work/main", None, None)
    assert (shown_name("", "main"), shown_name(ann, "main")) == ("main", None)
    assert stored_name("", "main") == "main"
    with pytest.raises(InvalidName):
        stored_name("", kept)  # without keys nobody gets at what belongs to one
    assert shown_name(bob, stored_name(bob, kept)) == kept  # a name is data, whatever it looks like
