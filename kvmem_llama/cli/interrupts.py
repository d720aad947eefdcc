"""Ctrl-C in a chat: the first one stops the answer, a second one within a second ends the program."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

WINDOW: Final = 1.0  # seconds


class SecondPress(KeyboardInterrupt):
    """Ctrl-C came again while the first one was being heeded: the program is to end."""


class Interrupts:
    """Remembers when Ctrl-C was last pressed, at the prompt or during an answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def second(self) -> bool:
        """Notes one press; true if it follows another within the window."""
        now = self._clock()
        is_second = now - self._last <= WINDOW
        self._last = now
        return is_second

    def forget(self) -> None:
        """Something else was done in between: the next press is a first one."""
        self._last = -math.inf

    @contextmanager
    def during(self, act: Callable[[], None]) -> Iterator[None]:
        """Within: Ctrl-C runs `act` once per press, a second one within the window raises SecondPress.

        A plain KeyboardInterrupt would end the iteration over the answer's events, which must go on to their
        end so that the answer is kept.
        """

        def pressed(_signal: int, _frame: FrameType | None) -> None:
            if self.second():
                raise SecondPress
            # Not here: the interrupted code may hold a lock that `act` needs.
            threading.Thread(target=act, name="stop-answer", daemon=True).start()

        before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
