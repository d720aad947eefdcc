"""`kvmem chat` against a fake engine, without a terminal: turns and Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script

from kvmem_llama import errors
from kvmem_llama.cli import interrupts
from kvmem_llama.cli.main import main

Run = Callable[..., Any]


def test_chat_answers_every_line_until_the_input_ends(run_kvmem: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("N")
    done = run_kvmem("chat", "-f", str(tmp_path / "notes"), stdin=b"one\n\ntwo \xff\n/exit\nthree\n")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert done.err.startswith("warning: the message is not UTF-8 (first at byte 4)")
    assert done.out == "The key is under the mat.\n" * 2
    assert [asked[:2] for asked in script.asked] == [("one", [("notes", "N")]), ("two \ufffd", [])]


def test_a_message_that_does_not_fit_is_reported_and_the_chat_goes_on(
    run_kvmem: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("N")
    script.error = errors.MandatoryTooLarge(700, 512)
    done = run_kvmem("chat", "-f", str(tmp_path / "notes"), stdin=b"one\ntwo\n")
    assert done.code == 5 and "700" in done.err  # a script must see it
    assert [len(asked[1]) for asked in script.asked] == [1, 1]  # the file is still to be read


def test_a_chat_without_standard_input_ends_at_once(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat"]) == 0
    assert capsys.readouterr().err == "" and script.asked == []


def test_a_broken_engine_ends_the_chat(run_kvmem: Run, script: Script) -> None:
    script.error = errors.EngineClosed()
    done = run_kvmem("chat", stdin=b"one\ntwo\n")
    assert done.code == 6 and len(script.asked) == 1


def test_ctrl_c_stops_the_answer_and_keeps_it(run_kvmem: Run, script: Script) -> None:
    def interrupt(i: int) -> None:
        if i == 2 and len(script.asked) == 1:
            signal.raise_signal(signal.SIGINT)
            assert script.told.wait(10)

    script.before_piece = interrupt
    done = run_kvmem("chat", stdin=b"one\ntwo\n")
    assert done.code == 0 and "stopped" in done.err
    assert script.committed == ["truncated", "stop"]
    assert script.n_cancelled == 0


def test_ctrl_c_while_reading_takes_the_message_back(run_kvmem: Run, script: Script) -> None:
    def interrupt(done: int) -> None:
        if done == 128:
            signal.raise_signal(signal.SIGINT)
            assert script.told.wait(10)

    script.before_read = interrupt
    done = run_kvmem("chat", stdin=b"one\n")
    assert done.code == 0 and "cancelled" in done.err
    assert script.committed == [] and script.n_cancelled == 1


def test_a_second_ctrl_c_within_a_second_ends_the_chat(run_kvmem: Run, script: Script) -> None:
    def interrupt(i: int) -> None:
        if i == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    script.before_piece = interrupt
    done = run_kvmem("chat", stdin=b"one\ntwo\n")
    assert done.code == 130 and len(script.asked) == 1
    assert script.n_closed == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_presses_further_apart_than_the_window_are_first_ones() -> None:
    now = 0.0
    presses = interrupts.Interrupts(lambda: now)
    seen = []
    for now in (0.0, 2.0, 2.9, 4.0):  # noqa: B007 (the clock reads it)
        seen.append(presses.second())
    assert seen == [False, False, True, False]
    presses.forget()  # a message was sent
    assert not presses.second() and presses.second()
