"""Something that is made once in a process, whichever thread asks for it first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Calls a function the first time; whoever comes meanwhile waits. An error is not kept: the next call
    tries again."""

    def __init__(self, make: Callable[[], T]) -> None:
        functools.update_wrapper(self, make)
        self._make = make
        self._lock = threading.RLock()
        self._made: list[T] = []

    def __call__(self) -> T:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def cache_clear(self) -> None:
        """The next call makes it again."""
        with self._lock:
            self._made.clear()
