"""What a step has cost: tokens by what became of them, and seconds by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one step."""

    prompt: int
    """Of the history before the answer: those that were cached, reused, carried and evaluated."""
    cached: int  # of the history that were there before, and stay
    reused: int  # that a cancelled step had read
    carried: int  # whose rows were taken over from where the same tokens stood before an edit
    evaluated: int  # that were new
    generated: int  # of the answer
    recalled: int  # of blocks that a recall has selected; every block counts once
    replayed: int  # that were evaluated once more because a recall had changed the view

    @property
    def total(self) -> int:
        """Tokens of the history after the step."""
        return self.prompt + self.generated


class Timings(Mapping[str, float]):
    """Seconds by phase. A policy has the phases that it has; a phase of a step that did not happen took none:
    the attributes are 0 then, and the mapping may lack it."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self._seconds: Final = dict(seconds or {})

    def __getitem__(self, phase: str) -> float:
        return self._seconds[phase]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def __repr__(self) -> str:
        return f"Timings({self._seconds})"

    @property
    def prefill(self) -> float:
        """Reading the history, and the first pass of the query."""
        return self.get("read_s", 0.0) + self.get("query_s", 0.0)

    @property
    def score(self) -> float:
        """Scoring and ranking the blocks."""
        return self.get("score_s", 0.0)

    @property
    def select(self) -> float:
        """Choosing among them."""
        return self.get("select_s", 0.0)

    @property
    def apply(self) -> float:
        """Going to the new view."""
        return self.get("apply_s", 0.0)

    @property
    def refresh(self) -> float:
        """Evaluating recalled blocks anew."""
        return self.get("refresh_s", 0.0)

    @property
    def replay(self) -> float:
        """Evaluating the query again over the new view."""
        return self.get("replay_s", 0.0)

    @property
    def decode(self) -> float:
        """Generating the answer, without the recalls in the midst of it."""
        return self.get("decode_s", 0.0)

    @property
    def total(self) -> float:
        return self.get("total_s", 0.0)
