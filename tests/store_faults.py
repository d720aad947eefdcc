"""Systems that fail: errors and short counts at a chosen call, and points to stop at."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.store.files import Files
from kvmem_llama.store.system import System

Buffers = Sequence[NDArray[np.uint8]]

ERRORS = {
    name: getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "ENOENT", "EMFILE")
}
SHORT, NOTHING = "short", "nothing"  # fewer bytes than asked; none at all


class Killed(BaseException):
    """Stands for the end of the process. Not an Exception: nothing may handle it."""


@dataclass
class Fault:
    """The calls number `first` .. `first + times - 1` of one kind, counted from now, go wrong."""

    call: str  # a method of System
    what: str  # a key of ERRORS, SHORT or NOTHING
    first: int = 1
    times: int = 1 << 60
    only: str = ""  # part of the path; calls by descriptor are looked up
    n_seen: int = 0

    def strikes(self, call: str, path: str) -> bool:
        if call != self.call or self.only not in path:
            return False
        self.n_seen += 1
        return self.first <= self.n_seen < self.first + self.times


class FaultySystem(System):
    """The real system, except where a Fault strikes. Counts all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[Fault] = []
        self.calls: Counter[str] = Counter()
        self._path_of: dict[int, str] = {}
        self._counting = threading.Lock()

    def fail(self, call: str, what: str, *, first: int = 1, times: int = 1 << 60, only: str = "") -> Fault:
        fault = Fault(call, what, first, times, only)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """No call fails any more."""
        self.faults.clear()

    def open(self, path: Path, flags: int, mode: int) -> int:
        self._strike("open", str(path))
        fd = super().open(path, flags, mode)
        self._path_of[fd] = str(path)
        return fd

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        return super().preadv(fd, self._cut("preadv", fd, buffers), offset)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        return super().pwritev(fd, self._cut("pwritev", fd, buffers), offset)

    def fsync(self, fd: int) -> None:
        self._strike("fsync", self._path_of.get(fd, ""))
        super().fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        self._strike("ftruncate", self._path_of.get(fd, ""))
        super().ftruncate(fd, nbytes)

    def rename(self, old: Path, new: Path) -> None:
        self._strike("rename", str(new))
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._strike("unlink", str(path))
        super().unlink(path)

    def mkdir(self, path: Path, mode: int) -> None:
        self._strike("mkdir", str(path))
        super().mkdir(path, mode)

    def listdir(self, path: Path) -> list[str]:
        self._strike("listdir", str(path))
        return super().listdir(path)

    def stat(self, path: Path | int) -> os.stat_result:
        self._strike("stat", self._path_of.get(path, "") if isinstance(path, int) else str(path))
        return super().stat(path)

    def _strike(self, call: str, path: str) -> str:
        """Raises the error of a fault that strikes -> what it does instead of an error, or ''."""
        with self._counting:
            self.calls[call] += 1
            struck = [
                fault.what for fault in self.faults if fault.strikes(call, path)
            ]  # each counts every call
        what = struck[0] if struck else ""
        if what in ERRORS:
            raise OSError(ERRORS[what], os.strerror(ERRORS[what]), path)
        return what

    def _cut(self, call: str, fd: int, buffers: Buffers) -> Buffers:
        what = self._strike(call, self._path_of.get(fd, ""))
        if what == SHORT:
            return [buffers[0][: max(buffers[0].nbytes // 2, 1)]]
        return [buffers[0][:0]] if what == NOTHING else buffers


class Stops(Files):
    """Files that call `on[point]()` at named points and count all of them."""

    def __init__(self, system: System | None = None) -> None:
        super().__init__(system)
        self.on: dict[str, Callable[[], None]] = {}
        self.points: Counter[str] = Counter()

    def at(self, point: str) -> None:
        self.points[point] += 1
        if point in self.on:
            self.on[point]()


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ (1 << bit)]))
