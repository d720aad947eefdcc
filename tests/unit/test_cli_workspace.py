"""`kvmem workspace`, and -w and --continue of ask and chat: what they say, and what they hand on."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from durable_run import Memory, make_memory, make_root
from fake_engine import Script

from kvmem_llama.cli.grouped import number
from kvmem_llama.store.root import Root

Run = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A folder with two workspaces; `notes` was used last."""
    monkeypatch.setenv("KVMEM_DATA_DIR", str(tmp_path / "workspaces"))
    root = make_root(tmp_path)
    make_memory(root, "old one", 10).close()
    make_memory(root, "notes", 22).close()
    return root


def told(done: Any) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def names(run_kvmem: Run) -> dict[str, int]:
    listed = told(run_kvmem("workspace", "ls", "--json"))["workspaces"]
    return {w["name"]: w["tokens"] for w in listed}


def test_workspaces_are_listed_and_shown(run_kvmem: Run, root: Root) -> None:
    assert names(run_kvmem) == {"notes": 22, "old one": 10}
    table = run_kvmem("workspace", "ls")
    assert table.code == 0 and [line.split()[0] for line in table.out.splitlines()] == [
        "name",
        "notes",
        "old",
    ]
    shown = told(run_kvmem("workspace", "show", "notes", "--json"))
    assert (shown["tokens"], shown["blocks"], shown["blocks_on_disk"], shown["steps"]) == (
        22,
        6,
        6,
        {"read": 1},
    )
    assert "made up" in run_kvmem("workspace", "show", "notes").out


def test_fork_rename_and_delete(run_kvmem: Run, root: Root) -> None:
    told(run_kvmem("workspace", "fork", "notes", "branch", "--json"))
    told(run_kvmem("workspace", "rename", "old one", "older/..", "--json"))
    assert names(run_kvmem) == {"branch": 22, "notes": 22, "older/..": 10}
    assert told(run_kvmem("workspace", "show", "branch", "--json"))["relatives"] == 1
    told(run_kvmem("workspace", "rm", "notes", "older/..", "--json"))
    assert names(run_kvmem) == {"branch": 22}


@pytest.mark.parametrize(
    "command", ["rm used", "fork used other", "export used x.kvmem", "compact used", "verify used --repair"]
)
def test_what_is_in_use_is_to_be_closed_first(
    run_kvmem: Run, root: Root, tmp_path: Path, command: str
) -> None:
    words = command.replace("x.kvmem", str(tmp_path / "x.kvmem")).split()
    memory = make_memory(root, "used", 22)
    done = run_kvmem("workspace", *words)
    memory.close()
    assert done.code == 7 and "in use by this process" in done.err
    assert done.err.endswith("Close it there first.\n")


def test_verify_tells_of_damage_with_its_exit_code(run_kvmem: Run, root: Root) -> None:
    assert run_kvmem("workspace", "verify", "notes").code == 0
    family = root.find("notes").family
    for path in (root.folder / family / "segments").glob("*.gguf"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        path.write_bytes(data)
    done = run_kvmem("workspace", "verify", "--json")
    assert done.code == 8 and not json.loads(done.out)["sound"]
    assert run_kvmem("workspace", "verify", "notes", "--repair").code == 8
    assert run_kvmem("workspace", "verify", "notes").code == 0
    assert told(run_kvmem("workspace", "show", "notes", "--json"))["blocks_as_tokens"] > 0


def test_verify_looks_at_all_families_whatever_the_first_one_is(run_kvmem: Run, root: Root) -> None:
    first = root.find("old one").family
    assert root.family_ids()[0] == first
    with contextlib.closing(sqlite3.connect(root.folder / first / "catalog.sqlite")) as db, db:
        db.execute("PRAGMA user_version=99")
    done = run_kvmem("workspace", "verify", "--json")
    found = json.loads(done.out)
    assert done.code == 8 and [f["kind"] for f in found["findings"]] == ["family"]
    assert "format 99" in found["findings"][0]["what"] and found["n_workspaces"] == 1
    assert run_kvmem("workspace", "verify", "notes").code == 0


def test_carried_blocks_are_counted(run_kvmem: Run, root: Root) -> None:
    memory = Memory(root, root.find("notes"))
    memory.rewrite(5, [1] * 20)
    memory.close()
    assert told(run_kvmem("workspace", "show", "notes", "--json"))["blocks_carried"] == 5
    assert "blocks carried" in run_kvmem("workspace", "show", "notes").out


def test_export_import_and_compact(run_kvmem: Run, root: Root, tmp_path: Path) -> None:
    file = tmp_path / "notes.kvmem"
    assert told(run_kvmem("workspace", "export", "notes", str(file), "--json"))["n_records"] == 6
    assert run_kvmem("workspace", "export", "notes", str(file)).code == 7
    assert told(run_kvmem("workspace", "import", str(file), "copy", "--json"))["name"] == "copy"
    assert run_kvmem("workspace", "import", str(file)).code == 7
    assert names(run_kvmem) == {"copy": 22, "notes": 22, "old one": 10}
    assert "n_moved" in told(run_kvmem("workspace", "compact", "copy", "--json"))


def test_a_workspace_that_is_not_there_is_an_error(run_kvmem: Run, root: Root) -> None:
    for arguments in (["show", "x"], ["fork", "x", "y"], ["rm", "x"], ["rename", "x", "y"], ["verify", "x"]):
        done = run_kvmem("workspace", *arguments)
        assert done.code == 7 and "no workspace named 'x'" in done.err


def test_deleting_several_deletes_none_if_one_is_not_there(run_kvmem: Run, root: Root) -> None:
    assert run_kvmem("workspace", "rm", "notes", "x").code == 7
    assert names(run_kvmem) == {"notes": 22, "old one": 10}
    assert told(run_kvmem("workspace", "rm", "notes", "old one", "notes", "--json"))["deleted"] == [
        "notes", "old one",
    ]  # fmt: skip
    empty = run_kvmem("workspace", "ls")
    assert (empty.code, empty.out) == (0, "") and f"no workspaces in {root.folder}" in empty.err


def test_an_error_is_an_object_for_who_asked_for_json(run_kvmem: Run, root: Root, tmp_path: Path) -> None:
    for arguments, error, code in (
        (["show", "x"], "WorkspaceNotFound", 7),
        (["fork", "notes", "old one"], "WorkspaceExists", 7),
        (["import", str(tmp_path / "none")], "InputError", 7),
        (["import", __file__], "ExportDamaged", 8),
        (["export", "notes", str(tmp_path / "none" / "file")], "StoreFailed", 7),
    ):
        done = run_kvmem("workspace", *arguments, "--json")
        found = json.loads(done.out)
        assert (done.code, found["error"], found["exit_code"]) == (code, error, code)
        assert found["message"] in done.err and found["hint"] in done.err


def test_a_file_that_is_there_is_replaced_only_if_told_so(run_kvmem: Run, root: Root, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    done = run_kvmem("workspace", "export", "notes", str(file))
    assert done.code == 7 and "--replace" in done.err and file.read_text() == "mine"
    assert told(run_kvmem("workspace", "export", "notes", str(file), "--replace", "--json"))["n_tokens"] == 22


def test_without_a_command_the_help_is_shown(run_kvmem: Run) -> None:
    done = run_kvmem("workspace")
    assert done.code == 0 and "rename" in done.out and done.err == ""


def test_w_and_continue_name_the_workspace(run_kvmem: Run, root: Root, script: Script) -> None:
    assert run_kvmem("ask", "why?").code == 0 and script.name is None
    assert run_kvmem("ask", "-w", "my notes", "why?").code == 0 and script.name == "my notes"
    assert run_kvmem("ask", "--continue", "why?").code == 0 and script.name == "notes"
    assert run_kvmem("chat", "--continue", stdin=b"why?\n").code == 0 and script.name == "notes"
    assert run_kvmem("chat", "--workspace=a_b", stdin=b"why?\n").code == 0 and script.name == "a_b"
    assert run_kvmem("ask", "-w", "x", "--continue", "why?").code == 2
    assert run_kvmem("ask", "-w", "bad\nname", "why?").code == 7


def test_a_new_workspace_is_announced_and_the_last_one_named(run_kvmem: Run, root: Root) -> None:
    for command, typed in ((("ask", "why?"), b""), (("chat",), b"why?\n")):
        assert "note: new workspace 'fresh'" in run_kvmem(*command, "-w", "fresh", stdin=typed).err
        assert run_kvmem(*command, "-w", "notes", stdin=typed).err == ""
        assert "note: going on in 'notes'" in run_kvmem(*command, "--continue", stdin=typed).err
        assert "workspace" not in run_kvmem(*command, stdin=typed).err
    as_json = run_kvmem("ask", "-w", "fresh", "--json", "why?")
    assert all(json.loads(line) for line in as_json.out.splitlines()) and "new workspace" not in as_json.out


def test_a_search_makes_a_workspace_only_for_a_text(
    run_kvmem: Run, root: Root, script: Script, tmp_path: Path
) -> None:
    assert run_kvmem("recall", "-w", "nope", "hello").err == "" and not script.create
    (tmp_path / "a.txt").write_text("the text")
    done = run_kvmem("recall", "-w", "nope", "-f", str(tmp_path / "a.txt"), "hello")
    assert script.create and "note: new workspace 'nope'" in done.err


def test_what_says_nothing_has_no_line(run_kvmem: Run, root: Root) -> None:
    shown = {line.strip() for line in run_kvmem("workspace", "show", "notes").out.splitlines()}
    assert (
        "pins" not in shown and "system prompt" not in shown and any(s.startswith("tokens ") for s in shown)
    )


@pytest.mark.parametrize(
    ("key", "n", "shown"),
    [
        ("blocks", 5_000_000, "5,000,000"),
        ("record_bytes", 999_999, "999,999"),
        ("record_bytes", 134_217_728, "134,217,728 (134.2 MB)"),
        ("bytes_per_million_tokens", 23_400_000_000, "23,400,000,000 (23.40 GB)"),
    ],
)
def test_many_bytes_are_told_in_larger_units_too(key: str, n: int, shown: str) -> None:
    assert number(key, n) == shown


def test_a_file_that_was_read_before_is_read_again_with_a_note(
    run_kvmem: Run, root: Root, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("the text")
    script.read = [("a.txt", "the text")]
    for command in (("recall", "q"), ("chat",), ("ask", "q")):
        done = run_kvmem(*command, "-w", "notes", "-f", str(tmp_path / "a.txt"))
        assert done.code == 0 and "a.txt is in this workspace already" in done.err, command
    assert script.asked[-1][1] == [("a.txt", "the text")]
    (tmp_path / "a.txt").write_text("the text, changed")
    assert run_kvmem("ask", "q", "-w", "notes", "-f", str(tmp_path / "a.txt")).err == ""
    (tmp_path / "a.txt").write_text("the text")
    assert run_kvmem("ask", "q", "-f", str(tmp_path / "a.txt")).err == ""  # nothing is kept of it


def test_what_an_interrupted_read_has_left_is_shown_beside_the_tokens(run_kvmem: Run, root: Root) -> None:
    memory = make_memory(root, "cut", 0)
    memory.read_ahead(range(4000))
    nbytes = memory.disk.format.record_nbytes
    memory.close()
    shown = told(run_kvmem("workspace", "show", "cut", "--json"))
    assert (shown["tokens"], shown["tokens_read_ahead"]) == (0, 4000)
    assert shown["read_ahead_bytes"] == 1000 * nbytes
    listed = {w["name"]: w for w in told(run_kvmem("workspace", "ls", "--json"))["workspaces"]}
    assert [listed[name]["tokens_read_ahead"] for name in ("cut", "notes")] == [4000, 0]
    table = run_kvmem("workspace", "ls").out
    assert "0 (+4,000 read ahead)" in table and table.count("read ahead") == 1


def test_a_file_that_is_no_export_is_named_and_said_so(run_kvmem: Run, root: Root, tmp_path: Path) -> None:
    for name, data in (("notes.txt", b"just text"), ("empty", b""), ("zeros", bytes(4096))):
        (tmp_path / name).write_bytes(data)
        done = run_kvmem("workspace", "import", str(tmp_path / name))
        assert done.code == 8 and str(tmp_path / name) in done.err and "not a sound export" in done.err
        assert "`kvmem workspace export` made" in done.err
    assert names(run_kvmem) == {"notes": 22, "old one": 10}


def test_a_workspace_can_be_asked_read_only(run_kvmem: Run, root: Root, script: Script) -> None:
    done = run_kvmem("ask", "-w", "notes", "--read-only", "why?")
    assert done.code == 0 and (script.name, script.read_only, script.create) == ("notes", True, False)
    assert "notes is open read-only: nothing of this is kept" in done.err and "read-only" not in done.out
    assert run_kvmem("chat", "--continue", "--read-only", stdin=b"why?\n").code == 0
    assert (script.name, script.read_only) == ("notes", True)
    assert run_kvmem("ask", "--continue", "why?").code == 0 and not script.read_only
    refused = run_kvmem("ask", "--read-only", "why?")
    assert refused.code == 2 and "-w NAME" in refused.err


def test_a_step_in_a_durable_workspace_tells_its_stats_before_it_ends(
    run_kvmem: Run, root: Root, script: Script
) -> None:
    lines = run_kvmem("ask", "-w", "notes", "--json", "why?").out.splitlines()
    stats, last = (json.loads(line) for line in lines[-2:])
    assert (stats["event"], stats["n_view"], stats["tiers"]) == ("stats", 512, None) and stats["n_tokens"] > 0
    assert last["event"] == "finished"
    assert '"stats"' not in run_kvmem("ask", "--json", "why?").out


def test_nothing_to_continue_is_an_error(
    run_kvmem: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMEM_DATA_DIR", str(tmp_path / "none"))
    done = run_kvmem("ask", "--continue", "why?")
    assert done.code == 2 and "-w NAME" in done.err
