"""`kvmem doctor`, the help pages, and llama.cpp's spellings of options."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from tiny_models import Shape, truncate, write_model

import kvmem_llama.fitting  # noqa: F401  before a fixture puts stand-ins for the libraries below it
from kvmem_llama import errors
from kvmem_llama.calibration import CalibratedHead, Calibration, dump
from kvmem_llama.cli.main import app
from kvmem_llama.cli.options import spell_out
from kvmem_llama.engine.machine import Machine
from kvmem_llama.settings import OPTIONS

Run = Callable[..., Any]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native libraries that look well."""
    here = SimpleNamespace(path=Path("/lib/lib.so"), patch_id="p1", isa="avx2")
    for name in ("library", "kernels"):
        module = SimpleNamespace(load=lambda: here)
        monkeypatch.setitem(sys.modules, f"kvmem_llama.native.{name}", module)
        monkeypatch.setattr(f"kvmem_llama.native.{name}", module, raising=False)


@pytest.mark.usefixtures("built")
def test_doctor_shows_what_was_built_and_the_memory_plan(run_kvmem: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    done = run_kvmem("doctor", "-m", str(model), "-c", "512", "-ctk", "q8_0", "--json")
    (report,) = done.events
    assert done.code == 0 and report["kernels"]["instruction_set"] == "avx2"
    assert report["model"]["architecture"] == "llama" and report["model"]["key_heads"] == 2
    assert report["library"]["host_pool"] == "ordinary memory"
    assert report["memory"]["view_tokens"] == 512
    assert report["memory"]["cell_bytes_per_token"] == 2 * 2 * (64 * 8.5 + 64 * 16) / 8
    assert report["memory"]["index_bytes_per_token"] == 2 * 2 * 64 * 2 / 32
    text = run_kvmem("doctor", "-m", str(model), "-c", "512").out
    assert "patch id" in text and "trained window tokens      2,048" in text
    assert text.splitlines()[-1] == "all is well: the libraries are there, and the plan for the model fits"
    assert "the default; -ub 0 would choose it for this machine" in text
    text = run_kvmem("doctor", "-m", str(model), "-ub", "64").out
    assert re.search(r"^  batch is +as given$", text, re.MULTILINE)


@pytest.mark.usefixtures("built")
def test_doctor_shows_what_finds_blocks_and_the_size_of_its_indexes(run_kvmem: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    (report,) = run_kvmem("doctor", "-m", str(model), "--score", "fused", "--json").events
    search = report["search"]
    assert search["calibration"] == "not calibrated: lexical + mean_k; run kvmem calibrate MODEL"
    assert search["channels"] == "lexical 0.95 + mean_k 0.05"
    assert search["mean_k_bytes_per_token"] == search["used_bytes_per_token"] == 2 * 2 * 64 * 2 / 32
    heads = tuple(CalibratedHead(il, head, 0.5) for il, head in ((0, 0), (0, 1), (1, 3)))
    part = {"heads": 0.6, "lexical": 0.4}
    fingerprint = report["model"]["fingerprint"]
    dump(Calibration(fingerprint, "tiny", heads, False, "q4_0", part, part, part, {}), tmp_path / "c.json")
    options = ("-m", str(model), "--score", "fused", "--calibration", str(tmp_path / "c.json"), "--json")
    search = run_kvmem("doctor", *options).events[0]["search"]
    assert search["calibration"] == "3 heads of tiny" and search["channels"] == "heads 0.60 + lexical 0.40"
    assert search["heads_bytes_per_token"] == search["used_bytes_per_token"] == 2 * 64 * 4.5 / 8


@pytest.mark.usefixtures("built")
def test_doctor_shows_the_plan_and_what_tokens_cost(run_kvmem: Run, tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    (report,) = run_kvmem("doctor", "-m", str(model), "-ctk", "q8_0", "-ub", "0", "--json").events
    plan = report["plan"]
    assert plan["fits"] is True and plan["view_tokens"] == 2048 and plan["batch_tokens"] == 128
    assert plan["view_is"] == "the window the model was trained with"
    assert plan["cells_bytes_per_1000_tokens"] == 1000 * 2 * 2 * (64 * 8.5 + 64 * 16) / 8
    assert plan["records_on_disk_bytes_per_1000_tokens"] == 1000 * 2 * 2 * 64 * 32 / 8
    assert plan["index_of_mean_k_bytes_per_1000_tokens"] == 1000 * 2 * 2 * 64 * 2 / 32
    parts = sum(plan[f"ram_{part}_bytes"] for part in ("program", "tokenizer", "cells", "capture", "compute"))
    assert plan["ram_bytes"] == parts + plan["ram_repacked_weights_bytes"] + plan["ram_mapped_weights_bytes"]


@pytest.mark.usefixtures("built")
def test_doctor_refuses_what_does_not_fit_with_numbers_and_what_does(
    run_kvmem: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = Machine(total=10**8, free=78_000_000, disk_free=10**9, cores=2)
    monkeypatch.setattr("kvmem_llama.fitting.machine_for", lambda settings: little)
    monkeypatch.setattr("kvmem_llama.sizing._PROGRAM", 20_000_000)
    model = write_model(tmp_path / "m.gguf", Shape("llama", n_layer=8, n_ctx_train=65_536))
    fitting = run_kvmem("doctor", "-m", str(model), "--json")
    view = fitting.events[0]["plan"]["view_tokens"]
    assert fitting.code == 0 and 0 < view < 8192 and view % 256 == 0
    assert any("more does not fit RAM" in remark for remark in fitting.events[0]["plan"]["remark"])
    done = run_kvmem("doctor", "-m", str(model), "-c", "65536", "--json")
    plan = done.events[0]["plan"]
    assert done.code == 5 and plan["fits"] is False and plan["view_tokens"] == 65_536
    assert "of RAM (" in plan["error"] and f"These fit: -c {view};" in plan["hint"]
    again = run_kvmem("doctor", "-m", str(model), *plan["hint"].split(":")[1].split(";")[0].split())
    assert again.code == 0
    text = run_kvmem("doctor", "-m", str(model), "-c", "65536").out
    assert f"These fit: -c {view}" in text and text.splitlines()[-1] == "not well: see plan above"


def test_what_a_plan_warns_of_is_said_before_the_answer(
    run_kvmem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SimpleNamespace(warnings=("the view is 4,096 of 131,072 tokens",))
    monkeypatch.setattr(FakeEngine, "plan", plan)
    assert "warning: the view is 4,096 of 131,072 tokens\n" in run_kvmem("ask", "q").err


@pytest.mark.usefixtures("built")
def test_doctor_names_the_folders_and_json_has_plain_numbers(
    run_kvmem: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "m.gguf")
    options = ("-m", "m.gguf", "--data-dir", "kept here", "--cache-dir", str(tmp_path / "cache"))
    (report,) = run_kvmem("doctor", *options, "--json").events
    assert report["folders"] == {"workspaces": str(tmp_path / "kept here"), "cache": str(tmp_path / "cache")}
    assert report["model"]["folder"] == str(tmp_path)
    assert report["model"]["file_bytes"] == model.stat().st_size
    text = run_kvmem("doctor", *options).out
    assert str(tmp_path / "kept here") in text and f"{model.stat().st_size:,}" in text
    assert not (tmp_path / "kept here").exists()  # to look makes nothing


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("kind", "code"), [("gpt2", 3), ("bert", 3), ("cut", 3), ("gpt2 in full context", 0)]
)
def test_doctor_says_what_is_wrong_with_a_model(run_kvmem: Run, tmp_path: Path, kind: str, code: int) -> None:
    model = write_model(tmp_path / "m.gguf", "llama" if kind == "cut" else kind.split()[0])
    if kind == "cut":
        truncate(model, model, 0.5)
    more = ["--policy", "full_context"] if kind.endswith("full context") else []
    done = run_kvmem("doctor", "-m", str(model), *more)
    assert done.code == code and ("error" in done.out) == bool(code) and done.err == ""


@pytest.mark.usefixtures("built")
def test_doctor_goes_on_when_a_library_is_missing(
    run_kvmem: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise errors.LibraryMissing("libllama is missing")

    monkeypatch.setattr(sys.modules["kvmem_llama.native.library"], "load", load)
    done = run_kvmem("doctor", "-m", str(write_model(tmp_path / "m.gguf")))
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


def test_help_names_every_flag_but_those_for_research(run_kvmem: Run) -> None:
    text = run_kvmem("ask", "--help").out
    for option in OPTIONS:
        shown = option.flags[-1] in text
        assert shown != (option.section == "Measuring and research"), option.name


def test_version_is_that_of_the_package(run_kvmem: Run) -> None:
    assert run_kvmem("--version").out == "kvmem 0.1.0\n"


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

    assert set(kvmem_llama.__all__) == set(dir(kvmem_llama))
    assert set(kvmem_llama.__all__) - {"__version__", "aio"} <= set(kvmem_llama._HOME)
    assert kvmem_llama.Settings is __import__("kvmem_llama.settings", fromlist=["Settings"]).Settings
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvmem_llama.nothing
