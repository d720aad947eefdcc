"""Models of the hub: which file is meant, fetching it, and what is said when that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_endpoint import FakeHub, serving
from tiny_models import write_model

from kvmem_llama.errors import ModelCorrupt, ModelNotFound
from kvmem_llama.models import HubName, models_folder, pick_gguf, pull, resolve

pytest.importorskip("huggingface_hub")

LARGE = bytes(range(256)) * 4096  # a MiB


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one repository, and the real client that talks to it."""
    from huggingface_hub import constants

    with serving(FakeHub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "".join(template[1:]))
        hub.repos["org/repo"] = {"README.md": b"words", "m-Q8_0.gguf": b"GGUF q8", "m-Q4_K_M.gguf": LARGE}
        yield hub


def name(text: str) -> HubName:
    parsed = HubName.parse(text)
    assert parsed is not None, text
    return parsed


def left_behind() -> list[str]:
    return sorted(path.name for path in models_folder().rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("text", "repo", "file", "quant"),
    [
        ("org/repo", "org/repo", "", ""),
        ("org/re.po-GGUF:q4_k_m", "org/re.po-GGUF", "", "q4_k_m"),
        ("hf://org/repo/sub/m-Q8_0.gguf", "org/repo", "sub/m-Q8_0.gguf", ""),
        ("hf.co/org/repo:Q4_0", "org/repo", "", "Q4_0"),
        ("https://huggingface.co/org/repo/resolve/main/m.gguf", "org/repo", "m.gguf", ""),
    ],
)
def test_names_of_the_hub(text: str, repo: str, file: str, quant: str) -> None:
    assert name(text) == HubName(repo, file, quant)


@pytest.mark.parametrize(
    "text", ["", "m.gguf", "folder/m.gguf", "a/b/c", "/a/b", "../a", "org/repo/../x.gguf"]
)
def test_other_names_are_not_those_of_the_hub(text: str) -> None:
    assert HubName.parse(text) is None


def test_a_quantization_is_a_whole_word_if_there_is_one() -> None:
    files = ["m-BF16.gguf", "m-F16.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q2_K_XL.gguf"]
    assert pick_gguf(files, "f16") == ["m-F16.gguf"]
    assert pick_gguf(files, "Q4_K") == ["m-Q4_K_M.gguf"]
    assert pick_gguf(files, "Q5_K_M") == []
    assert pick_gguf(files, None) == ["m-Q4_K_M.gguf"]
    assert pick_gguf(["m-F32.gguf", "m-Q3_K_M.gguf"], None) == ["m-Q3_K_M.gguf"]


def test_a_model_is_fetched_once_and_checked(hub: FakeHub, tmp_path: Path) -> None:
    said: list[str] = []
    path = resolve("org/repo", tmp_path, said.append)
    assert path == models_folder() / "org/repo/m-Q4_K_M.gguf" and path.read_bytes() == LARGE
    assert left_behind() == ["m-Q4_K_M.gguf"] and len(said) == 1 and "m-Q4_K_M.gguf" in said[0]
    hub.repos.clear()
    assert resolve("org/repo", tmp_path, said.append) == path and len(said) == 1


def test_all_parts_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    parts = {f"sub/m-F16-0000{n}-of-00003.gguf": b"GGUF part %d" % n for n in (3, 1, 2)}
    hub.repos["org/repo"] |= parts
    hub.small |= set(parts)
    path = resolve("org/repo:F16", tmp_path)
    assert path.name == "m-F16-00001-of-00003.gguf"
    assert {f"sub/{file.name}": file.read_bytes() for file in path.parent.iterdir()} == parts
    del hub.repos["org/repo"]["sub/m-F16-00002-of-00003.gguf"]
    with pytest.raises(ModelNotFound, match=r"not all parts of sub/m-F16-00001-of-00003\.gguf"):
        pull(name("org/repo:F16"), tmp_path)


def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.cut["m-Q4_K_M.gguf"] = 300_000
    assert pull(name("org/repo"), models_folder()).read_bytes() == LARGE
    (_, first), (_, second) = hub.gets
    assert first == "" and 0 < int(second.removeprefix("bytes=").partition("-")[0]) <= 300_000


def test_a_damaged_file_is_deleted_and_fetched_again_next_time(hub: FakeHub) -> None:
    hub.damaged.add("m-Q4_K_M.gguf")
    with pytest.raises(ModelCorrupt, match="sha256 checksum or size is not the hub's"):
        pull(name("org/repo"), models_folder())
    assert "m-Q4_K_M.gguf" not in left_behind()
    hub.damaged.clear()
    assert pull(name("org/repo"), models_folder()).read_bytes() == LARGE


def test_a_file_that_changed_here_or_there_is_fetched_again(hub: FakeHub) -> None:
    path = pull(name("org/repo:Q8_0"), models_folder())
    path.write_bytes(b"GGUF q9")
    assert pull(name("org/repo:Q8_0"), models_folder()).read_bytes() == b"GGUF q8"
    hub.repos["org/repo"]["m-Q8_0.gguf"] = b"GGUF better"
    assert pull(name("org/repo/m-Q8_0.gguf"), models_folder()).read_bytes() == b"GGUF better"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("org/none", "has no such repository, or a private one"),
        ("org/gated", "its owner wants you to ask for access"),
        ("org/repo:Q2_K", r"no GGUF file with Q2_K in its name.*It holds m-Q4_K_M\.gguf, m-Q8_0\.gguf"),
        ("org/repo/x.gguf", r"holds no file x\.gguf"),
        ("org/words", "holds no GGUF file.*-GGUF"),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub: FakeHub, tmp_path: Path, text: str, said: str) -> None:
    hub.repos |= {"org/gated": {}, "org/words": {"README.md": b"words"}}
    hub.gated.add("org/gated")
    with pytest.raises(ModelNotFound, match=said):
        resolve(text, tmp_path)


def test_a_repository_may_not_name_files_outside_its_folder(hub: FakeHub) -> None:
    hub.repos["org/bad"] = {"../../m-Q4_K_M.gguf": b"GGUF"}
    with pytest.raises(ModelNotFound, match="holds no GGUF file"):
        pull(name("org/bad"), models_folder())


def test_a_model_larger_than_the_disk_is_not_begun(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs_result((4096,) * 10)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free[0]}))
    with pytest.raises(ModelNotFound, match=r"takes 1,048,576 bytes, 4,096 are free"):
        pull(name("org/repo"), models_folder())
    assert hub.gets == []


@pytest.mark.parametrize("other", ["org/repo:Q8_0", "org/repo"])
def test_two_pulls_of_one_repository_do_not_disturb_each_other(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    import huggingface_hub

    download, is_first = huggingface_hub.hf_hub_download, [True]

    def and_another(*arguments: Any, **options: Any) -> str:
        path: str = download(*arguments, **options)
        if is_first.pop() if is_first else False:  # while this file waits, another command fetches one
            pull(name(other), models_folder())
        return path

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", and_another)
    assert pull(name("org/repo"), models_folder()).read_bytes() == LARGE
    assert left_behind() == sorted({"m-Q4_K_M.gguf", "m-Q8_0.gguf"} if ":" in other else {"m-Q4_K_M.gguf"})


def test_no_network_and_no_client_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match=r"the hub \(http://127.0.0.1:9\) cannot be reached"):
        resolve("org/repo", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
        resolve("org/repo", tmp_path)


def test_a_pull_that_was_ended_goes_on_later(hub: FakeHub, tmp_path: Path) -> None:
    """The command, which finds the hub by HF_ENDPOINT."""
    model = write_model(tmp_path / "m.gguf").read_bytes()
    hub.repos["org/tiny"] = {"tiny-Q4_0.gguf": model}
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
    command = [sys.executable, "-m", "kvmem_llama.cli.main", "model"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=60)

    done = run("pull", "org/tiny")
    path = models_folder() / "org/tiny/tiny-Q4_0.gguf"
    assert done.returncode == 0 and done.stdout == f"{path}\n", done.stderr
    assert path.read_bytes() == model
    shown = run("show", "org/tiny")
    assert shown.returncode == 0 and "llama" in shown.stdout
    assert "org/tiny/tiny-Q4_0" in run("ls").stdout
