"""`kvmem ask` against a fake engine: what is read, what is printed where, exit codes."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import Script, recall_report

from kvmem_llama import errors

Run = Callable[..., Any]


def test_ask_prints_the_answer_and_nothing_else_when_piped(run_kvmem: Run, script: Script) -> None:
    done = run_kvmem("ask", "Where is the key?")
    assert (done.code, done.out, done.err) == (0, "The key is under the mat.\n", "")
    assert script.asked[0][:2] == ("Where is the key?", [])
    assert script.n_closed == 2  # workspace and engine


def test_an_answer_that_ends_its_line_gets_no_second_line_end(run_kvmem: Run, script: Script) -> None:
    script.answer = "Yes.\n"
    assert run_kvmem("ask", "q").out == "Yes.\n"


def test_files_are_placed_before_the_question_in_order(
    run_kvmem: Run, script: Script, tmp_path: Path
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    run_kvmem("ask", "-f", str(tmp_path / "b.txt"), "--file", str(tmp_path / "a.txt"), "q")
    assert script.asked[0][1] == [("b.txt", "text of b.txt"), ("a.txt", "text of a.txt")]


def test_piped_text_is_read_without_f_and_with_a_dash_only_where_asked(
    run_kvmem: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("A")
    run_kvmem("ask", "q", stdin=b"piped")
    run_kvmem("ask", "-f", str(tmp_path / "a"), "q", stdin=b"ignored")
    run_kvmem("ask", "-f", str(tmp_path / "a"), "-f", "-", "q", stdin=b"piped")
    assert [[text for _, text in asked[1]] for asked in script.asked] == [["piped"], ["A"], ["A", "piped"]]


def test_empty_files_and_one_character_inputs_work(run_kvmem: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "one").write_text("x")
    files = [part for name in ("empty", "bom", "one") for part in ("-f", str(tmp_path / name))]
    assert run_kvmem("ask", *files, "").code == 0
    assert script.asked[0][:2] == ("", [("one", "x")])


def test_text_that_is_not_utf8_is_read_with_replacement_and_one_warning(
    run_kvmem: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 cr\xe8me")
    done = run_kvmem("ask", "-f", str(tmp_path / "latin.txt"), "q")
    assert done.code == 0
    assert script.asked[0][1] == [("latin.txt", "caf\ufffd cr\ufffdme")]
    assert done.err.count("\n") == 1 and done.err.startswith("warning:") and "latin.txt" in done.err


def test_arguments_that_are_not_utf8_are_replaced_too(run_kvmem: Run, script: Script) -> None:
    done = run_kvmem("ask", "caf\udce9?")
    assert script.asked[0][0] == "caf\ufffd?" and "warning" in done.err


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"\x7fELF\0\0", "binary"), (b"x" * (1 << 20) + b"\0", "binary"), ("hi".encode("utf-16"), "UTF-16")],
)
def test_binary_input_is_refused_before_the_model_is_opened(
    run_kvmem: Run, script: Script, tmp_path: Path, data: bytes, why: str
) -> None:
    (tmp_path / "x").write_bytes(data)
    done = run_kvmem("ask", "-f", str(tmp_path / "x"), "q")
    assert done.code == 7 and why in done.err and script.model is None


def test_an_endless_device_is_refused(run_kvmem: Run) -> None:
    assert run_kvmem("ask", "-f", "/dev/zero", "q").code == 7


@pytest.mark.parametrize("name", ["", "missing.txt", "a\0b"])
def test_unreadable_files_are_named(run_kvmem: Run, tmp_path: Path, name: str) -> None:
    done = run_kvmem("ask", "-f", str(tmp_path / name), "q")
    assert done.code == 7 and str(tmp_path) in done.err


def test_options_reach_the_engine(run_kvmem: Run, script: Script) -> None:
    run_kvmem(
        *("ask", "-m", "m.gguf", "-c", "1024", "-n", "-1", "--temp", "0", "-s", "7", "-sys", "Be brief."),
        *("-ub", "64", "-ctk", "q8_0", "-ctv=q8_0", "-tb", "3", "-np", "2", "-ngl", "all", "--no-mmap"),
        *("--policy", "sliding_window", "--block_size", "16", "q"),
    )
    settings = script.settings
    assert settings is not None
    assert script.model == Path("m.gguf")
    assert (script.policy, script.system) == ("sliding_window", "Be brief.")
    assert (settings.n_ctx, settings.temp, settings.seed, settings.n_ubatch) == (1024, 0.0, 7, 64)
    assert (settings.cache_type_k, settings.cache_type_v) == ("q8_0", "q8_0")
    assert (settings.n_threads_batch, settings.n_parallel, settings.n_gpu_layers) == (3, 2, -2)
    assert (settings.use_mmap, settings.block_size) == (False, 16)
    assert script.asked[0][2:] == ((settings, 512), -1)


def test_the_environment_gives_options_too(
    run_kvmem: Run, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMEM_N_CTX", "256")
    run_kvmem("ask", "q")
    assert script.settings is not None and script.settings.n_ctx == 256


def test_show_recall_prints_every_block_on_standard_error(run_kvmem: Run, script: Script) -> None:
    script.reports = [recall_report(), recall_report(mid_answer=True)]
    done = run_kvmem("ask", "--show-recall", "q")
    assert done.out == "The key is under the mat.\n"
    lines = done.err.splitlines()
    assert len(lines) == 10
    assert "1 of 28 blocks selected" in lines[0] and "replay 30.0 ms" in lines[0]
    assert lines[2].split()[:5] == ["-", "-", "0..31", "0", "sink"]
    assert lines[3].split()[:5] == ["1", "4.25", "320..351", "32", "selected"]
    assert lines[4].split()[:5] == ["-", "-", "960..966", "64", "recent"]
    assert "mid-answer" in lines[5]
    assert "\x1b" not in done.err and "You are a helpful" in done.err
    assert max(map(len, lines)) < 140


def test_ask_says_what_an_interrupted_run_had_read(run_kvmem: Run, script: Script) -> None:
    script.n_reused = 1024
    note = "note: 1,024 tokens of this were read before; it went on from there\n"
    assert run_kvmem("ask", "why?").err == note
    assert run_kvmem("ask", "--json", "why?").err == ""


def test_show_recall_says_so_where_the_whole_history_is_in_the_view(run_kvmem: Run, script: Script) -> None:
    done = run_kvmem("ask", "--show-recall", "q")
    assert done.out == "The key is under the mat.\n"
    said = r"recall: not needed, the whole history \([\d,]+ tokens\) is in the view\n"
    assert re.fullmatch(said, done.err)
    assert run_kvmem("ask", "q").err == ""
    assert run_kvmem("ask", "--show-recall", "--json", "q").err == ""


def test_a_log_gets_a_line_of_progress_now_and_then(
    run_kvmem: Run, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvmem_llama.cli.progress.time.monotonic", lambda: now[0])

    def reading(tokens_per_second: float) -> str:
        def read(done: int) -> None:
            now[0] = 100.0 + done / tokens_per_second

        script.before_read = read
        done = run_kvmem("ask", "q")
        assert done.out == "The key is under the mat.\n"
        return str(done.err)

    assert reading(14) == ""
    assert reading(8) == "reading: 128 of 256 tokens, 8 tokens/s, 16 s left\n"


def test_json_prints_one_valid_object_a_line(run_kvmem: Run, script: Script) -> None:
    script.reports = [recall_report()]
    done = run_kvmem("ask", "--json", "q")
    kinds = [event["event"] for event in done.events]
    assert kinds == ["progress"] * 3 + ["recall"] + ["text"] * 6 + ["finished"]
    recall, finished = done.events[3], done.events[-1]
    assert [block["why"] for block in recall["blocks"]] == ["sink", "selected", "recent"]
    assert recall["timings"]["replay_s"] == 0.03
    assert "".join(event["text"] for event in done.events if event["event"] == "text") == finished["text"]
    assert finished["timings"]["decode_s"] is None  # not a number
    assert "recalls" not in finished and finished["finish_reason"] == "stop"


def test_json_ends_with_the_error(run_kvmem: Run, script: Script) -> None:
    script.error = errors.MandatoryTooLarge(700, 512)
    done = run_kvmem("ask", "--json", "q")
    assert done.code == 5
    assert done.events[-1]["event"] == "error" and done.events[-1]["error"] == "MandatoryTooLarge"
    assert done.events[-1]["exit_code"] == 5


# errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ModelNotFound("m"), 3),
        (errors.ModelCorrupt("m", "cut short"), 3),
        (errors.ModelUnsupported("gpt2", "positions", hint="Try full_context."), 3),
        (errors.LibraryMismatch("a stock library"), 4),
        (errors.MandatoryTooLarge(9, 8), 5),
        (errors.DecodeFailed(-3), 6),
        (errors.WorkspaceBusy(), 7),
    ],
)
def test_errors_are_one_or_two_lines_and_an_exit_code(
    run_kvmem: Run, script: Script, error: errors.KvmemError, code: int
) -> None:
    script.open_error = error
    done = run_kvmem("ask", "q")
    assert (done.code, done.out) == (code, "")
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ") and 1 <= len(lines) <= 2
    assert lines[1] == error.hint


def test_a_defect_is_said_without_a_traceback_unless_asked_for(run_kvmem: Run, script: Script) -> None:
    script.open_error = ZeroDivisionError("division\nby zero")
    done = run_kvmem("ask", "q")
    assert done.code == 1
    assert done.err.splitlines()[0] == "internal error: ZeroDivisionError: division by zero"
    assert "Traceback" not in done.err and "--verbose" in done.err
    assert "Traceback" in run_kvmem("ask", "-v", "q").err


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask"], ["ask", "--foo", "q"], ["ask", "q", "extra"], ["frob"], ["ask", "-c"],
        ["ask", "-c", "-1", "q"],
        ["ask", "-c", "many", "q"], ["ask", "--temp", "nan", "q"], ["ask", "--policy", "lru", "q"],
        ["ask", "-ub", "-1", "q"], ["chat", "q"], ["doctor", "--mmap=1"],
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_code_two_and_at_most_two_lines(run_kvmem: Run, arguments: list[str]) -> None:
    done = run_kvmem(*arguments)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: ") and len(done.err.splitlines()) == 2


def test_ctrl_c_cancels_the_question(run_kvmem: Run, script: Script) -> None:
    def interrupt(i: int) -> None:
        if i == 2:
            signal.raise_signal(signal.SIGINT)

    script.before_piece = interrupt
    done = run_kvmem("ask", "q")
    assert (done.code, done.out) == (130, "The key\n")
    assert "Traceback" not in done.err


def test_a_closed_pipe_is_quiet(run_kvmem: Run, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    done = run_kvmem("ask", "q")
    assert (done.code, done.err) == (141, "")


# full disks, Ctrl-C while loading: in a process of their own, for how Python ends is a part of it

DRIVER = """
import sys
from pathlib import Path
import kvmem_llama.models
from fake_engine import Script
from kvmem_llama.cli.entry import main
sys.modules["kvmem_llama.workspace"] = Script().module()
kvmem_llama.models.resolve = lambda *_: Path("m")
sys.exit(main())
"""
TESTS = Path(__file__).resolve().parents[1]
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def run_process(code: str, *arguments: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        timeout=60,
        **streams,
    )


@needs_full
@pytest.mark.parametrize("arguments", [["ask", "q"], ["ask", "--json", "q"], ["--help"], ["--version"]])
def test_a_full_disk_under_standard_output_is_said_and_is_no_defect(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = run_process(DRIVER, *arguments, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    first, second = done.stderr.decode().splitlines()
    assert first == f"error: cannot write the answer: {os.strerror(errno.ENOSPC)}"
    assert second.endswith("elsewhere.")


@needs_full
def test_a_full_disk_under_standard_error_does_not_take_the_answer_along() -> None:
    with open("/dev/full", "wb") as full:
        done = run_process(DRIVER, "ask", "--", "caf\udce9?", stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (0, b"The key is under the mat.\n")


def test_ctrl_c_while_the_command_is_being_loaded_shows_no_traceback() -> None:
    code = """
import builtins, signal, sys
load = builtins.__import__
def interrupted(name, *rest):
    if name == "typer":
        signal.raise_signal(signal.SIGINT)
    return load(name, *rest)
builtins.__import__ = interrupted
from kvmem_llama.cli.entry import main
sys.exit(main())
"""
    done = run_process(code, "ask", "q", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_installed_command_starts_with_the_entry_that_minds_ctrl_c() -> None:
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"kvmem": "kvmem_llama.cli.entry:main"}
