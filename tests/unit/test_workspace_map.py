"""The map of a workspace: where its blocks lie, and how often each was recalled."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from durable_run import make_memory, make_root

from kvmem_llama.cli.workspace_map import PER_LINE, MapBlock, map_lines

Run = Callable[..., Any]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace `notes` of 22 tokens in blocks of 4."""
    monkeypatch.setenv("KVMEM_DATA_DIR", str(tmp_path / "workspaces"))
    make_memory(make_root(tmp_path), "notes", 22).close()


def test_a_stored_workspace_is_mapped_as_text_and_as_json(run_kvmem: Run, stored: None) -> None:
    done = run_kvmem("workspace", "map", "notes")
    assert done.code == 0 and done.out.splitlines()[-1].split() == ["0", "......"]
    blocks = json.loads(run_kvmem("workspace", "map", "notes", "--json").out)["blocks"]
    assert [(block["start"], block["count"], block["tier"]) for block in blocks] == [
        *((start, 4, "disk") for start in range(0, 20, 4)), (20, 2, "disk"),
    ]  # fmt: skip


def test_what_cannot_be_drawn_is_refused(
    run_kvmem: Run, stored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_kvmem("workspace", "map", "notes", str(tmp_path / "a.txt")).code == 7
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run_kvmem("workspace", "map", "notes", str(tmp_path / "a.svg"))
    assert done.code == 7 and "matplotlib, which is not installed" in done.err
    assert "pip install matplotlib" in done.err and "cannot read" not in done.err


def test_a_drawn_picture_is_a_picture(run_kvmem: Run, stored: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        assert run_kvmem("workspace", "map", "notes", str(tmp_path / name)).code == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    assert run_kvmem("workspace", "map", "notes", str(tmp_path / "no" / "a.svg")).code == 7


def test_every_block_has_a_character() -> None:
    facts = [("disk", False, 0), ("disk", False, 9), ("disk", False, 10), ("tokens", False, 0)]
    facts += [("tokens", False, 3), ("tokens", False, 10), ("disk", True, 2)]
    blocks = [MapBlock(32 * i, 32, *fact) for i, fact in enumerate(facts)]
    assert list(map_lines(blocks))[-1] == "  0  .9+-c*P"
    assert list(map_lines([])) == ["the workspace is empty"]


def test_long_histories_fit_a_screen() -> None:
    blocks = [MapBlock(32 * i, 32, "disk", False, int(i == 70_000)) for i in range(312_500)]
    lines = list(map_lines(blocks))
    assert len(lines) <= 34 and max(map(len, lines)) < 110 and "1 block" not in lines[0]
    assert sum(line.split()[-1].count("1") for line in lines[2:]) == 1
    assert len(lines[2].split()[-1]) == PER_LINE
