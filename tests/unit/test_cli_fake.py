"""The `kvmem` command against a fake engine: what is printed where, exit codes, interrupts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import Script, recall_report
from tiny_models import truncate, write_model

from kvmem_llama import errors
from kvmem_llama.cli import interrupts
from kvmem_llama.cli.main import app, main
from kvmem_llama.cli.options import spell_out
from kvmem_llama.settings import OPTIONS

Run = Callable[..., "Done"]
TESTS = Path(__file__).resolve().parents[1]
needs_terminal = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


class Done:
    """What a run left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.events = [json.loads(line) for line in out.splitlines()] if out.startswith("{") else []


class Pipe(io.TextIOWrapper):
    """Standard input that is not a terminal."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setitem(sys.modules, "kvmem_llama.workspace", script.module())
    sampler = SimpleNamespace(SamplingParams=SimpleNamespace(of=lambda settings, n_view: (settings, n_view)))
    monkeypatch.setitem(sys.modules, "kvmem_llama.engine.sampler", sampler)
    monkeypatch.setattr(
        "kvmem_llama.models.resolve", lambda spec, cache, notify=None: Path(spec or "built-in")
    )
    return script


@pytest.fixture
def run(script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", Pipe(stdin))
        code = main(arguments)
        caught = capsys.readouterr()
        return Done(code, caught.out, caught.err)

    return run


# ask


def test_ask_prints_the_answer_and_nothing_else_when_piped(run: Run, script: Script) -> None:
    done = run("ask", "Where is the key?")
    assert (done.code, done.out, done.err) == (0, "The key is under the mat.\n", "")
    assert script.asked[0][:2] == ("Where is the key?", [])
    assert script.n_closed == 2  # workspace and engine


def test_an_answer_that_ends_its_line_gets_no_second_line_end(run: Run, script: Script) -> None:
    script.answer = "Yes.\n"
    assert run("ask", "q").out == "Yes.\n"


def test_files_are_placed_before_the_question_in_order(run: Run, script: Script, tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    run("ask", "-f", str(tmp_path / "b.txt"), "--file", str(tmp_path / "a.txt"), "q")
    assert script.asked[0][1] == [("b.txt", "text of b.txt"), ("a.txt", "text of a.txt")]


def test_piped_text_is_read_without_f_and_with_a_dash_only_where_asked(
    run: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("A")
    run("ask", "q", stdin=b"piped")
    run("ask", "-f", str(tmp_path / "a"), "q", stdin=b"ignored")
    run("ask", "-f", str(tmp_path / "a"), "-f", "-", "q", stdin=b"piped")
    assert [[text for _, text in asked[1]] for asked in script.asked] == [["piped"], ["A"], ["A", "piped"]]


def test_empty_files_and_one_character_inputs_work(run: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "one").write_text("x")
    files = [part for name in ("empty", "bom", "one") for part in ("-f", str(tmp_path / name))]
    assert run("ask", *files, "").code == 0
    assert script.asked[0][:2] == ("", [("one", "x")])


def test_text_that_is_not_utf8_is_read_with_replacement_and_one_warning(
    run: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 cr\xe8me")
    done = run("ask", "-f", str(tmp_path / "latin.txt"), "q")
    assert done.code == 0
    assert script.asked[0][1] == [("latin.txt", "caf\ufffd cr\ufffdme")]
    assert done.err.count("\n") == 1 and done.err.startswith("warning:") and "latin.txt" in done.err


def test_arguments_that_are_not_utf8_are_replaced_too(run: Run, script: Script) -> None:
    done = run("ask", "caf\udce9?")
    assert script.asked[0][0] == "caf\ufffd?" and "warning" in done.err


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"\x7fELF\0\0", "binary"), (b"x" * (1 << 20) + b"\0", "binary"), ("hi".encode("utf-16"), "UTF-16")],
)
def test_binary_input_is_refused_before_the_model_is_opened(
    run: Run, script: Script, tmp_path: Path, data: bytes, why: str
) -> None:
    (tmp_path / "x").write_bytes(data)
    done = run("ask", "-f", str(tmp_path / "x"), "q")
    assert done.code == 7 and why in done.err and script.model is None


def test_an_endless_device_is_refused(run: Run) -> None:
    assert run("ask", "-f", "/dev/zero", "q").code == 7


@pytest.mark.parametrize("name", ["", "missing.txt", "a\0b"])
def test_unreadable_files_are_named(run: Run, tmp_path: Path, name: str) -> None:
    done = run("ask", "-f", str(tmp_path / name), "q")
    assert done.code == 7 and str(tmp_path) in done.err


def test_options_reach_the_engine(run: Run, script: Script) -> None:
    run(
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


def test_the_environment_gives_options_too(run: Run, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMEM_N_CTX", "256")
    run("ask", "q")
    assert script.settings is not None and script.settings.n_ctx == 256


def test_show_recall_prints_every_block_on_standard_error(run: Run, script: Script) -> None:
    script.reports = [recall_report(), recall_report(mid_answer=True)]
    done = run("ask", "--show-recall", "q")
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


def test_json_prints_one_valid_object_a_line(run: Run, script: Script) -> None:
    script.reports = [recall_report()]
    done = run("ask", "--json", "q")
    kinds = [event["event"] for event in done.events]
    assert kinds == ["progress"] * 3 + ["recall"] + ["text"] * 6 + ["finished"]
    recall, finished = done.events[3], done.events[-1]
    assert [block["why"] for block in recall["blocks"]] == ["sink", "selected", "recent"]
    assert recall["timings"]["replay_s"] == 0.03
    assert "".join(event["text"] for event in done.events if event["event"] == "text") == finished["text"]
    assert finished["timings"]["decode_s"] is None  # not a number
    assert "recalls" not in finished and finished["finish_reason"] == "stop"


def test_json_ends_with_the_error(run: Run, script: Script) -> None:
    script.error = errors.MandatoryTooLarge(700, 512)
    done = run("ask", "--json", "q")
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
    run: Run, script: Script, error: errors.KvmemError, code: int
) -> None:
    script.open_error = error
    done = run("ask", "q")
    assert (done.code, done.out) == (code, "")
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ") and 1 <= len(lines) <= 2
    assert lines[1] == error.hint


def test_a_defect_is_said_without_a_traceback_unless_asked_for(run: Run, script: Script) -> None:
    script.open_error = ZeroDivisionError("division\nby zero")
    done = run("ask", "q")
    assert done.code == 1
    assert done.err.splitlines()[0] == "internal error: ZeroDivisionError: division by zero"
    assert "Traceback" not in done.err and "--verbose" in done.err
    assert "Traceback" in run("ask", "-v", "q").err


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask"], ["ask", "--foo", "q"], ["ask", "q", "extra"], ["frob"], ["ask", "-c"],
        ["ask", "-c", "-1", "q"],
        ["ask", "-c", "many", "q"], ["ask", "--temp", "nan", "q"], ["ask", "--policy", "lru", "q"],
        ["ask", "-ub", "0", "q"], ["chat", "q"], ["doctor", "--mmap=1"],
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_code_two_and_at_most_two_lines(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith("error: ") and len(done.err.splitlines()) == 2


def test_ctrl_c_cancels_the_question(run: Run, script: Script) -> None:
    def interrupt(i: int) -> None:
        if i == 2:
            signal.raise_signal(signal.SIGINT)

    script.before_piece = interrupt
    done = run("ask", "q")
    assert (done.code, done.out) == (130, "The key\n")
    assert "Traceback" not in done.err


def test_a_closed_pipe_is_quiet(run: Run, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "__stdout__", None)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert run("ask", "q").code == 141


# chat


def test_chat_answers_every_line_until_the_input_ends(run: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("N")
    done = run("chat", "-f", str(tmp_path / "notes"), stdin=b"one\n\ntwo \xff\n/exit\nthree\n")
    assert (done.code, done.err) == (0, "")
    assert done.out == "The key is under the mat.\n" * 2
    assert [asked[:2] for asked in script.asked] == [("one", [("notes", "N")]), ("two \ufffd", [])]


def test_a_message_that_does_not_fit_is_reported_and_the_chat_goes_on(
    run: Run, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("N")
    script.error = errors.MandatoryTooLarge(700, 512)
    done = run("chat", "-f", str(tmp_path / "notes"), stdin=b"one\ntwo\n")
    assert done.code == 0 and "700" in done.err
    assert [len(asked[1]) for asked in script.asked] == [1, 1]  # the file is still to be read


def test_a_broken_engine_ends_the_chat(run: Run, script: Script) -> None:
    script.error = errors.EngineClosed()
    done = run("chat", stdin=b"one\ntwo\n")
    assert done.code == 6 and len(script.asked) == 1


def test_ctrl_c_stops_the_answer_and_keeps_it(run: Run, script: Script) -> None:
    def interrupt(i: int) -> None:
        if i == 2 and len(script.asked) == 1:
            signal.raise_signal(signal.SIGINT)
            assert script.told.wait(10)

    script.before_piece = interrupt
    done = run("chat", stdin=b"one\ntwo\n")
    assert done.code == 0 and "stopped" in done.err
    assert script.committed == ["truncated", "stop"]
    assert script.n_cancelled == 0


def test_ctrl_c_while_reading_takes_the_message_back(run: Run, script: Script) -> None:
    def interrupt(done: int) -> None:
        if done == 128:
            signal.raise_signal(signal.SIGINT)
            assert script.told.wait(10)

    script.before_read = interrupt
    done = run("chat", stdin=b"one\n")
    assert done.code == 0 and "cancelled" in done.err
    assert script.committed == [] and script.n_cancelled == 1


def test_a_second_ctrl_c_within_a_second_ends_the_chat(run: Run, script: Script) -> None:
    def interrupt(i: int) -> None:
        if i == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    script.before_piece = interrupt
    done = run("chat", stdin=b"one\ntwo\n")
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


# doctor, help, spelling


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native libraries that look well."""
    here = SimpleNamespace(path=Path("/lib/lib.so"), patch_id="p1", isa="avx2")
    for name in ("library", "kernels"):
        module = SimpleNamespace(load=lambda: here)
        monkeypatch.setitem(sys.modules, f"kvmem_llama.native.{name}", module)
        monkeypatch.setattr(f"kvmem_llama.native.{name}", module, raising=False)
    plan = SimpleNamespace(cells_needed=lambda settings, n_view: n_view * settings.n_parallel)
    monkeypatch.setitem(sys.modules, "kvmem_llama.engine.context", plan)


@pytest.mark.usefixtures("built")
def test_doctor_shows_what_was_built_and_the_memory_plan(run: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    done = run("doctor", "-m", str(model), "-c", "512", "-ctk", "q8_0", "--json")
    (report,) = done.events
    assert done.code == 0 and report["kernels"]["instruction_set"] == "avx2"
    assert report["model"]["architecture"] == "llama" and report["model"]["key_heads"] == 2
    assert report["memory"]["view_tokens"] == 512
    assert report["memory"]["cell_bytes_per_token"] == 2 * 2 * (64 * 8.5 + 64 * 16) / 8
    assert report["memory"]["index_bytes_per_token"] == 2 * 2 * 64 * 2 / 32
    text = run("doctor", "-m", str(model), "-c", "512").out
    assert "patch id" in text and "trained window tokens      2,048" in text


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("kind", "code"), [("gpt2", 3), ("bert", 3), ("cut", 3), ("gpt2 in full context", 0)]
)
def test_doctor_says_what_is_wrong_with_a_model(run: Run, tmp_path: Path, kind: str, code: int) -> None:
    model = write_model(tmp_path / "m.gguf", "llama" if kind == "cut" else kind.split()[0])
    if kind == "cut":
        truncate(model, model, 0.5)
    more = ["--policy", "full_context"] if kind.endswith("full context") else []
    done = run("doctor", "-m", str(model), *more)
    assert done.code == code and ("error" in done.out) == bool(code) and done.err == ""


@pytest.mark.usefixtures("built")
def test_doctor_goes_on_when_a_library_is_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise errors.LibraryMissing("libllama is missing")

    monkeypatch.setattr(sys.modules["kvmem_llama.native.library"], "load", load)
    done = run("doctor", "-m", str(write_model(tmp_path / "m.gguf")))
    assert done.code == 4 and "libllama is missing" in done.out and "view tokens" in done.out


def test_help_loads_neither_numpy_nor_llama_cpp_nor_rich() -> None:
    code = (
        "import sys; from kvmem_llama.cli.main import main; code = main(sys.argv[1:]);"
        "loaded = {name.split('.')[0] for name in sys.modules} & {'numpy', 'llama_cpp', 'rich', 'cffi'};"
        "print('LOADED', sorted(loaded), code)"
    )
    for arguments in (["--help"], ["--version"], ["ask", "--help"], ["chat", "-h"], []):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.stdout.endswith("LOADED [] 0\n"), done.stdout + done.stderr


def test_help_names_every_flag_but_those_for_research(run: Run) -> None:
    text = run("ask", "--help").out
    for option in OPTIONS:
        shown = option.flags[-1] in text
        assert shown != (option.section == "Measuring and research"), option.name


def test_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == "kvmem 0.1.0\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["-sys", "-ngl", "-ub", "8"], ["--system-prompt", "-ngl", "--ubatch-size", "8"]),
        (["--ctx_size=9_9"], ["--ctx-size=9_9"]),
        (["-f", "-np", "-np", "1"], ["-f", "-np", "--parallel", "1"]),
        (["--", "-ngl"], ["--", "-ngl"]),
        (["-c", "-1", "q"], ["-c", "-1", "q"]),
        (["-ctk=q8_0"], ["--cache-type-k=q8_0"]),
    ],
)
def test_llama_cpps_spellings_are_understood(given: list[str], meant: list[str]) -> None:
    assert spell_out(given) == meant


def test_typer_never_prints_tracebacks_of_its_own() -> None:
    assert app.pretty_exceptions_enable is False


def test_public_names_are_those_of_all_and_each_has_a_home() -> None:
    import kvmem_llama

    assert set(kvmem_llama._HOME) | {"__version__"} == set(kvmem_llama.__all__) == set(dir(kvmem_llama))
    assert kvmem_llama.Settings is __import__("kvmem_llama.settings", fromlist=["Settings"]).Settings
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvmem_llama.nothing
