"""Files of calibrations: what is written is read again, and what is wrong with a file is said by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmem_llama import calibration
from kvmem_llama.calibration import CalibratedHead, Calibration, dump, find, load, path_of
from kvmem_llama.errors import InputError, InvalidOption
from kvmem_llama.settings import Settings

HALVES = {"heads": 0.5, "lexical": 0.5}
PLAIN = Calibration(
    model="ab" * 16,
    model_name="Small",
    heads=(CalibratedHead(18, 6, 0.9), CalibratedHead(3, 0, 0.25)),
    centred=False,
    index_type="q4_0",
    spread=HALVES,
    shares={"heads": 0.25, "lexical": 0.75},
    weights={"heads": 0.5, "lexical": 0.5},
    measured={"n": 3, "coverage": 0.5, "texts_of": "Python 3"},
)
CENTRED = replace(PLAIN, centred=True, heads=(CalibratedHead(18, 6, 0.9, (0.5, -1e-7, 3.0)),))


@pytest.mark.parametrize("one", [PLAIN, CENTRED])
def test_what_is_written_is_read_again_and_gives_the_same_bytes(tmp_path: Path, one: Calibration) -> None:
    first, second = tmp_path / "new" / "a.json", tmp_path / "b.json"
    dump(one, first)
    assert load(first) == one
    dump(load(first), second)
    assert first.read_bytes() == second.read_bytes() and b"\r" not in first.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == ["a.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOption, match="--out"):
        dump(PLAIN, tmp_path / "file" / "a.json")
    old = tmp_path / "old.json"
    dump(PLAIN, old)
    with pytest.raises(ValueError, match="nan"):
        dump(replace(PLAIN, measured={"n": float("nan")}), old)
    assert load(old) == PLAIN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "old.json"]


def changed(**fields: Any) -> dict[str, Any]:
    values = json.loads(json.dumps({"format": 1, **calibration.asdict(PLAIN)}))
    for name, value in fields.items():
        if value is None:
            del values[name]
        else:
            values[name] = value
    return values


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": 2}, "its format is 2, this program reads 1"),
        ({"format": None}, "format is missing"),
        ({"model": 3}, "model is 3"),
        ({"model_name": None}, "model_name is missing"),
        ({"heads": []}, r"heads is \[\]"),
        ({"heads": [3]}, r"heads\[0\] is not an object"),
        ({"heads": [{"layer": -1, "head": 0, "agreement": 1}]}, r"heads\[0\].layer is -1"),
        ({"heads": [{"layer": 1, "head": True, "agreement": 1}]}, r"heads\[0\].head is True"),
        ({"heads": [{"layer": 1, "head": 0, "agreement": 1.5}]}, r"heads\[0\].agreement is 1.5"),
        ({"heads": [{"layer": 1, "head": 0, "agreement": 1}] * 2}, "names one twice"),
        ({"centred": 1}, "centred is 1"),
        ({"centred": True}, r"heads\[0\].mean_q is None, must be a list of numbers"),
        ({"index_type": "q5_0"}, "index_type is 'q5_0', must be q4_0 or q8_0"),
        ({"spread": {"heads": 0.5}}, "spread.lexical is missing"),
        ({"spread": {**HALVES, "mean_k": 0}}, "spread.mean_k is not one of the channels"),
        ({"spread": {**HALVES, "heads": -0.5}}, "spread.heads is -0.5"),
        (
            {"shares": {"heads": 0.5, "lexical": 0.6}},
            "shares sum up to 1.1, must be more than 0 and at most 1",
        ),
        ({"shares": [0.5, 0.5]}, "shares is not an object"),
        ({"measured": {"n": [1]}}, "measured is"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(changed(**fields)))
    with pytest.raises(InputError, match=said) as caught:
        load(path)
    assert "bad.json" in str(caught.value) and "kvmem calibrate" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not JSON"),
        (b"[" * 100000, "not JSON"),
        (b'{"format": NaN}', "format is nan"),
        (b"[]", "not an object"),
        (b"\xff", "utf-8"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=said):
        load(path)


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load(tmp_path / "none.json")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, Path]:
    """Settings with a data folder, and the folder of calibrations that come with the package."""
    monkeypatch.setattr(calibration, "SHIPPED", tmp_path / "shipped")
    return Settings(data_dir=str(tmp_path / "data" / "workspaces")), tmp_path / "shipped"


def test_this_machines_own_file_comes_before_the_one_of_the_package(places: tuple[Settings, Path]) -> None:
    settings, shipped = places
    assert find(settings, PLAIN.model) is None
    dump(PLAIN, shipped / f"{PLAIN.model}.json")
    assert find(settings, PLAIN.model) == PLAIN
    assert path_of(settings, PLAIN.model).parent == Path(settings.data_dir).parent / "calibrations"
    dump(CENTRED, path_of(settings, PLAIN.model))
    assert find(settings, PLAIN.model) == CENTRED
    assert find(settings, "cd" * 16) is None
    assert find(replace(settings, calibration="none"), PLAIN.model) is None


def test_a_file_that_was_asked_for_comes_first_and_must_be_of_the_model(
    places: tuple[Settings, Path], tmp_path: Path
) -> None:
    settings, shipped = places
    dump(CENTRED, shipped / f"{PLAIN.model}.json")
    mine = tmp_path / "mine.json"
    dump(PLAIN, mine)
    settings = replace(settings, calibration=str(mine))
    assert find(settings, PLAIN.model) == PLAIN
    with pytest.raises(InvalidOption, match=f"Small.*{PLAIN.model}.*{'cd' * 16}"):
        find(settings, "cd" * 16)
    with pytest.raises(InputError, match=r"gone\.json"):
        find(replace(settings, calibration=str(tmp_path / "gone.json")), PLAIN.model)


def test_the_files_of_the_package_can_be_read() -> None:
    files = sorted(calibration.SHIPPED.glob("*.json"))
    assert len(files) == 2
    for file in files:
        assert load(file).model == file.stem
