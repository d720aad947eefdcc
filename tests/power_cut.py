"""Power cuts: a system that knows what was not synced, and what a disk may hold when the power fails.

kill -9 leaves the page cache in place, so only this shows that a sync is missing. SQLite makes its own calls:
what it has committed counts as synced (see test_power_cut.py for its settings).
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.store.files import Files
from kvmem_llama.store.system import System

Buffers = Sequence[NDArray[np.uint8]]

PAGE = 4096  # bytes that reach the disk, or do not, together


@dataclass(frozen=True)
class _Written:
    """Bytes of a file that were changed, and the lengths of the file."""

    path: Path
    offset: int
    old: bytes
    new: bytes
    old_size: int
    new_size: int


@dataclass(frozen=True)
class _Named:
    """A change of a folder."""

    kind: str  # made, renamed, removed
    path: Path
    old: Path | None = None  # of a renamed one
    data: bytes | None = None  # of a removed or replaced file; None: there was none, or it was a folder

    @property
    def folder(self) -> Path:
        return self.path.parent


class PowerCut(System):
    """The real system. `cut` leaves what was synced, and of the rest nothing or a random part."""

    def __init__(self) -> None:
        super().__init__()
        self.skip: str | None = (
            None  # a defect to be found: syncs of this site do nothing; "all": no sync does
        )
        self.sites: Counter[str] = Counter()  # where the store syncs from
        self._paths: dict[int, Path] = {}
        self._data: list[_Written] = []  # not synced, newest last
        self._names: list[_Named] = []
        self._lock = threading.RLock()

    # -- data

    def open(self, path: Path, flags: int, mode: int) -> int:
        with self._lock:
            is_new = bool(flags & os.O_CREAT) and not path.exists()
            old = path.read_bytes() if flags & os.O_TRUNC and not is_new else b""
            fd = super().open(path, flags, mode)
            self._paths[fd] = path
            if is_new:
                self._names.append(_Named("made", path))
            elif old:
                self._data.append(_Written(path, 0, old, b"", len(old), 0))
            return fd

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        with self._lock:
            path, size = self._paths[fd], os.fstat(fd).st_size
            old = _bytes_of(path, offset, sum(b.nbytes for b in buffers))
            n = super().pwritev(fd, buffers, offset)
            new = b"".join(b.tobytes() for b in buffers)[:n]
            self._data.append(_Written(path, offset, old[:n], new, size, max(size, offset + n)))
            return n

    def ftruncate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            path, size = self._paths[fd], os.fstat(fd).st_size
            old = _bytes_of(path, nbytes, max(size - nbytes, 0))
            super().ftruncate(fd, nbytes)
            self._data.append(_Written(path, nbytes, old, b"", size, nbytes))

    def punch(self, fd: int, offset: int, nbytes: int) -> bool:
        with self._lock:
            path, size = self._paths[fd], os.fstat(fd).st_size
            old = _bytes_of(path, offset, nbytes)
            is_punched = super().punch(fd, offset, nbytes)
            if is_punched:
                self._data.append(_Written(path, offset, old, bytes(len(old)), size, size))
            return is_punched

    def fsync(self, fd: int) -> None:
        with self._lock:
            path = self._paths.get(fd)
            assert path is not None
            site = _site() + (" folder" if path.is_dir() else "")
            self.sites[site] += 1
            if self.skip in (site, "all"):
                return
            if path.is_dir():
                self._names = [name for name in self._names if name.folder != path]
            else:
                self._data = [change for change in self._data if change.path != path]

    # -- names

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            data = new.read_bytes() if new.is_file() else None
            super().rename(old, new)
            self._data = [
                replace(c, path=_moved(c.path, old, new)) for c in self._data if data is None or c.path != new
            ]
            self._names = [
                replace(n, path=_moved(n.path, old, new), old=n.old and _moved(n.old, old, new))
                if new.is_dir()
                else n
                for n in self._names
            ]
            self._paths = {fd: _moved(path, old, new) for fd, path in self._paths.items()}
            self._names.append(_Named("renamed", new, old, data))

    def unlink(self, path: Path) -> None:
        with self._lock:
            data = path.read_bytes()
            super().unlink(path)
            self._data = [change for change in self._data if change.path != path]
            self._names.append(_Named("removed", path, data=data))

    def mkdir(self, path: Path, mode: int) -> None:
        with self._lock:
            super().mkdir(path, mode)
            self._names.append(_Named("made", path))

    def rmdir(self, path: Path) -> None:
        with self._lock:
            super().rmdir(path)
            self._names.append(_Named("removed", path))

    # -- the power fails

    def cut(self, rng: random.Random | None = None) -> None:
        """Brings files and names back to their last sync. rng: some of what came after it is on disk, too."""
        with self._lock:
            _lose(self._data, self._names, rng)
            self._data, self._names = [], []

    def picture(self, folder: Path, into: Path, rng: random.Random | None = None) -> None:
        """Makes `into` what `folder` would be after a cut now; nothing is lost in `folder`."""
        with self._lock:
            # SQLite makes the index of its log again after a restart.
            shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*-shm"))
            data = [replace(c, path=_moved(c.path, folder, into)) for c in self._data]
            names = [
                replace(n, path=_moved(n.path, folder, into), old=n.old and _moved(n.old, folder, into))
                for n in self._names
            ]
            inside = [n for n in names if n.path.is_relative_to(into) and n.path != into]
            _lose([c for c in data if c.path.is_relative_to(into)], inside, rng)


class Pictures(Files):
    """Files that photograph the folder at named points, as a power cut there would leave it."""

    def __init__(
        self,
        system: PowerCut,
        folder: Path,
        into: Path,
        rng: random.Random,
        odds: dict[str, float],
        most: int,
    ) -> None:
        """into: where they go. odds: of a picture at a point; "": at any other. most: number of pictures.
        Half of them show nothing of what was not synced, the others a part of it."""
        super().__init__(system)
        self._power = system
        self._folder = folder
        self._into = into
        self._rng = rng
        self._odds = odds
        self._most = most
        self._lock = threading.Lock()
        self.taken: list[tuple[Path, str]] = []  # picture, point

    def at(self, point: str) -> None:
        with self._lock:
            odds = self._odds.get(point, self._odds.get("", 0.0))
            if odds and len(self.taken) < self._most and self._rng.random() < odds:
                path = self._into / str(len(self.taken))
                rng = None if self._rng.random() < 0.5 else self._rng
                self._power.picture(self._folder, path, rng)
                self.taken.append((path, point))


def _site() -> str:
    """The function of the store that wants a sync: "module.function"."""
    frame = sys._getframe(2)
    found = "?"
    passing = {
        "files.fsync", "files.sync_dir", "segment_files.sync", "disk.sync", "disk_records.sync",
        "small_files.replace_file",
    }  # fmt: skip
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "store":
            found = f"{path.stem}.{frame.f_code.co_name}"
            if found not in passing:
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _lose(data: Sequence[_Written], names: Sequence[_Named], rng: random.Random | None) -> None:
    for change in reversed(data):
        if change.path.is_file():
            _put(change.path, change.offset, change.old, change.old_size)
    if rng is not None:
        for path in dict.fromkeys(change.path for change in data):
            if path.is_file():
                _keep_some([change for change in data if change.path == path], rng)
    folders = list(dict.fromkeys(name.folder for name in names))
    # A journal keeps the order of the changes of a folder: some first ones are on disk.
    kept = {f: rng.randrange(sum(n.folder == f for n in names) + 1) if rng else 0 for f in folders}
    lost = []
    for name in names:
        if kept[name.folder]:
            kept[name.folder] -= 1
        else:
            lost.append(name)
    for name in reversed(lost):
        _take_back(name)


def _keep_some(changes: Sequence[_Written], rng: random.Random) -> None:
    """Pages of one file that were written without a sync, and are on disk all the same."""
    share = rng.choice([0.1, 0.5, 0.9])
    for change in changes:
        if change.new_size < change.old_size:
            if rng.random() < share:
                os.truncate(change.path, change.new_size)
            continue
        first, end = change.offset, change.offset + len(change.new)
        for start in range(first // PAGE * PAGE, end, PAGE):
            low, high = max(start, first), min(start + PAGE, end)
            if rng.random() < share:
                size = max(change.path.stat().st_size, high)
                _put(change.path, low, change.new[low - first : high - first], size)
        if rng.random() < share and change.path.stat().st_size < change.new_size:
            os.truncate(change.path, change.new_size)


def _take_back(name: _Named) -> None:
    if not name.folder.is_dir():  # it is gone with its folder
        return
    if name.kind == "made":
        if name.path.is_dir():
            shutil.rmtree(name.path)
        else:
            name.path.unlink(missing_ok=True)
    elif name.kind == "renamed":
        assert name.old is not None
        if name.path.exists() and name.old.parent.is_dir():
            os.rename(name.path, name.old)
        if name.data is not None:
            name.path.write_bytes(name.data)
    elif name.data is None:
        name.path.mkdir(mode=0o700, exist_ok=True)
    elif not name.path.exists():
        name.path.write_bytes(name.data)


def _moved(path: Path, old: Path, new: Path) -> Path:
    """The path of what lay at or below `old` before that was renamed."""
    return new / path.relative_to(old) if path.is_relative_to(old) else path


def _bytes_of(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


def _put(path: Path, offset: int, data: bytes, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.truncate(size)
