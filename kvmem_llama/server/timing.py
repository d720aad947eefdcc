"""How long the parts of an answer took, in llama-server's words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..memory.report import RecallReport


class Clock:
    """Of one answer; seconds by a clock that only goes forward."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self._prompt: float | None = None  # when the prompt was evaluated
        self._last: float | None = None  # when the newest token was sampled

    def token(self) -> None:
        """A token was sampled."""
        self._last = time.monotonic()
        if self._prompt is None:
            self._prompt = self._last

    @property
    def prompt_s(self) -> float:
        return 0.0 if self._prompt is None else self._prompt - self.started

    @property
    def predicted_s(self) -> float:
        if self._prompt is None or self._last is None:
            return 0.0
        return max(self._last - self._prompt, 1e-6)

    @property
    def elapsed_ms(self) -> int:
        return int((time.monotonic() - self.started) * 1000)

    def timings(
        self, *, n_cached: int, n_evaluated: int, n_decoded: int, recalls: Sequence[RecallReport] = ()
    ) -> dict[str, Any]:
        """The object `timings`. The first token costs no step of decoding: it comes with the prompt.

        While a prompt is read, its time is the one since the beginning, or 0 before anything is evaluated.
        """
        prompt_s = self.prompt_s
        if self._prompt is None and n_evaluated:
            prompt_s = time.monotonic() - self.started
        prompt_ms, predicted_ms, steps = prompt_s * 1000, self.predicted_s * 1000, max(n_decoded - 1, 0)
        found: dict[str, Any] = {
            "cache_n": n_cached,
            "prompt_n": n_evaluated,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / n_evaluated if n_evaluated else 0.0,
            "prompt_per_second": n_evaluated / prompt_ms * 1000 if prompt_ms else 0.0,
            "predicted_n": n_decoded,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
            "predicted_per_second": steps / predicted_ms * 1000 if predicted_ms else 0.0,
        }
        if recalls:
            found["recall_n"] = len(recalls)
            found["recall_ms"] = sum(report.timings.total_s for report in recalls) * 1000
            found["replay_n"] = sum(report.n_replayed for report in recalls)
        return found
