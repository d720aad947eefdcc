"""`kvmem calibrate` with real libraries: the same file twice, known heads, and models without any."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import write_model

from kvmem_llama.calibrating.calibrate import Effort, Progress, calibrate
from kvmem_llama.calibration import dump, find, load, path_of
from kvmem_llama.cli.main import main
from kvmem_llama.errors import InvalidOption, ModelUnsupported
from kvmem_llama.gguf_info import read_model_info
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import open_engine

SMALL = Effort(n_tokens=2048, n_questions=6, n_facts=4)
SETTINGS = Settings(n_threads=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama.gguf")


def test_calibrating_twice_gives_the_same_file(tiny: Path, tmp_path: Path) -> None:
    reports: list[Progress] = []
    files = []
    for name, settings in (("a", SETTINGS), ("b", replace(SETTINGS, score="lexical", n_ctx=512))):
        found = calibrate(tiny, settings, reports.append, SMALL)
        dump(found, tmp_path / name)
        files.append((tmp_path / name).read_bytes())
        assert reports[-1].done == reports[-1].total
    assert files[0] == files[1]
    assert found.model == read_model_info(tiny).fingerprint
    assert len(found.heads) >= 1 and all(head.layer < 2 and head.head < 4 for head in found.heads)
    done = [report.done for report in reports[: len(reports) // 2]]
    assert done == sorted(done) and len(done) > 20


def test_a_file_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", seed=1)
    found = calibrate(tiny, SETTINGS, lambda report: None, SMALL)
    dump(found, tmp_path / "found.json")
    settings = replace(SETTINGS, calibration=str(tmp_path / "found.json"), score="heads", n_ctx=512)
    with open_engine(tiny, settings) as engine, engine.workspace():
        pass
    with pytest.raises(InvalidOption, match="made for another model"):
        open_engine(other, settings).close()


@pytest.mark.parametrize(("arch", "why"), [("lfm2", "recurrent state"), ("gpt2", "learned")])
def test_a_model_whose_keys_cannot_be_used_is_refused(tmp_path: Path, arch: str, why: str) -> None:
    model = write_model(tmp_path / "model.gguf", arch)
    with pytest.raises(ModelUnsupported, match=why) as caught:
        calibrate(model, SETTINGS, lambda report: None, SMALL)
    assert "full_context" in caught.value.hint


def test_the_command_writes_where_others_look_and_replaces_nothing_unasked(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmem_llama.calibrating.calibrate.Effort", lambda: SMALL)
    settings = Settings.from_sources()
    goal = path_of(settings, read_model_info(tiny).fingerprint)
    assert main(["calibrate", str(tiny), "-t", "2"]) == 0
    shown = capsys.readouterr()
    assert str(goal) in shown.out and "bytes per token" in shown.out
    assert "among the best by prose and by code alike" in shown.out
    found = find(settings, read_model_info(tiny).fingerprint)
    assert found == load(goal) and found is not None
    written = goal.read_bytes()
    assert main(["calibrate", str(tiny), "-t", "2"]) != 0
    assert "--force" in capsys.readouterr().err and goal.read_bytes() == written
    assert main(["calibrate", str(tiny), "-t", "2", "--force"]) == 0
    assert goal.read_bytes() == written


def test_ctrl_c_leaves_nothing_behind(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvmem_llama.calibrating.calibrate.Effort", lambda: SMALL)
    rank_on = "kvmem_llama.calibrating.calibrate.rank_on"

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_on, interrupted)
    assert main(["calibrate", str(tiny), "--out", str(tmp_path / "new" / "x.json")]) == 130
    assert not (tmp_path / "new").exists()


def test_the_known_heads_of_the_built_in_model_are_found(smollm2: Path) -> None:
    """Those that annotated conversations name best."""
    effort = Effort(n_tokens=2048, n_questions=10, n_facts=4)
    found = calibrate(smollm2, SETTINGS, lambda report: None, effort)
    known = {(18, 6), (18, 7), (17, 3), (17, 5), (17, 4), (14, 3), (18, 8), (15, 6)}
    assert len({(head.layer, head.head) for head in found.heads} & known) >= 6
    assert found.measured["index_bytes_per_token"] <= 180
    assert 2 * int(found.measured["n_heads_by_prose_and_by_code"]) > len(found.heads)
    figures = {way: float(found.measured[f"coverage_512_{way}"]) for way in ("heads", "fused", "mean_k")}
    assert figures["heads"] > figures["mean_k"] and figures["fused"] > figures["mean_k"]
