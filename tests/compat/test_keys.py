"""Who may ask for what: no route without its key, nothing of one key for another, no name that is a path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server, our_server

ANN, BOB = {"Authorization": "Bearer ann's key"}, {"X-Api-Key": "bob's key"}
PUBLIC = ("/health", "/v1/health", "/", "/page.css", "/page.js")
PROMPT = "The code of the safe is 4711. " * 12

PATHS = [
    "..", "../x", "a/../../x", "a/..", "./x", "/etc/passwd", "~", "~/x", "\\x", "..\\x", "a\\..\\x",
    "C:\\x", "c:x", "a\x00b", "a\nb", "x" * 300, "\uff0e\uff0e/x", "\u2025/x", "..\u2215x", "\uff0fetc",
    "a\uff3cb", "a\u29f5b", " ../x", "a/ .. /x",
]  # fmt: skip
FILES = [
    "a/b", "CON", "con.bin", "NUL", "aux.", "LPT1.bin", "com9", "com\u00b9", "a:b", "a*", "a?", 'a"', "a|b",
    "<a>", " a", "a ", ".a", "a.", "a..b", "\u2026", "a\x7fb", "\u00e9" * 200, "", 5, None, ["a"],
]  # fmt: skip


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    with our_server(smollm2, folder, "--api-key", "ann's key,bob's key", "--slots", "--props") as server:
        body = {"prompt": PROMPT, "n_predict": 1, "id_slot": 0, "kvmem": {"workspace": "work"}}
        assert server.client.post("/completion", json=body, headers=ANN).status_code == 200
        yield server


@pytest.fixture
def filled(server: Server) -> Server:
    """Slot 0 holds something of Ann's."""
    body = {"prompt": PROMPT, "n_predict": 1, "id_slot": 0}
    assert server.client.post("/completion", json=body, headers=ANN).status_code == 200
    return server


def routes(server: Server) -> list[tuple[str, str]]:
    """Verb and path of every route that is described; parts that are names are `work`."""
    paths = server.client.get("/openapi.json", headers=ANN).json()["paths"]
    found = [(verb.upper(), path) for path, verbs in paths.items() for verb in verbs]
    return [(verb, re.sub(r"\{name\}", "work", path).replace("{id_slot}", "0")) for verb, path in found]


def everything(folder: Path) -> dict[str, int]:
    """Files below `folder` and beside it, but for the log."""
    return {
        str(path): path.stat().st_size
        for path in folder.parent.rglob("*")
        if path.is_file() and path.suffix != ".log" and "workspaces" not in path.parts
    }


@pytest.mark.parametrize(
    "head",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer ann's ke"},
        {"Authorization": "Bearer ann's key,bob's key"},
        {"Authorization": "Basic ann's key"},
        {"X-Api-Key": ""},
        {"Authorization": "Bearer wrong", "X-Api-Key": "ann's key"},
    ],
    ids=str,
)
def test_no_route_answers_without_its_key(server: Server, head: dict[str, str]) -> None:
    found = routes(server)
    assert len(found) > 30
    more = [("POST", "/v1/chat/completions"), ("GET", "/tools"), ("POST", "/embedding"), ("GET", "/unknown"),
            ("POST", "/chat/completions"), ("PUT", "/tokenize"), ("GET", "/health/"), ("GET", "/health%2f.."),
            ("GET", "/openapi.json")]  # fmt: skip
    for verb, path in [*found, *more]:
        answer = server.client.request(verb, path, headers=head, json={} if verb == "POST" else None)
        if path in PUBLIC:
            assert answer.status_code == 200, path
            continue
        assert answer.status_code == 401, (verb, path)
        assert answer.json() == {
            "error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}
        }


def test_a_workspace_of_another_key_is_on_no_route(server: Server) -> None:
    bodies = {"/fork": {"name": "copy"}, "/search": {"query": "code"}, "/pin": {"start": 0, "end": 1},
              "/unpin": {"start": 0, "end": 1}}  # fmt: skip
    asked = [route for route in routes(server) if route[1].startswith("/kvmem/v1/workspaces/work")]
    assert len(asked) >= 10
    for verb, path in asked:
        body = bodies.get(path.removeprefix("/kvmem/v1/workspaces/work"))
        answer = server.client.request(verb, path, headers=BOB, json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error"), (verb, path)
        assert "4711" not in answer.text
    assert server.client.get("/kvmem/v1/workspaces", headers=BOB).json() == {"workspaces": []}
    assert server.client.get("/kvmem/v1/workspaces/work", headers=ANN).status_code == 200


def test_another_keys_name_of_the_store_is_no_way_to_its_workspace(server: Server) -> None:
    names = [
        item["name"] for item in server.client.get("/kvmem/v1/workspaces", headers=ANN).json()["workspaces"]
    ]
    assert names == ["work"]
    stored = re.findall(
        rb"key-[0-9a-f]{24}/work", (server.log.parent / "workspaces" / "names.json").read_bytes()
    )
    assert len(stored) == 1
    name = stored[0].decode()
    for path in (f"/kvmem/v1/workspaces/{name}", f"/kvmem/v1/workspaces/{name}/blocks?text=true"):
        assert server.client.get(path, headers=BOB).status_code == 404
    body = {"prompt": "x", "n_predict": 0, "kvmem": {"workspace": name, "report": True}}
    answer = server.client.post("/completion", json=body, headers=BOB)
    assert answer.status_code == 200 and answer.json()["tokens_evaluated"] < 10  # Bob's own, with a long name
    assert server.client.delete(f"/kvmem/v1/workspaces/{name}", headers=BOB).status_code == 200
    assert server.client.get("/kvmem/v1/workspaces/work", headers=ANN).status_code == 200


def test_what_one_key_has_asked_is_not_reused_saved_or_shown_for_another(filled: Server) -> None:
    server = filled
    body = {"prompt": PROMPT, "n_predict": 1, "id_slot": 0}
    assert server.client.post("/slots/0?action=save", json={"filename": "a"}, headers=BOB).status_code == 400
    saved = server.client.post("/slots/0?action=save", json={"filename": "a"}, headers=ANN)
    assert saved.status_code == 200 and saved.json()["n_saved"] > 50
    assert (
        server.client.post("/slots/1?action=restore", json={"filename": "a"}, headers=BOB).status_code == 400
    )
    assert server.client.post("/slots/0?action=erase", json={}, headers=BOB).json()["n_erased"] == 0
    assert "4711" not in server.client.get("/slots", headers=BOB).text
    begun = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "The code is 4711"}]
    chat = {"messages": begun, "max_tokens": 1, "id_slot": 0}
    assert server.client.post("/v1/chat/completions", json=chat, headers=ANN).status_code == 200
    assert "4711" not in server.client.get("/slots", headers=BOB).text
    assert server.client.post("/completion", json=body, headers=BOB).json()["timings"]["cache_n"] == 0
    assert (
        server.client.post("/slots/1?action=restore", json={"filename": "a"}, headers=ANN).status_code == 200
    )


@pytest.mark.parametrize("name", PATHS, ids=ascii)
def test_no_path_is_a_name_of_a_workspace(server: Server, name: str) -> None:
    folder = server.log.parent
    before = everything(folder)
    body: dict[str, Any] = {"prompt": "a", "n_predict": 0, "kvmem": {"workspace": name}}
    asked = [
        server.client.post("/completion", json=body, headers=ANN),
        server.client.post("/kvmem/v1/workspaces/work/fork", json={"name": name}, headers=ANN),
        server.client.post("/slots/0?action=save", json={"filename": name}, headers=ANN),
        server.client.post("/slots/0?action=restore", json={"filename": name}, headers=ANN),
    ]
    if name.isascii() and name.isprintable() and name == name.strip():
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        head = ANN | {"X-KVMem-Workspace": name}
        asked.append(server.client.post("/v1/chat/completions", json=chat, headers=head))
    for answer in asked:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert everything(folder) == before


@pytest.mark.parametrize("name", FILES, ids=ascii)
def test_no_odd_name_is_one_of_a_slots_file(server: Server, name: object) -> None:
    before = everything(server.log.parent)
    for action in ("save", "restore"):
        answer = server.client.post(f"/slots/0?action={action}", json={"filename": name}, headers=ANN)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Invalid filename")
    assert everything(server.log.parent) == before


@pytest.mark.parametrize("id_slot", ["-1", "2", "x", "0x0", "\u0660", "9" * 5000, "1e0", "+1", "..", "0%00"])
def test_what_is_no_slot_is_told(server: Server, id_slot: str) -> None:
    answer = server.client.post(f"/slots/{id_slot}?action=erase", json={}, headers=ANN)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["code"] == answer.status_code


def test_a_slots_file_may_have_a_name_in_any_script(filled: Server) -> None:
    for name in ("\u00e9t\u00e9.bin", "\u8a18\u61b6", "a-b_c.1.kv", "console", "company"):
        for action in ("save", "restore"):
            answer = filled.client.post(f"/slots/0?action={action}", json={"filename": name}, headers=ANN)
            assert answer.status_code == 200, answer.text


def test_a_folder_or_a_link_in_the_folder_of_slots_is_not_followed(filled: Server, tmp_path: Path) -> None:
    assert filled.client.post("/slots/0?action=save", json={"filename": "b"}, headers=ANN).status_code == 200
    (folder,) = (path.parent for path in (filled.log.parent / "slots").glob("key-*/b"))
    secret = tmp_path / "secret"
    secret.write_text("x")
    (folder / "link").symlink_to(secret)
    (folder / "sub").mkdir()
    for name in ("link", "sub"):
        answer = filled.client.post("/slots/0?action=restore", json={"filename": name}, headers=ANN)
        assert answer.status_code == 400, answer.text
    answer = filled.client.post("/slots/0?action=save", json={"filename": "sub"}, headers=ANN)
    assert answer.status_code == 400, answer.text
    answer = filled.client.post("/slots/0?action=save", json={"filename": "link"}, headers=ANN)
    assert answer.status_code == 200 and secret.read_text() == "x"  # the link is replaced, not followed
