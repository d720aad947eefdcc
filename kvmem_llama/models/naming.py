"""From what a user calls a model to the path of a GGUF file."""

from __future__ import annotations

import difflib
import stat
from pathlib import Path
from typing import Final

from ..errors import ModelNotFound
from . import hub, local, packaged
from .packaged import DEFAULT_MODEL, Notify

BUILT_IN: Final = "built-in"
"""Name of the model that comes from PyPI."""

_DEFAULT: Final = ("", "default")
_MOST_SHOWN: Final = 80  # characters of a name that is far too long


def resolve(spec: str, cache: Path, notify: Notify | None = None) -> Path:
    """Path of the GGUF file that `spec` means; what is not here is fetched.

    spec: a path; a name that `kvmem model ls` shows; empty or "default" (what `kvmem model default` has set,
    else the built-in model); "built-in"; owner/name, owner/name:QUANTIZATION or owner/name/file.gguf (a model
    of the Hugging Face hub, if huggingface_hub is installed).
    cache: folder of unpacked models (Settings.cache_path).
    notify: gets one line before anything is downloaded.
    Raises ModelNotFound, or ModelCorrupt if what was fetched is not what it should be.
    """
    here = find(spec, cache)
    if here is not None:
        return here
    name = hub.HubName.parse(spec)
    if spec in _DEFAULT or spec == BUILT_IN:
        choice = local.chosen() if spec in _DEFAULT else ""
        if not choice:
            return packaged.fetch_packaged(DEFAULT_MODEL, cache, notify)
        name = hub.HubName.parse(choice)
        if name is None:
            raise ModelNotFound(
                choice, "it is what `kvmem model default` has set, and it is not here any more",
                hint="Set another one, or go back to `kvmem model default built-in`, or name another model.",
            )  # fmt: skip
    if name is None or spec.startswith("."):
        raise ModelNotFound(spec, hint=_hint(spec, cache))
    return hub.pull(name, local.models_folder(), notify)


def check(spec: str, cache: Path) -> None:
    """Raises ModelNotFound for what is not here and is no name of something to fetch. Fetches nothing."""
    is_named = spec in _DEFAULT or spec == BUILT_IN or _is_of_hub(spec)
    if find(spec, cache) is None and not is_named:
        raise ModelNotFound(spec, hint=_hint(spec, cache))


def _is_of_hub(spec: str) -> bool:
    return hub.HubName.parse(spec) is not None and not spec.startswith(".")


def find(spec: str, cache: Path) -> Path | None:
    """As `resolve`, but nothing is fetched: None if it is not here.

    Raises ModelNotFound for a folder, and for a name that several models have.
    """
    if spec in _DEFAULT:
        choice = local.chosen()
        return find(choice if choice not in _DEFAULT else BUILT_IN, cache)
    if spec == BUILT_IN:
        return cache / DEFAULT_MODEL.file if DEFAULT_MODEL.is_in(cache) else None
    path, is_file, is_folder = _looked_up(spec)
    if is_file:
        return path
    if is_folder:
        inside = sorted(file.name for file in path.glob("*.gguf"))
        names = ", ".join(inside[:5]) if inside else "none"
        raise ModelNotFound(
            spec, f"is a folder; GGUF files in it: {names}", hint="Give the path of a GGUF file."
        )
    folder = local.models_folder()
    name = hub.HubName.parse(spec)
    copy = hub.local_copy(name, folder) if name is not None else None
    if copy is not None:
        return copy
    model = local.find_local(spec, folder, cache)
    return model.path if model is not None else None


def _looked_up(spec: str) -> tuple[Path, bool, bool]:
    """The path that `spec` may be, whether it is a file, and whether it is a folder. Raises ModelNotFound for
    what can be no path."""
    try:
        path = Path(spec).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return path, False, False
    except RuntimeError:  # ~user
        why = f"there is no user {spec.partition('/')[0].removeprefix('~')!r}"
        raise ModelNotFound(spec, why, hint="Give the whole path of a GGUF file.") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        shown = spec if len(spec) <= _MOST_SHOWN else f"{spec[:_MOST_SHOWN]}..."
        raise ModelNotFound(shown, f"it can be no model: {why}") from None
    return path, stat.S_ISREG(mode), stat.S_ISDIR(mode)


def _hint(spec: str, cache: Path) -> str:
    """What else might be meant."""
    names = [model.name for model in local.local_models(local.models_folder(), cache)] + [BUILT_IN]
    by_end = {name.rpartition("/")[2].lower(): name for name in names} | {n.lower(): n for n in names}
    close = difflib.get_close_matches(spec.lower().removesuffix(".gguf"), list(by_end), 1)
    meant = f" Did you mean {by_end[close[0]]}?" if close else ""
    return f"Give the path of a GGUF file, or a name that `kvmem model ls` shows.{meant}"
