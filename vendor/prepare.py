"""Fetch, verify, unpack and patch the llama.cpp source that this package builds on.

    python vendor/prepare.py            makes both trees
    python vendor/prepare.py --stock    makes the unpatched one only

    vendor/build/stock/llama_cpp/       Python binding, as pinned
    vendor/build/stock/llama.cpp/       C++ source, as pinned; never changed
    vendor/build/patched/llama.cpp/     the same with patches/ applied
    vendor/build/patch_id.txt           names the source and the patches; compiled into the library

Only files whose content changes are written again, so that a changed patch costs a small rebuild.
Needs Python 3.11, pip and git, nothing else. Every failure is one line on stderr and exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = {"llama_cpp/": "llama_cpp/", "vendor/llama.cpp/": "llama.cpp/", "LICENSE.md": "LICENSE.md"}


class VendorError(Exception):
    """The source could not be made ready; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The one source archive that is used (vendor/pin.toml)."""

    package: str
    version: str
    sdist: str
    sha256: str
    llama_cpp_commit: str

    @classmethod
    def read(cls, path: Path) -> Pin:
        return cls(**tomllib.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class PatchSet:
    """patches/NNNN-*.patch in order, and the plain C++ files that go to llama.cpp/src."""

    patches: tuple[Path, ...]
    sources: tuple[Path, ...]

    @classmethod
    def read(cls, folder: Path) -> PatchSet:
        sources = [p for p in folder.iterdir() if p.suffix in (".h", ".cpp")] if folder.is_dir() else []
        return cls(tuple(sorted(folder.glob("[0-9]*.patch"))), tuple(sorted(sources)))

    def identity(self, pin: Pin) -> str:
        """16 hex digits that change with the source, any patch and any plain file."""
        digest = hashlib.sha256(pin.sha256.encode())
        for file in self.patches + self.sources:
            content = file.read_bytes()
            digest.update(f"\n{file.name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where the archive is kept between builds; beside the models (option cache_dir)."""
    if os.environ.get("KVMEM_CACHE_DIR"):
        return Path(os.environ["KVMEM_CACHE_DIR"]).expanduser() / "vendor"
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "kvmem" / "vendor"
    return Path.home() / ".cache" / "kvmem" / "vendor"


def fetch(pin: Pin, folder: Path) -> Path:
    """Path of the verified archive in `folder`; downloaded with pip when it is not there yet."""
    file = folder / pin.sdist
    if not file.is_file():
        download(pin, file)
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != pin.sha256:
        raise VendorError(
            f"{file} is not the pinned archive: its sha256 is {found}, expected {pin.sha256}. "
            "Delete it and run again; it was damaged or tampered with."
        )
    return file


def download(pin: Pin, file: Path) -> None:
    """Download the archive with pip, which honours the user's index, proxy and certificate settings."""
    by_hand = f"or put {pin.sdist} from PyPI into {file.parent} by hand"
    if importlib.util.find_spec("pip") is None:
        raise VendorError(f"cannot fetch {pin.sdist}: {sys.executable} has no pip. Install pip, {by_hand}.")
    print(f"fetching {pin.sdist} with pip", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        # With a hash given, pip verifies the archive before it runs the archive's own build hooks.
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
        command += [
            "--progress-bar",
            "off",
            "--quiet",
            "--no-deps",
            "--no-binary",
            pin.package,
            "--require-hashes",
        ]
        if importlib.util.find_spec("scikit_build_core"):
            command.append("--no-build-isolation")
        command += ["--dest", scratch, "--requirement", str(wanted)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        fetched = Path(scratch, pin.sdist)
        if "DO NOT MATCH THE HASHES" in done.stderr:
            raise VendorError(
                f"the package index served a {pin.sdist} that is not the pinned archive "
                f"(sha256 {pin.sha256}). Use another index, {by_hand}."
            )
        if done.returncode != 0 or not fetched.is_file():
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            why = " ".join(errors) or f"pip ended with status {done.returncode}"
            raise VendorError(
                f"cannot fetch {pin.sdist}: {why} Check the network and pip's index settings, {by_hand}."
            )
        os.replace(fetched, file)


def unpack(archive: Path, stock: Path) -> None:
    """Write the parts of the archive named in KEPT to `stock`, which is replaced as a whole."""
    print(f"unpacking {archive.name}", flush=True)
    fresh = stock.with_name("stock.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            goal = next(
                (to + name[len(start) :] for start, to in KEPT.items() if name.startswith(start)), None
            )
            content = tar.extractfile(member) if goal and member.isfile() else None
            # llama.cpp's .git points to a repository that is not there; git would complain in every build.
            if goal is None or content is None or goal.endswith("/.git"):
                continue
            if ".." in Path(goal).parts:
                raise VendorError(f"{archive}: member {member.name!r} points outside the archive.")
            file = fresh / goal
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.read())
    shutil.rmtree(stock, ignore_errors=True)
    fresh.rename(stock)


def touched_files(patches: Sequence[Path]) -> list[str]:
    """Names of the existing or new files that the patches change, relative to llama.cpp."""
    names: set[str] = set()
    for patch in patches:
        _, _, body = f"\n{patch.read_text(encoding='utf-8')}".partition("\ndiff ")  # after the header
        names.update(re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)", body, re.MULTILINE))
    return sorted(names)


def apply_patches(patches: Sequence[Path], tree: Path) -> None:
    """Apply the patches in order to `tree`; no fuzz. Raises VendorError with the patch and the file."""
    git = shutil.which("git")
    if git is None:
        raise VendorError(
            "git is needed to apply patches/. Install it (Debian, Ubuntu: apt-get install git)."
        )
    # Inside a work tree `git apply` would skip, without a word, what it takes for files of that repository.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_CEILING_DIRECTORIES"] = str(tree.parent)
    for patch in patches:
        command = [
            git,
            "-c",
            "core.autocrlf=false",
            "apply",
            "--whitespace=nowarn",
            "-p1",
            str(patch.resolve()),
        ]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            why = "; ".join(line.removeprefix("error: ") for line in done.stderr.splitlines() if line)
            raise VendorError(
                f"{patch.name} does not apply to the pinned llama.cpp: {why}. "
                "Restore patches/ from version control, or rebase the patch."
            )


def patch_tree(stock: Path, patched: Path, patch_set: PatchSet, names: Sequence[str]) -> None:
    """Bring the files `names` of `patched` to stock + patch set; a VendorError leaves all as it was."""
    if not patched.is_dir():
        fresh = patched.with_name(patched.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(stock, fresh)
        fresh.rename(patched)
    with tempfile.TemporaryDirectory(dir=patched.parent) as folder:
        scratch = Path(folder)
        (scratch / "src").mkdir()
        for name in names:
            if (stock / name).is_file():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(stock / name, scratch / name)
        apply_patches(patch_set.patches, scratch)
        for file in patch_set.sources:
            shutil.copyfile(file, scratch / "src" / file.name)
        for name in names:
            new, old = scratch / name, patched / name
            if not new.is_file():
                old.unlink(missing_ok=True)
            elif not old.is_file() or old.read_bytes() != new.read_bytes():
                old.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(new, old)


def prepare(pin: Pin, patch_folder: Path, build: Path, cache: Path, *, stock_only: bool = False) -> str:
    """Make the trees in `build`; returns the patch id. What is already as it should be is left alone."""
    build.mkdir(parents=True, exist_ok=True)
    stock, patched = build / "stock", build / "patched" / "llama.cpp"
    stock_stamp, patch_stamp = build / "stock.sha256", build / "patched.json"
    if not stock.is_dir() or not stock_stamp.is_file() or stock_stamp.read_text() != pin.sha256:
        archive = fetch(pin, cache)
        stock_stamp.unlink(missing_ok=True)
        patch_stamp.unlink(missing_ok=True)
        unpack(archive, stock)
        shutil.rmtree(patched, ignore_errors=True)
        stock_stamp.write_text(pin.sha256)
    patch_set = PatchSet.read(patch_folder)
    identity = patch_set.identity(pin)
    if stock_only:
        return identity
    state = json.loads(patch_stamp.read_text()) if patch_stamp.is_file() else {"id": "", "files": []}
    if state["id"] != identity or not patched.is_dir():
        print(f"applying {len(patch_set.patches)} patches, {len(patch_set.sources)} plain files", flush=True)
        patched.parent.mkdir(exist_ok=True)
        files = {*touched_files(patch_set.patches), *(f"src/{file.name}" for file in patch_set.sources)}
        # Until the tree is complete the stamp names every file that may differ from stock, and no id.
        either = sorted({*files, *state["files"]})
        patch_stamp.write_text(json.dumps({"id": "", "files": either}))
        patch_tree(stock / "llama.cpp", patched, patch_set, either)
        (build / "patch_id.txt").write_text(identity + "\n")
        patch_stamp.write_text(json.dumps({"id": identity, "files": sorted(files)}))
    return identity


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch, verify, unpack and patch llama.cpp.")
    parser.add_argument("--stock", action="store_true", help="the unpatched tree only")
    options = parser.parse_args()
    try:
        pin = Pin.read(HERE / "pin.toml")
        prepare(pin, HERE.parent / "patches", HERE / "build", cache_folder(), stock_only=options.stock)
    except (VendorError, OSError, tarfile.TarError) as error:
        print(f"kvmem_llama: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
