"""What `kvmem calibrate` refuses before minutes of work. No model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_model

from kvmem_llama.calibration import path_of
from kvmem_llama.cli.main import main
from kvmem_llama.gguf_info import read_model_info
from kvmem_llama.settings import Settings


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr("kvmem_llama.calibrating.calibrate.calibrate", run)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def test_a_goal_that_cannot_be_written_is_refused_first(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for goal, said in ((tmp_path, "it is a folder"), (tmp_path / "file" / "x.json", "cannot be written to")):
        assert main(["calibrate", str(model), "--out", str(goal)]) == 2
        assert said in capsys.readouterr().err


def test_a_file_that_is_there_is_replaced_only_by_force(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = tmp_path / "x.json"
    goal.write_text("mine")
    assert main(["calibrate", str(model), "--out", str(goal)]) == 2
    assert "--force" in capsys.readouterr().err
    here = path_of(Settings.from_sources(), read_model_info(model).fingerprint)
    here.parent.mkdir(parents=True)
    here.write_text("mine")
    assert main(["calibrate", str(model)]) == 2
    assert str(here) in capsys.readouterr().err
    assert goal.read_text() == here.read_text() == "mine"


@pytest.mark.parametrize(("arch", "said"), [("gpt2", "learned"), ("bert", "encoder")])
def test_a_model_that_kvmem_cannot_serve_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arch: str, said: str
) -> None:
    assert main(["calibrate", str(write_model(tmp_path / "m.gguf", arch))]) == 3
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "gone.gguf"]) == 3
    assert "gone.gguf" in capsys.readouterr().err
