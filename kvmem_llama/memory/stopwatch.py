"""Where the time of a step goes."""

from __future__ import annotations

import time

from .usage import Timings


class Stopwatch:
    """Seconds by name; every lap begins where the last one ended."""

    def __init__(self, *names: str) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._last = time.perf_counter()

    def lap(self, name: str) -> float:
        """Adds the time since the last lap to `name` -> that time."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + passed
        return passed

    @property
    def timings(self) -> Timings:
        """With their sum, total_s."""
        return Timings(self.seconds | {"total_s": sum(self.seconds.values())})
