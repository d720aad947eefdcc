"""`kvmem demo` with a text of one's own: what it asks, and what it says before and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script, recall_report

from kvmem_llama.cli import demo

Run = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time. " * 300)
    return path


def test_a_text_of_ones_own_is_not_asked_about_the_manual(
    run_kvmem: Run, script: Script, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SURE", 0.0)
    script.reports = [recall_report()]
    done = run_kvmem("demo", str(text))
    assert done.code == 0, done.err
    assert [asked[0] for asked in script.asked] == [
        'The text begins with "Once upon a time. Once upon a time. Once upon a time.". What is it about?'
    ]
    assert "No question was given (-q QUESTION)" in done.err
    assert "\nreading story.txt: 256 tokens, with a view of 512\n" in done.err
    assert "tokens/s that takes about 0 seconds\n" in done.err
    assert "2.3 times the view of 512 tokens" in done.out and "name a text" not in done.out
    assert done.out.splitlines()[-1].startswith("Next: `kvmem chat -w NAME -f FILE` ")


def test_questions_may_be_given(run_kvmem: Run, script: Script, text: Path) -> None:
    done = run_kvmem("demo", str(text), "-q", "Who?", "--question", "-Where?")
    assert [asked[0] for asked in script.asked] == ["Who?", "-Where?"]
    assert "No question" not in done.err


def test_a_text_that_fits_into_the_view_is_said_to_be_too_short(
    run_kvmem: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("Once upon a time.")
    done = run_kvmem("demo", str(tmp_path / "short.txt"))
    assert "all of it fits into the view of 512 tokens" in done.out
    assert "To see recall at work, name a text of several times 512 tokens" in done.out


def test_an_empty_text_is_refused(run_kvmem: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    done = run_kvmem("demo", str(tmp_path / "empty.txt"))
    assert done.code == 7 and "it is empty" in done.err


def test_the_manual_has_questions_of_its_own(
    run_kvmem: Run, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_kvmem("demo").code == 7
    demo.MANUAL.parent.mkdir(parents=True)
    demo.MANUAL.write_text("usage " * 30_000)
    done = run_kvmem("demo")
    assert [asked[0] for asked in script.asked] == list(demo.QUESTIONS)
    assert "\nreading llama.cpp's README of its server: " in done.err
    assert len(script.read[0][1]) == demo.N_CHARACTERS
