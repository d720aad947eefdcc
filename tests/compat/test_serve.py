"""`kvmem serve` as a program: its beginning and its end, keys, what of workspaces their owners can do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server, our_server

from kvmem_llama.errors import InvalidOption, KvmemError
from kvmem_llama.server.flags import ServerOptions
from kvmem_llama.server.running import bind
from kvmem_llama.server.state import ServerState
from kvmem_llama.settings import Settings

ANN, BOB = {"Authorization": "Bearer ann's key"}, {"X-Api-Key": "bob's key"}
QUESTION = [
    {"role": "user", "content": "Name three colours. " + "The sky is blue and the grass is green. " * 12}
]


@pytest.fixture(scope="module")
def two_owners(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys; each has a workspace named `work`, Ann's has a turn."""
    folder = tmp_path_factory.mktemp("owners")
    with our_server(smollm2, folder, "--api-key", "ann's key,bob's key") as server:
        for head, content in ((ANN, QUESTION), (BOB, [{"role": "user", "content": "hi"}])):
            body = {"messages": content, "max_tokens": 4, "kvmem": {"workspace": "work"}}
            answer = server.client.post("/v1/chat/completions", json=body, headers=head)
            assert answer.status_code == 200, answer.text
        yield server


def get(server: Server, path: str, head: dict[str, str] = ANN, **more: Any) -> httpx.Response:
    return server.client.get(f"/kvmem/v1/workspaces{path}", headers=head, **more)


def post(server: Server, path: str, body: Any, head: dict[str, str] = ANN) -> httpx.Response:
    return server.client.post(f"/kvmem/v1/workspaces{path}", json=body, headers=head)


def test_each_owner_sees_only_what_is_theirs(two_owners: Server) -> None:
    lists = [get(two_owners, "", head).json()["workspaces"] for head in (ANN, BOB)]
    assert [[one["name"] for one in found] for found in lists] == [["work"], ["work"]]
    assert lists[0][0]["id"] != lists[1][0]["id"]
    assert lists[0][0]["n_tokens"] > lists[1][0]["n_tokens"]
    assert post(two_owners, "/work/fork", {"name": "only/Ann's"}).status_code == 200
    for path in ("/only%2FAnn's", "/only%2FAnn's/blocks", "/only%2FAnn's/recalls", "/only%2FAnn's/export"):
        assert get(two_owners, path).status_code == 200
        answer = get(two_owners, path, BOB)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert "key-" not in answer.text  # how the store names it is nobody's business
    for path, body in (
        ("/pin", {"start": 0, "end": 1}),
        ("/search", {"query": "x"}),
        ("/fork", {"name": "y"}),
    ):
        assert post(two_owners, "/only%2FAnn's" + path, body, BOB).status_code == 404
    assert two_owners.client.delete("/kvmem/v1/workspaces/only/Ann's", headers=BOB).status_code == 404
    assert two_owners.client.delete("/kvmem/v1/workspaces/only/Ann's", headers=ANN).status_code == 200
    assert get(two_owners, "/only%2FAnn's").status_code == 404


def test_a_workspace_is_shown_block_by_block(two_owners: Server) -> None:
    shown = get(two_owners, "/work").json()
    found = get(two_owners, "/work/blocks?text=true").json()
    blocks = found["blocks"]
    assert shown["n_tokens"] == found["n_tokens"] == sum(block["count"] for block in blocks)
    assert shown["n_blocks"] == len(blocks) > 2
    assert {block["tier"] for block in blocks} <= {"device", "host", "disk"}
    assert "The sky is blue" in "".join(block["text"] for block in blocks)
    part = get(two_owners, "/work/blocks?start=40&end=70").json()["blocks"]
    assert [block["start"] for block in part] == [32, 64]
    assert "text" not in part[0]
    steps = get(two_owners, "/work/steps").json()["steps"]
    assert [step["kind"] for step in steps] == ["ask"]
    assert (steps[-1]["start"], steps[-1]["end"]) == (0, found["n_tokens"])


def test_blocks_are_found_and_pinned(two_owners: Server) -> None:
    found = post(two_owners, "/work/search", {"query": "What colour is grass?", "n_blocks": 2})
    assert found.status_code == 200, found.text
    assert post(two_owners, "/work/pin", {"start": 32, "end": 64}).status_code == 200
    assert get(two_owners, "/work").json()["pins"] == [{"start": 32, "end": 64}]
    pinned = [block["start"] for block in get(two_owners, "/work/blocks").json()["blocks"] if block["pinned"]]
    assert pinned == [32]
    assert post(two_owners, "/work/unpin", {"start": 32, "end": 64}).status_code == 200
    assert post(two_owners, "/work/unpin", {"start": 32, "end": 64}).status_code == 400
    assert get(two_owners, "/work").json()["pins"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/work/pin", {"start": 0}),
        ("/work/pin", {"start": 0, "end": 10**6}),
        ("/work/pin", {"start": 5, "end": 5}),
        ("/work/pin", {"start": "x", "end": 1}),
        ("/work/pin", []),
        ("/work/search", {}),
        ("/work/search", {"query": ""}),
        ("/work/search", {"query": "a", "n_blocks": 0}),
        ("/work/fork", {"name": ""}),
        ("/work/fork", {"name": "a\nb"}),
        ("/work/fork", {"name": "x" * 500}),
    ],
)
def test_what_cannot_be_done_is_a_400(two_owners: Server, path: str, body: Any) -> None:
    answer = post(two_owners, path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "name",
    ["..", "../../etc/passwd", "/etc/passwd", "%2e%2e%2f", "work\x00", "~", "key-0/work", "C:\\x", "."],
)
def test_a_name_is_never_a_path(two_owners: Server, name: str) -> None:
    folder = two_owners.log.parent
    before = sorted(path.name for path in folder.iterdir())
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    for method, rest in (("GET", ""), ("GET", "/export"), ("DELETE", ""), ("GET", "/blocks")):
        answer = two_owners.client.request(method, f"/kvmem/v1/workspaces/{quoted}{rest}", headers=ANN)
        assert answer.status_code in (400, 404), (method, rest, answer.text)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_an_exported_workspace_can_be_imported(two_owners: Server, tmp_path: Path) -> None:
    answer = get(two_owners, "/work/export")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    file = tmp_path / "work.tar"
    file.write_bytes(answer.content)
    env = os.environ | {"KVMEM_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, "-m", "kvmem_llama.cli.main", "workspace"]
    subprocess.run([*command, "import", str(file), "copy"], env=env, check=True, capture_output=True)
    shown = subprocess.run(
        [*command, "show", "copy", "--json"], env=env, check=True, capture_output=True, text=True
    )
    assert f'"tokens": {get(two_owners, "/work").json()["n_tokens"]}' in shown.stdout


def test_an_export_leaves_nothing_behind_whatever_part_of_it_was_asked_for(two_owners: Server) -> None:
    def left() -> set[str]:
        return {path.name for path in Path(tempfile.gettempdir()).glob("kvmem-export-*")}

    before = left()
    for wanted, status in (("bytes=0-9", 206), ("bytes=99999999999-", 416), ("bytes=abc", 400)):
        answer = two_owners.client.get("/kvmem/v1/workspaces/work/export", headers={**ANN, "Range": wanted})
        assert answer.status_code == status
    for _ in range(100):  # the last one may still be closing its file
        if left() <= before:
            return
        time.sleep(0.05)
    raise AssertionError(left() - before)


def test_metrics_have_llama_servers_names_and_our_own(two_owners: Server) -> None:
    answer = two_owners.client.get("/metrics", headers=ANN)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    assert answer.headers["process-start-time-unix"].isdigit()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", answer.text, re.MULTILINE))
    values = {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", answer.text, re.MULTILINE)}
    for name in ("prompt_tokens_total", "prompt_tokens_cached_total", "prompt_seconds_total", "n_tokens_max",
                 "tokens_predicted_total", "tokens_predicted_seconds_total", "n_decode_total"):  # fmt: skip
        assert kinds[f"llamacpp:{name}"] == "counter"
    for name in ("prompt_tokens_seconds", "predicted_tokens_seconds", "requests_processing",
                 "requests_deferred", "n_busy_slots_per_decode"):  # fmt: skip
        assert kinds[f"llamacpp:{name}"] == "gauge"
    assert values["llamacpp:n_decode_total"] > 0
    assert values["llamacpp:tokens_predicted_total"] == 8
    assert values["llamacpp:prompt_tokens_total"] > 100
    assert kinds["kvmem:recall_seconds"] == "histogram"
    for name in ("blocks_selected", "blocks_in", "blocks_out", "blocks_retained", "replay_tokens",
                 "restore_bytes", "stage_out_waits", "integrity_failures"):  # fmt: skip
        assert kinds[f"kvmem:{name}_total"] == "counter"
    assert kinds["kvmem:tier_bytes"] == kinds["kvmem:index_bytes"] == "gauge"
    assert values['kvmem:tier_bytes{tier="disk"}'] > 0


def test_the_page_loads_nothing_from_elsewhere(two_owners: Server) -> None:
    page = two_owners.client.get("/")
    assert page.status_code == 200 and page.text.startswith("<!doctype html>")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    texts = [two_owners.client.get(path).text for path in ("/", "/page.css", "/page.js")]
    assert not [
        text for text in texts if re.search(r"https?://|//[a-z]+\.|innerHTML|outerHTML|eval\(|style=", text)
    ]


def test_every_route_of_ours_is_described(two_owners: Server) -> None:
    described = two_owners.client.get("/openapi.json", headers=ANN).json()
    paths = described["paths"]
    for path in ("/blocks", "/steps", "/recalls", "/export", "/fork", "/search", "/pin", "/unpin", ""):
        assert f"/kvmem/v1/workspaces/{{name}}{path}" in paths
    pin = paths["/kvmem/v1/workspaces/{name}/pin"]["post"]
    assert pin["requestBody"]["content"]["application/json"]["schema"]["required"] == ["start", "end"]


# -- beginning and end


def test_workspaces_are_their_owners_after_a_restart(smollm2: Path, tmp_path: Path) -> None:
    body = {"messages": QUESTION, "max_tokens": 2, "kvmem": {"workspace": "work"}}
    with our_server(smollm2, tmp_path, "--api-key", "ann's key") as server:
        assert server.client.post("/v1/chat/completions", json=body, headers=ANN).status_code == 200
        assert server.stop(signal.SIGTERM) == 0
    with our_server(smollm2, tmp_path, "--api-key", "bob's key,ann's key") as server:
        assert [len(get(server, "", head).json()["workspaces"]) for head in (ANN, BOB)] == [1, 0]


def test_a_signal_ends_it_and_what_was_written_is_kept(smollm2: Path, tmp_path: Path) -> None:
    body = {"messages": QUESTION, "max_tokens": 2000, "stream": True, "kvmem": {"workspace": "work"}}
    with (
        our_server(smollm2, tmp_path) as server,
        server.client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        assert server.stop(signal.SIGINT) == 0  # the other tests end theirs with SIGTERM
    with our_server(smollm2, tmp_path) as server:
        (kept,) = server.client.get("/kvmem/v1/workspaces").json()["workspaces"]
        assert kept["n_tokens"] > 140
        text = "".join(block["text"] for block in get(server, "/work/blocks?text=true", {}).json()["blocks"])
        assert text.count("<|im_start|>") >= 3


def test_a_second_signal_ends_it_at_once(smollm2: Path, tmp_path: Path) -> None:
    """A stopped process takes both signals when it goes on, and never gets to its orderly end."""
    with our_server(smollm2, tmp_path) as server:
        assert server.client.get("/health").status_code == 200
        body = {"prompt": "a " * 3000, "n_predict": 100, "stream": True}
        with server.client.stream("POST", "/completion", json=body):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            server.process.send_signal(signal.SIGINT)
            code = server.process.wait(30)
    assert code in (0, 128 + signal.SIGINT)


def test_a_model_that_cannot_be_loaded_ends_it_with_the_models_exit_code(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvmem_llama.cli.main",
        "serve",
        "--port",
        "0",
        "-m",
        str(tmp_path / "no.gguf"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "no such file" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "there is no API key"),
        ({"api_key_file": "/nowhere"}, "--api-key-file"),
        ({"chat_template_kwargs": "["}, "--chat-template-kwargs"),
        ({"chat_template_kwargs": "[]"}, "must be a JSON object"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_is_loaded(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(KvmemError, match=words):
        ServerState(Settings(), ServerOptions(**options))


def test_a_port_in_use_is_named(ours: Server) -> None:
    with pytest.raises(InvalidOption, match=f"--port = {ours.port}: cannot listen"):
        bind(["127.0.0.1"], ours.port)
    sockets = bind(["127.0.0.1", "::1"], 0)
    assert [one.getsockname()[0] for one in sockets] == ["127.0.0.1", "::1"]
    for one in sockets:
        one.close()


def test_the_log_holds_no_prompt(ours: Server) -> None:
    secret = "xylophone-4711"
    for path, body in (
        ("/completion", {"prompt": secret, "n_predict": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "max_tokens": 1}),
        ("/tokenize", {"content": [secret, {}]}),
    ):
        ours.client.post(path, json=body)
    log = ours.log.read_text()
    assert secret not in log
    assert "POST /completion 200" in log
