"""Models of the Hugging Face hub: their names, which file is meant, and fetching it.

A file gets its name in the folder of models only after its checksum was compared with the hub's. Until then
it lies in a hidden folder beside it, from which an interrupted download goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..errors import ModelCorrupt, ModelNotFound
from .local import is_later_part, model_files, parts_of
from .packaged import Notify

_PREFIX: Final = re.compile(r"(hf://|(https?://)?(huggingface\.co|hf\.co)/)")
_NAME: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)"
    r"(?:/(?:(?:resolve|blob)/main/)?(?P<file>[^:]+\.gguf)|:(?P<quant>[\w.-]+))?",
    re.IGNORECASE,
)

# Without a wish: the best that most machines can hold comes first.
_PREFERRED: Final = (
    "Q4_K_M", "Q4_K_S", "Q4_K_XL", "Q5_K_M", "Q5_K_S", "IQ4_XS", "IQ4_NL", "Q4_1", "Q4_0", "Q6_K", "Q5_0",
    "Q8_0", "MXFP4", "Q3_K_M", "Q3_K_L", "BF16", "F16", "F32",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HubName:
    """What a user calls a model of the hub."""

    repo: str  # "owner/name"
    file: str = ""  # its path in the repository; empty: chosen by `quant`
    quant: str = ""  # such as Q4_K_M; empty: any

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """From owner/name, owner/name:QUANTIZATION or owner/name/file.gguf, also with hf:// or the address of
        the hub's page; None: it is none of these."""
        prefix = _PREFIX.match(text)
        name = _NAME.fullmatch(text[prefix.end() :] if prefix else text)
        if name is None or (name["file"] is None and name["repo"].lower().endswith(".gguf")):
            return None
        if name["file"] is not None and not _is_inside(name["file"]):
            return None
        return cls(name["repo"], name["file"] or "", name["quant"] or "")

    def __str__(self) -> str:
        return self.repo + (f"/{self.file}" if self.file else f":{self.quant}" if self.quant else "")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, as the hub describes it."""

    path: str
    n_bytes: int
    algorithm: str  # of the checksum: "sha256", or "git" for the hash of a blob
    checksum: str


def pick_gguf(files: Iterable[str], quant: str | None) -> list[str]:
    """The GGUF file to use among the `files` of a repository, with all its parts, first part first.

    quant: the quantization in its name, in any case; without one what most machines can hold, else the first.
    """
    files = list(files)
    firsts = [file for file in model_files(files) if not is_later_part(file)]
    wishes: Sequence[str] = (quant,) if quant else _PREFERRED
    for wish in wishes:
        # F16 is a part of BF16, and Q4_K one of Q4_K_M: a whole word comes before a part of one.
        word = re.compile(rf"(?<![a-z0-9]){re.escape(wish)}(?![a-z0-9_])", re.IGNORECASE)
        named = [f for f in firsts if word.search(f)]
        named = named or [f for f in firsts if quant and quant.lower() in f.lower()]
        if named:
            return parts_of(named[0])
    return parts_of(firsts[0]) if firsts and not quant else []


def local_copy(name: HubName, folder: Path) -> Path | None:
    """What was pulled of `name` before; None: nothing that is complete."""
    root = folder / name.repo
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    chosen = parts_of(name.file) if name.file else pick_gguf(files, name.quant)
    return root / chosen[0] if chosen and set(chosen) <= set(files) else None


def pull(name: HubName, folder: Path, notify: Notify | None = None) -> Path:
    """Fetches a model from the hub into `folder`, with all its parts -> the path of the first.

    What is there already is compared with the hub's checksum and not fetched again.
    Raises ModelNotFound (no client, no network, no such model, no space) or ModelCorrupt (its checksum is not
    the hub's: the file is deleted).
    """
    hub = client(name)
    endpoint: str = hub.constants.ENDPOINT
    root = folder / name.repo
    waiting = folder / ".pull" / name.repo.replace("/", "--")
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(name.repo, files_metadata=True)
        files = _wanted(name, [_hub_file(sibling) for sibling in info.siblings or ()])
        absent = [file for file in files if not _is_sound(root / file.path, file)]
        if absent:
            _check_space(name, folder, sum(file.n_bytes for file in absent))
            if notify is not None:
                size = sum(file.n_bytes for file in absent) / 1e6
                notify(f"fetching {', '.join(file.path for file in absent)} ({size:,.0f} MB) of {name.repo}")
        for file in absent:
            _fetch(hub, name, info.sha, file, root, waiting)
        for file in reversed(absent):  # the first part is what is looked for: it comes last
            _move(file, root, waiting)
        with contextlib.suppress(OSError):  # another file is on its way
            waiting.rmdir()
        return root / files[0].path
    except (ModelNotFound, ModelCorrupt):
        raise
    # The hub client raises its own, requests' and httpx' errors, depending on its version.
    except Exception as error:
        raise refusal(name, error, endpoint) from error


def _fetch(hub: Any, name: HubName, revision: str, file: HubFile, root: Path, waiting: Path) -> None:
    """Downloads a file to where it waits. Raises ModelCorrupt, and what the client raises."""
    own, endpoint = _own_folder(waiting, file), hub.constants.ENDPOINT
    try:
        hub.hf_hub_download(name.repo, file.path, revision=revision, local_dir=own, endpoint=endpoint)
    except Exception:
        if _is_sound(root / file.path, file):
            return  # another pull was faster, and took the folder away
        raise
    if not _is_sound(own / file.path, file) and not _is_sound(root / file.path, file):
        (own / file.path).unlink(missing_ok=True)
        raise ModelCorrupt(
            own / file.path, f"its {file.algorithm} checksum or size is not the hub's",
            hint="It was damaged on its way and is deleted; pull it again.",
        )  # fmt: skip


def _move(file: HubFile, root: Path, waiting: Path) -> None:
    """Gives a file that waits its name."""
    own = _own_folder(waiting, file)
    (root / file.path).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(own / file.path, root / file.path)
    except FileNotFoundError:
        if not _is_sound(root / file.path, file):  # another pull has not moved it either
            raise
    shutil.rmtree(own, ignore_errors=True)


def _own_folder(waiting: Path, file: HubFile) -> Path:
    """Where one file waits: nobody who fetches another one of the repository touches it."""
    return waiting / file.path.replace("/", "--")


def client(name: HubName) -> Any:
    """The client of the hub, which draws a bar on terminals and is silent elsewhere."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelNotFound(
            str(name), "it is not here, and huggingface_hub is not installed to look for it on the hub",
            hint="Run `pip install huggingface_hub`, or give the path of a GGUF file; `kvmem model ls` shows "
            "the models that are here.",
        )  # fmt: skip
    hub: Any = importlib.import_module("huggingface_hub")
    importlib.import_module("huggingface_hub.constants")
    utils: Any = importlib.import_module("huggingface_hub.utils")
    utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    return hub


def _hub_file(sibling: Any) -> HubFile:
    """From the client's description: files of some size have a sha256, small ones are blobs of git."""
    lfs: Any = getattr(sibling, "lfs", None)
    if lfs:
        sha256 = lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256
        return HubFile(sibling.rfilename, int(sibling.size or 0), "sha256", sha256)
    return HubFile(sibling.rfilename, int(sibling.size or 0), "git", sibling.blob_id or "")


def _wanted(name: HubName, files: list[HubFile]) -> list[HubFile]:
    """The files of the model that `name` means. Raises ModelNotFound, saying what there is."""
    by_path = {file.path: file for file in files if _is_inside(file.path)}
    paths = parts_of(name.file) if name.file else pick_gguf(by_path, name.quant)
    if paths and not set(paths) - by_path.keys():
        return [by_path[path] for path in paths]
    models = [path for path in model_files(list(by_path)) if not is_later_part(path)]
    if not models:
        raise ModelNotFound(
            str(name), "this repository holds no GGUF file",
            hint="Look for one that does; their names often end in -GGUF.",
        )  # fmt: skip
    what = f"no file {name.file}" if name.file else f"no GGUF file with {name.quant} in its name"
    if paths and paths[0] in by_path:
        what = f"not all parts of {paths[0]}"
    raise ModelNotFound(
        str(name), f"this repository holds {what}", hint=f"It holds {', '.join(models[:12])}."
    )


def _check_space(name: HubName, folder: Path, n_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise ModelNotFound(
            str(name), f"it takes {n_bytes:,} bytes, {free:,} are free in {str(folder)!r}",
            hint="Free some space, or choose a smaller quantization, as in owner/name:Q3_K_M.",
        )  # fmt: skip


def _is_sound(path: Path, file: HubFile) -> bool:
    """The file is there with the size and checksum that the hub tells."""
    if not path.is_file() or path.stat().st_size != file.n_bytes:
        return False
    with path.open("rb") as stream:
        if file.algorithm == "sha256":
            return hashlib.file_digest(stream, "sha256").hexdigest() == file.checksum
        digest = hashlib.sha1(b"blob %d\0" % file.n_bytes, usedforsecurity=False)
        while piece := stream.read(1 << 20):
            digest.update(piece)
        return digest.hexdigest() == file.checksum


def refusal(name: HubName, error: Exception, endpoint: str) -> ModelNotFound:
    """What went wrong, by the name of the client's error: its classes moved from version to version."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    path_hint = "or give the path of a GGUF file; `kvmem model ls` shows the models that are here."
    if "GatedRepoError" in kinds:
        why, hint = (
            "its owner wants you to ask for access",
            f"Ask for it on {endpoint}/{name.repo}, then log in ",
        )
        return ModelNotFound(str(name), why, hint=f"{hint}with `hf auth login`, {path_hint}")
    if "RepositoryNotFoundError" in kinds:
        return ModelNotFound(
            str(name), f"it is not here, and the hub ({endpoint}) has no such repository, or a private one",
            hint=f"Check the name, log in with `hf auth login`, {path_hint}",
        )  # fmt: skip
    if kinds & {"ConnectionError", "NetworkError", "TimeoutException", "Timeout", "OfflineModeIsEnabled",
                "LocalEntryNotFoundError"}:  # fmt: skip
        return ModelNotFound(
            str(name), f"it is not here, and the hub ({endpoint}) cannot be reached: {reason}",
            hint=f"Check the network (HF_ENDPOINT names another hub) and try again, {path_hint}",
        )  # fmt: skip
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return ModelNotFound(
            str(name), f"it cannot be written to {error.filename!r}: {error.strerror}",
            hint="Free some space, or make this folder writable.",
        )  # fmt: skip
    return ModelNotFound(
        str(name), f"it is not here, and the hub ({endpoint}) says: {reason}",
        hint=f"Try again later, {path_hint}",
    )  # fmt: skip


def _is_inside(path: str) -> bool:
    """A path of a repository that leads nowhere else."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path
