"""`kvmem chat` against a fake engine: turns, Ctrl-C, and both commands on a terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script

from kvmem_llama import errors
from kvmem_llama.cli import interrupts
from kvmem_llama.cli.main import main

Run = Callable[..., Any]
TESTS = Path(__file__).resolve().parents[1]
needs_terminal = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


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


# terminals

DRIVER = """
import sys
from pathlib import Path
import kvmem_llama.models
from fake_engine import Script
from kvmem_llama.cli.main import main
script = Script(answer="The \\x1b[31mkey is here.", read_pause=0.4)
sys.modules["kvmem_llama.workspace"] = script.module()
kvmem_llama.models.resolve = lambda *_: Path("m")
sys.exit(main(sys.argv[1:]))
"""


def on_terminal(
    *arguments: str, keys: tuple[bytes, ...] = (), errors_apart: bool = False
) -> tuple[int, str, str]:
    """Exit code, what the terminal got, what a separate standard error got. `keys`: one entry a prompt."""
    import pty  # not on every system

    leader, follower = pty.openpty()
    path = os.pathsep.join([str(TESTS), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE if errors_apart else follower,
        env={**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(follower)
    seen, left = b"", list(keys)
    deadline = threading.Timer(60, process.kill)
    deadline.start()
    with contextlib.suppress(OSError):  # EIO: the other end was closed
        while piece := os.read(leader, 4096):
            seen += piece
            if left and seen.count(b"> ") > len(keys) - len(left):
                os.write(leader, left.pop(0))
    os.close(leader)
    _, apart = process.communicate()
    deadline.cancel()
    return process.returncode, seen.decode(), (apart or b"").decode()


@needs_terminal
def test_a_terminal_shows_progress_while_a_long_text_is_read_and_then_only_the_answer() -> None:
    code, seen, _ = on_terminal("ask", "q")
    assert code == 0
    assert "reading" in seen and "128/256 tokens" in seen and "tokens/s" in seen
    assert seen.endswith("The [31mkey is here.\r\n")  # without the character that starts a colour


@needs_terminal
def test_progress_is_not_shown_unless_both_streams_are_terminals() -> None:
    _, seen, apart = on_terminal("ask", "q", errors_apart=True)
    assert "reading" not in seen and apart == ""


@needs_terminal
def test_a_chat_in_a_terminal_has_a_prompt_and_ends_with_ctrl_d() -> None:
    code, seen, _ = on_terminal("chat", keys=(b"hello\n", b"\x04"))
    assert code == 0
    assert seen.count("> ") == 2 and "Ctrl-C stops" in seen and "key is here." in seen
