"""`kvmem recall` against a fake engine: what is searched, what is printed, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script

from kvmem_llama.cli.recall_table import recall_lines
from kvmem_llama.errors import MandatoryTooLarge
from kvmem_llama.memory.positions import TokenPos, ViewPos
from kvmem_llama.memory.report import RecalledBlock, RecallReport, RecallTimings

Run = Callable[..., Any]


def test_blocks_are_shown_with_their_ranks(run_kvmem: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("text of notes")
    done = run_kvmem("recall", "-f", str(tmp_path / "notes"), "where is the key")
    assert (done.code, done.err) == (0, "")
    assert script.read == [("notes", "text of notes")] and script.searched == [("where is the key", 10)]
    first, head, *lines = done.out.splitlines()
    assert first == "2 of 7 blocks that are not in every view anyway"
    assert head.split() == ["rank", "score", "tokens", "tier", "age", "found", "by", "text"]
    assert [line.split()[:5] for line in lines] == [
        ["1", "0.5", "128..159", "disk", "4"],
        ["2", "0", "64..95", "device", "1"],
    ]
    assert "mean_k 1, lexical 3 (-)" in lines[0] and lines[0].endswith("the key is under")


def test_marks_say_how_the_rows_of_a_block_came_to_be() -> None:
    block = RecalledBlock(TokenPos(32), 32, 1, 0.5, "selected", ViewPos(32), False, "text")
    marks = {"recomputed": "*", "carried": "+", "held": "=", "refreshed": "~"}
    for name, mark in marks.items():
        times = RecallTimings(0.0, 0.0, 0.0, 0.0)
        report = RecallReport((replace(block, **{name: True}),), 64, 1, 1, times, False, False)
        assert f" selected{mark} " in list(recall_lines(report))[-1]


def test_as_json_it_is_one_object(run_kvmem: Run, script: Script) -> None:
    done = run_kvmem("recall", "-w", "notes", "-k", "1", "--json", "key")
    (found,) = map(json.loads, done.out.splitlines())
    assert (found["event"], found["n_candidates"]) == ("found", 7)
    assert found["blocks"] == [
        {
            "start": 128,
            "count": 32,
            "ranks": {"mean_k": 1, "lexical": 3},
            "text": "the key\nis under",
            "own": {"mean_k": 1},
            "score": 0.5,
            "tier": "disk",
            "age": 4,
        }
    ]
    assert script.name == "notes" and script.searched == [("key", 1)]


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_query_that_does_not_fit_is_an_error(run_kvmem: Run, script: Script, json_flag: list[str]) -> None:
    script.error = MandatoryTooLarge(700, 512)
    done = run_kvmem("recall", "-w", "notes", *json_flag, "key")
    assert done.code == 5 and "700" in done.err
    assert ("error" in done.out) == bool(json_flag)


def test_without_a_text_there_is_nothing_to_search(run_kvmem: Run, script: Script) -> None:
    done = run_kvmem("recall", "key")
    assert done.code and "-w NAME" in done.err and not script.searched
