"""The models that are on this machine: their names, and which of them is used if none is named.

A model lies in the folder of models (what was pulled, and whatever the user puts there) or in the cache (the
built-in one). Its name is its path in that folder without the suffix.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from ..errors import InvalidOption, ModelNotFound
from ..text_file import write_whole

_SPLIT: Final = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model file. Of a split model `path` is the first part."""

    name: str  # what -m takes
    path: Path
    n_bytes: int  # of all parts
    n_missing: int = 0  # parts that are not there


def models_folder() -> Path:
    """Where models lie that were pulled, or put there by the user."""
    return platformdirs.user_data_path("kvmem", appauthor=False) / "models"


def local_models(folder: Path, cache: Path) -> list[LocalModel]:
    """The models in both folders, by name. One that another of the same name hides has its path as name."""
    found: dict[str, LocalModel] = {}
    for root in (folder, cache):
        for path in _model_files(root):
            name = name_in(root, path)
            if name in found:
                name = str(path)
            found[name] = _local_model(name, path)
    return sorted(found.values(), key=lambda model: model.name)


def find_local(name: str, folder: Path, cache: Path) -> LocalModel | None:
    """The model that `local_models` names so, or the only one whose last part of the name is this; with or
    without the suffix. None: there is none. Raises ModelNotFound if several could be meant."""
    models = local_models(folder, cache)
    wanted = _without_suffix(name)
    for model in models:
        if model.name in (name, wanted):
            return model
    ends = [model for model in models if model.name.rpartition("/")[2] == wanted]
    if len(ends) > 1:
        names = ", ".join(model.name for model in ends[:5])
        raise ModelNotFound(name, f"several models are called so: {names}", hint="Give one of these names.")
    return ends[0] if ends else None


def name_in(root: Path, path: Path) -> str:
    """Name of the model at `path`, which lies in `root`."""
    return _SPLIT.sub("", _without_suffix(path.relative_to(root).as_posix()))


def model_files(files: Iterator[str] | list[str]) -> list[str]:
    """Of names of files, sorted: those of GGUF models. Projectors (mmproj) are none."""
    return sorted(
        file for file in files
        if file.lower().endswith(".gguf") and "mmproj" not in file.rpartition("/")[2].lower()
    )  # fmt: skip


def is_later_part(file: str) -> bool:
    """It is part 2 or more of a split model."""
    split = _SPLIT.search(_without_suffix(file))
    return split is not None and int(split[1]) > 1


def parts_of(file: str) -> list[str]:
    """Names of all parts of the model whose first part is `file`; `file` alone if it is not split."""
    stem, suffix = _without_suffix(file), file[-len(".gguf") :]
    split = _SPLIT.search(stem)
    if split is None:
        return [file]
    base, n = stem[: split.start()], int(split[2])
    return [f"{base}-{i:05}-of-{n:05}{suffix}" for i in range(1, n + 1)]


def _without_suffix(name: str) -> str:
    return name[: -len(".gguf")] if name.lower().endswith(".gguf") else name


def _model_files(root: Path) -> Iterator[Path]:
    """Hidden folders are left out: downloads that are not complete lie in them."""
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        files += [(Path(folder) / name).as_posix() for name in names if not name.startswith(".")]
    yield from (Path(file) for file in model_files(files) if not is_later_part(file))


def _local_model(name: str, path: Path) -> LocalModel:
    parts = [path.with_name(part) for part in parts_of(path.name)]
    sizes = [part.stat().st_size for part in parts if part.is_file()]
    return LocalModel(name, path, sum(sizes), len(parts) - len(sizes))


# -- the model that is used if none is named


def choice_file() -> Path:
    """Where the choice is kept: a line of text."""
    return platformdirs.user_config_path("kvmem", appauthor=False) / "default-model"


def chosen() -> str:
    """The name or path that was chosen; empty: none was. Raises ModelNotFound if that cannot be read."""
    path = choice_file()
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text"
        raise ModelNotFound(
            "default", f"{str(path)!r}, which names it, cannot be read: {why}",
            hint="Delete this file, or name a model with -m.",
        ) from None  # fmt: skip


def choose(name: str) -> None:
    """Keeps the choice; empty: none. The file is the old or the new one, whole, and only the user reads it.
    Raises InvalidOption if it cannot be written."""
    path = choice_file()
    try:
        if name:
            write_whole(path, name + "\n", 0o600)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidOption(
            "default", name, f"{str(path)!r} cannot be written: {error.strerror or error}",
            hint="Make this folder writable, or name the model with -m.",
        ) from None  # fmt: skip
