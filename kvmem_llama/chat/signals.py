"""Ctrl-C and SIGTERM while a chat runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..cli.interrupts import Interrupts


class Signals:
    """Ctrl-C stops a step, twice within a second ends the program; SIGTERM ends it once what was answered is
    kept."""

    def __init__(self, leave: Callable[[], None]) -> None:
        """leave: ends the wait for a message."""
        self.terminated = False
        self._leave = leave
        self._interrupts = Interrupts()
        self._stop: Callable[[], None] | None = None

    def second(self) -> bool:
        """Notes a Ctrl-C at the prompt; true if it follows another within the window."""
        return self._interrupts.second()

    def typed(self) -> None:
        """Notes a message: a Ctrl-C after it is about what it started, however soon it comes."""
        self._interrupts.forget()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within: SIGTERM is heeded. Main thread only."""
        before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def during(self, stop: Callable[[], None]) -> Iterator[None]:
        """Within: both run `stop`, in a thread of its own."""
        self._stop = stop
        try:
            with self._interrupts.during(stop):
                yield
        finally:
            self._stop = None

    def _terminate(self, _signal: int, _frame: FrameType | None) -> None:
        self.terminated = True
        if self._stop is None:
            self._leave()
        else:
            threading.Thread(target=self._stop, name="stop-answer", daemon=True).start()
