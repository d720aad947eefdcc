"""The chat in a terminal, against a fake engine: keys, signals, what stands on the screen."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from terminal import PATIENCE, TESTS, Terminal

ESCAPE = "\x1b"
CTRL_C, CTRL_D, CTRL_G, TAB = "\x03", "\x04", "\x07", "\t"
READY = "ask something, or /help"  # in the empty line of a chat that waits
ANSWER = "The key is under the mat."

Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts a chat in a terminal -> the terminal. `script`: of chat_driver."""
    terminals: list[Terminal] = []

    def run(
        *options: str,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
        command: str = "chat",
        stderr: Path | None = None,
        **script: Any,
    ) -> Terminal:
        script["log"] = str(tmp_path / "log.json")
        driver = [sys.executable, str(TESTS / "chat_driver.py"), json.dumps(script), command, *options]
        terminals.append(Terminal(driver, columns=columns, rows=rows, env=env, stderr=stderr))
        return terminals[-1]

    yield run
    for terminal in terminals:
        terminal.__exit__(None, None, None)


def seen(tmp_path: Path) -> dict[str, Any]:
    """What the engine was asked; once the program has ended."""
    found: dict[str, Any] = json.loads((tmp_path / "log.json").read_text(encoding="utf-8"))
    return found


def wait_until_held(tmp_path: Path) -> None:
    """The engine has begun to wait."""
    for _ in range(int(100 * PATIENCE)):
        if (tmp_path / "log.json.held").exists():
            return
        time.sleep(0.01)
    pytest.fail("the engine was asked nothing")


def shows(terminal: Terminal, wanted: str, n: int = 1) -> str:
    """Waits until `wanted` is there n times and the chat waits for a message again -> the screen."""
    return terminal.wait_for(lambda text: text.count(wanted) == n and f"> {READY}" in text)


# -- a chat from start to end


def test_a_chat_shows_the_answer_the_state_of_memory_and_ends_with_ctrl_d(
    start: Start, tmp_path: Path, isolated_home: Path
) -> None:
    terminal = start(recalls=True)
    text = terminal.wait_for(READY)
    assert text.startswith("workspace unnamed, which ends with the chat: empty\nkvmem chat -w NAME begins")
    assert "\nCtrl-C stops an answer" in text
    terminal.type("where is the key?\r")
    text = shows(terminal, "· 10 tokens ·")
    assert f"> where is the key?\n{ANSWER}\n> {READY}" in text
    bar = text.splitlines()[-1]
    assert bar.startswith("workspace unnamed · 10 tokens · view 10/512 · recalled 1 block (1 new)"), bar
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert seen(tmp_path)["asked"] == ["where is the key?"]
    history = isolated_home / ".local/state/kvmem/chat_history"
    assert "+where is the key?" in history.read_text() and stat.S_IMODE(history.stat().st_mode) == 0o600


def test_keys_complete_search_the_past_and_make_lines(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes one.txt").write_text("N")
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "from the editor" > "$1"\n')
    editor.chmod(0o755)
    terminal = start(env={"EDITOR": str(editor), "VISUAL": str(editor)})
    terminal.wait_for(READY)
    terminal.type("/sta" + TAB)
    terminal.wait_for("> /stats")
    terminal.type("\r")
    shows(terminal, "tokens in view")
    terminal.type(f"/read {tmp_path}/not{TAB}")
    terminal.wait_for("notes one.txt")
    terminal.type("\r")
    shows(terminal, "[read notes one.txt")
    terminal.type(f"one{ESCAPE}\rtwo\r")  # Alt-Enter
    shows(terminal, ANSWER, 1)
    terminal.type('"""three\r\rfour"""\r')
    shows(terminal, ANSWER, 2)
    terminal.type(f"{ESCAPE}[A")  # up: the last message, in quotes
    terminal.wait_for(lambda text: text.count('four"""') == 2)
    terminal.type(CTRL_C)
    shows(terminal, "Ctrl-C stops an answer", 2)
    terminal.type(CTRL_G)
    terminal.wait_for("> from the editor")
    terminal.type("\r")
    shows(terminal, ANSWER, 3)
    terminal.type("/edit\r")
    terminal.wait_for("> /edit from the editor")
    terminal.type(" again\r")
    shows(terminal, ANSWER, 4)
    terminal.type("/exit\r")
    assert terminal.ended() == 0
    assert seen(tmp_path)["asked"] == [
        "one\ntwo",
        "three\n\nfour",
        "from the editor",
        "from the editor again",
    ]


def test_questions_of_commands_are_asked_and_answered(start: Start, tmp_path: Path) -> None:
    terminal = start(answer="Here:\n\n```sh\nls -l\n```\n")
    terminal.wait_for(READY)
    terminal.type("one\r")
    shows(terminal, "ls -l")
    terminal.type("/forget\r")
    terminal.wait_for("Forget all")
    terminal.type("n\r")
    shows(terminal, "[nothing was forgotten]")
    terminal.type("/copy 1\r")
    shows(terminal, "[copied block 1")
    assert base64.b64encode(b"ls -l\n") in terminal.raw
    terminal.type("/forget\r")
    terminal.wait_for(lambda text: text.count("Forget all") == 2)
    terminal.type("y\r")
    shows(terminal, "tokens are forgotten]")
    terminal.type("/paste\r")
    terminal.wait_for("text, then /end:")
    terminal.type("one\rtwo\r/end\r")
    shows(terminal, "[read pasted text")
    terminal.type("/forget\r")
    terminal.wait_for(lambda text: text.count("Forget all") == 3)
    terminal.type(CTRL_C)
    shows(terminal, "[stopped]")
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert seen(tmp_path)["read"] == [["pasted text", "one\ntwo"]]


# -- Ctrl-C and SIGTERM


def test_ctrl_c_at_the_prompt_says_how_to_end_and_a_second_one_ends(start: Start) -> None:
    terminal = start()
    terminal.wait_for(READY)
    terminal.type("half a mess" + CTRL_C)
    shows(terminal, "Ctrl-C stops an answer", 2)
    terminal.type(CTRL_C)
    assert terminal.ended() == 130


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(start: Start, tmp_path: Path) -> None:
    terminal = start(hold_piece=2)
    terminal.wait_for(READY)
    terminal.type("one\r")
    terminal.wait_for("The key")
    terminal.type("typed meanwhile" + CTRL_C)
    text = shows(terminal, "[stopped: the answer is kept as far as it goes]")
    assert "The key\n" in text and "The keytyped" not in text
    terminal.type("/undo\r")
    shows(terminal, "[taken back: one]")
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert seen(tmp_path)["committed"] == ["truncated"]


def test_ctrl_c_while_reading_stops_it_and_says_what_is_kept(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("N")
    terminal = start(hold_read=128)
    terminal.wait_for(READY)
    terminal.type(f"/read {tmp_path}/notes\r")
    wait_until_held(tmp_path)
    terminal.type(CTRL_C)
    text = shows(terminal, "[stopped at notes: ")
    assert "It is no part of the history; /read goes on from there" in text.replace("\n", "")
    terminal.type(CTRL_D)
    assert terminal.ended() == 0


def test_a_second_ctrl_c_during_an_answer_ends_the_chat(start: Start) -> None:
    terminal = start(hold_piece=2, deaf=True)
    terminal.wait_for(READY)
    terminal.type("one\r")
    terminal.wait_for("The key")
    while terminal.process.poll() is None:  # on a slow machine two in a row may be a second apart
        terminal.type(CTRL_C)
        time.sleep(0.1)
    assert terminal.ended() in (
        130,
        -signal.SIGINT,
    )  # it may be hit again on its way out; both are 130 to a shell


@pytest.mark.parametrize("during", ["prompt", "answer", "read"])
def test_sigterm_keeps_what_was_answered_and_ends_well(start: Start, tmp_path: Path, during: str) -> None:
    holds: dict[str, Any] = {"prompt": {}, "answer": {"hold_piece": 2}, "read": {"hold_read": 128}}
    terminal = start(**holds[during])
    terminal.wait_for(READY)
    if during != "prompt":
        terminal.type("one\r")
        wait_until_held(tmp_path)
    terminal.signal(signal.SIGTERM)
    assert terminal.ended() == 0
    assert seen(tmp_path)["committed"] == (["truncated"] if during == "answer" else [])


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_pipes_carry_a_chat_and_sigterm_ends_it(tmp_path: Path, options: list[str]) -> None:
    script = json.dumps({"hold_piece": 2, "log": str(tmp_path / "log.json")})
    driver = [sys.executable, str(TESTS / "chat_driver.py"), script, "chat", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with subprocess.Popen(driver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        said = b""
        while b"key" not in said:
            said += os.read(process.stdout.fileno(), 4096)
        process.send_signal(signal.SIGTERM)
        said += process.stdout.read()
        assert process.wait() == 0
    if not options:
        assert said == b"The key\n"
    assert seen(tmp_path)["committed"] == ["truncated"]


# -- screens of every kind


def test_200_kb_can_be_pasted_into_a_message(start: Start, tmp_path: Path) -> None:
    pasted = "".join(f"line {i} of a long log\n" for i in range(9000))
    assert len(pasted) > 200_000
    terminal = start()
    terminal.wait_for(READY)
    terminal.type("what is this: ")
    terminal.paste(pasted)
    terminal.wait_for("what is this: [pasted text 1: 9,001 lines")
    terminal.type("\r")
    shows(terminal, ANSWER)
    terminal.paste("short\npaste")
    terminal.wait_for("  paste")
    terminal.type("\r")
    shows(terminal, ANSWER, 2)
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert seen(tmp_path)["asked"] == ["what is this: " + pasted.strip("\n"), "short\npaste"]


def test_wide_characters_and_a_new_size_leave_the_screen_in_order(start: Start, tmp_path: Path) -> None:
    wide = "日本語の長い文章がここにあります。" * 4
    terminal = start(columns=50, rows=16, answer=f"# 見出し\n\n{wide}\n\nEnd.")
    terminal.wait_for(READY)
    terminal.type("鍵はどこ。\r")
    text = shows(terminal, "End.")
    assert "".join(text.split()).count("".join(wide.split())) == 1 and "# 見出し" not in text
    terminal.resize(70, 20)
    terminal.wait_for(lambda text: "workspace unnamed" in text.splitlines()[-1])
    terminal.type("and again?\r")
    shows(terminal, "End.", 2)
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert seen(tmp_path)["asked"] == ["鍵はどこ。", "and again?"]


COLOR = re.compile(rb"\x1b\[[\d;]*\b(3[0-7]|4[0-7]|9[0-7]|38|48)\b[\d;]*m")


def test_no_color_is_heeded(start: Start) -> None:
    for env, colored in (({}, True), ({"NO_COLOR": "1"}, False)):
        terminal = start(answer="Some `code` and [a link](http://x).\n\nEnd.", env=env)
        terminal.wait_for(READY)
        terminal.type("one\r")
        shows(terminal, "End.")
        terminal.type(CTRL_D)
        assert terminal.ended() == 0
        assert bool(COLOR.search(terminal.raw)) is colored, env


@pytest.mark.parametrize("how", ["dumb", "simple-io"])
def test_plain_terminals_get_plain_lines(start: Start, tmp_path: Path, how: str) -> None:
    terminal = start(
        *(["--simple-io"] if how == "simple-io" else []),
        env={"TERM": "dumb"} if how == "dumb" else {},
        answer="<think>hm</think>Some **bold** text.",
    )
    terminal.wait_for(lambda text: text.endswith("> ") or "\n>" in text)
    terminal.type("one\n")
    terminal.wait_for("Some **bold** text.")
    terminal.type("/forget\n")
    terminal.wait_for("[y/N]")
    terminal.type("y\n")
    terminal.wait_for("tokens are forgotten")
    terminal.type(CTRL_D)
    assert terminal.ended() == 0
    assert b"\x1b[" not in re.sub(rb"\x1b\[\?(2004|1034)[hl]", b"", terminal.raw)  # readline's own
    assert seen(tmp_path)["asked"] == ["one"]


def test_ask_shows_progress_in_a_terminal_and_then_only_the_answer(start: Start) -> None:
    terminal = start("q", command="ask", answer="The \x1b[31mkey is here.", read_pause=0.4)
    assert terminal.ended() == 0
    seen = terminal.raw.decode()
    assert "reading" in seen and "128/256 tokens" in seen and "tokens/s" in seen
    assert seen.endswith("The [31mkey is here.\r\n")  # without the character that starts a colour


def test_progress_is_not_shown_unless_both_streams_are_terminals(start: Start, tmp_path: Path) -> None:
    terminal = start("q", command="ask", read_pause=0.4, stderr=tmp_path / "errors")
    assert terminal.ended() == 0
    assert terminal.raw == f"{ANSWER}\r\n".encode() and (tmp_path / "errors").read_text() == ""


def test_progress_with_time_left_is_shown_while_a_chat_reads(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("N")
    terminal = start(read_pause=0.4)
    terminal.wait_for(READY)
    terminal.type(f"/read {tmp_path}/notes\r")
    shows(terminal, "[read notes: 256 tokens]")
    assert b"128/256 tokens" in terminal.raw and re.search(rb"\d:\d\d:\d\d|-:--:--", terminal.raw)
    assert os.path.basename(str(tmp_path)) in terminal.text
