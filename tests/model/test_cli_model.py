"""The `kvmem` command with the native libraries: real answers, and models that must be refused."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import SHAPES, truncate, write_model

from kvmem_llama.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command with nothing on standard input -> exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        code = main(arguments)
        return (code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    models = {name: write_model(folder / f"{name}.gguf", name) for name in SHAPES}
    models["cut"] = truncate(models["llama"], folder / "cut.gguf", 0.7)
    models["cut header"] = truncate(models["llama"], folder / "header.gguf", 0.001)
    models["text"] = folder / "text.gguf"
    models["text"].write_text("not a model")
    models["folder"] = folder
    models["missing"] = folder / "missing.gguf"
    return models


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("gpt2", 3, "full_context"),
        ("bert", 3, "encoder"),
        ("frobnicate", 3, "unknown model architecture"),
        ("cut", 3, "cut short"),
        ("cut header", 3, "ends inside its header"),
        ("text", 3, "not a GGUF file"),
        ("folder", 3, "folder"),
        ("missing", 3, "no such file"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_two_lines(
    run: Run, models: dict[str, Path], name: str, code: int, said: str
) -> None:
    found, out, err = run("ask", "-m", str(models[name]), "-n", "2", "hello")
    assert (found, out) == (code, "")
    assert said in err and err.startswith("error: ") and len(err.splitlines()) <= 2


@pytest.mark.parametrize("policy", ["full_context", "sliding_window"])
def test_learned_positions_work_where_the_refusal_says_so(
    run: Run, models: dict[str, Path], policy: str
) -> None:
    code, out, err = run("ask", "-m", str(models["gpt2"]), "--policy", policy, "-n", "2", "--temp", "0", "hi")
    assert code == 0 and out and err == ""


def test_a_question_larger_than_the_view_is_refused_with_both_numbers(
    run: Run, models: dict[str, Path]
) -> None:
    code, out, err = run("ask", "-m", str(models["llama"]), "-c", "64", "x" * 300)
    assert (code, out) == (5, "")
    assert " 64" in err and "view" in err


def test_a_view_smaller_than_a_block_is_an_invalid_option(run: Run, models: dict[str, Path]) -> None:
    assert run("ask", "-m", str(models["llama"]), "-c", "8", "x")[0] == 2


def test_view_zero_is_the_trained_window(run: Run, models: dict[str, Path]) -> None:
    code, out, _ = run("doctor", "-m", str(models["llama"]), "-c", "0", "--json")
    assert code == 0 and json.loads(out)["memory"]["view_tokens"] == SHAPES["llama"].n_ctx_train
    assert run("ask", "-m", str(models["llama"]), "-c", "0", "-n", "2", "x")[0] == 0


@pytest.mark.parametrize("question", ["", "x"])
def test_empty_and_one_character_questions_are_answered(
    run: Run, models: dict[str, Path], question: str
) -> None:
    code, _, err = run("ask", "-m", str(models["llama"]), "-c", "256", "-n", "3", "--temp", "0", question)
    assert (code, err) == (0, "")


def test_a_text_longer_than_the_view_is_read_and_recall_is_shown(
    run: Run, models: dict[str, Path], tmp_path: Path
) -> None:
    text = tmp_path / "long.txt"
    text.write_bytes(b"The caf\xe9 is here. " + b"Somewhere else there is a lake. " * 60)
    code, out, err = run(
        *("ask", "-m", str(models["llama"]), "-c", "256", "-n", "4", "--temp", "0", "-f", str(text)),
        *("--show-recall", "Where is the lake?"),
    )
    assert code == 0 and out
    lines = err.splitlines()
    assert lines[0].startswith("warning: ") and "blocks selected" in lines[1]
    assert {"sink", "selected", "recent"} <= {word for line in lines for word in line.split()}


def test_json_events_tell_a_whole_step(run: Run, models: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("There is a lake. " * 60)
    code, out, _ = run(
        *("ask", "-m", str(models["llama"]), "-c", "256", "-n", "4", "--temp", "0", "-f", str(text)),
        *("--json", "Where?"),
    )
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and {"progress", "recall", "finished"} <= {event["event"] for event in events}
    finished = events[-1]
    assert finished["event"] == "finished" and finished["n_generated"] <= 4
    said = "".join(event["text"] for event in events if event["event"] == "text")
    assert said == finished["text"]


def test_doctor_finds_the_libraries(run: Run, models: dict[str, Path]) -> None:
    code, out, err = run("doctor", "-m", str(models["qwen3"]), "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert Path(report["library"]["path"]).is_file() and report["kernels"]["instruction_set"]
