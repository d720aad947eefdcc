"""Open segment files: a bounded number of descriptors, however many segments there are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .files import Files

MAX_OPEN: Final = 64  # far below the usual limit of 1024 for a process


@dataclass(slots=True)
class _Open:
    fd: int
    writable: bool
    n_users: int = 1


class Descriptors:
    """Descriptors by segment number; those not in use are closed, the longest unused first.

    More than `MAX_OPEN` are open only while as many are in use. Safe to call from several threads.
    """

    def __init__(self, files: Files, check: Callable[[int, int], None]) -> None:
        """check(number, fd) is called once for every file that is opened; it may raise."""
        self._files: Final = files
        self._check: Final = check
        self._open: dict[int, _Open] = {}  # longest unused first
        self._lock: Final = threading.Lock()

    @contextmanager
    def use(self, number: int, path: Path, *, write: bool) -> Iterator[int]:
        """A descriptor of the segment, for a `with`. Raises StoreFailed and what `check` does."""
        found = self._take(number, path, write)
        try:
            yield found.fd
        finally:
            with self._lock:
                found.n_users -= 1
                if found.n_users == 0 and self._open.get(number) is not found:
                    self._files.close(found.fd)  # it was forgotten while in use

    def forget(self, number: int) -> None:
        """Closes the descriptor of a segment, or lets its users close it."""
        with self._lock:
            self._forget(number)

    def close(self) -> None:
        """Closes all of them."""
        with self._lock:
            for number in list(self._open):
                self._forget(number)

    def __len__(self) -> int:
        return len(self._open)

    def _take(self, number: int, path: Path, write: bool) -> _Open:
        found = self._find(number, write)
        if found is not None:
            return found
        fd = self._files.open(path, os.O_RDWR if write else os.O_RDONLY)
        try:
            self._files.no_read_ahead(fd)
            self._check(number, fd)
        except BaseException:
            self._files.close(fd)
            raise
        other = self._find(number, write)
        if other is not None:  # another thread was faster
            self._files.close(fd)
            return other
        with self._lock:
            self._forget(number)
            for idle in [n for n, o in self._open.items() if o.n_users == 0]:
                if len(self._open) < MAX_OPEN:
                    break
                self._forget(idle)
            self._open[number] = _Open(fd, write)
            return self._open[number]

    def _find(self, number: int, write: bool) -> _Open | None:
        with self._lock:
            found = self._open.get(number)
            if found is None or (write and not found.writable):
                return None
            found.n_users += 1
            self._open[number] = self._open.pop(number)
            return found

    def _forget(self, number: int) -> None:
        found = self._open.pop(number, None)
        if found is not None and found.n_users == 0:
            self._files.close(found.fd)
