"""The finished steps of one history: where each of them ended, and the newest text of a user in it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvmem_llama.store.rows import StepRow


@dataclass(frozen=True, slots=True)
class PastStep:
    """Token positions. An interrupted read is no step: its tokens belong to the one that takes them up."""

    end: int  # after its last token
    user: tuple[int, int] | None = None  # [start, end) of the newest text of a user in it


class PastSteps:
    """In the order of the history."""

    def __init__(self, steps: Iterable[PastStep] = ()) -> None:
        self._steps = list(steps)

    @classmethod
    def restored(cls, rows: Iterable[StepRow]) -> PastSteps:
        """Those of a durable history; what was cut off a step's end is not part of it."""
        steps = cls()
        for row in rows:
            steps.add(row.end, row.options)
        return steps

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, end: int, options: str = "{}") -> None:
        """A step is finished. One that added no token is not remembered. options: see StepFacts; `user` in
        them is the newest text of a user."""
        if end > (self._steps[-1].end if self._steps else 0):
            self._steps.append(PastStep(end, _user_of(options, end)))

    def truncate(self, n_tokens: int) -> None:
        """Only the first `n_tokens` tokens stay."""
        n = bisect_right(self._steps, n_tokens, key=lambda step: step.end)
        cut = self._steps[n:]
        del self._steps[n:]
        if cut and n_tokens > (self._steps[-1].end if self._steps else 0):
            user = cut[0].user
            kept = user if user is not None and user[1] <= n_tokens else None
            self._steps.append(replace(cut[0], end=n_tokens, user=kept))

    def fork(self) -> PastSteps:
        return PastSteps(self._steps)

    def age(self, token: int) -> int:
        """Steps since the one that appended the token at this position: 0 for a step that is running, 1 for
        the newest finished one."""
        return len(self._steps) - bisect_right(self._steps, token, key=lambda step: step.end)

    @property
    def newest_with_user(self) -> PastStep | None:
        """The newest step with a text of a user."""
        return next((step for step in reversed(self._steps) if step.user is not None), None)


def _user_of(options: str, end: int) -> tuple[int, int] | None:
    """The newest text of a user in a step that ended at token `end`, by its stored options; None where they
    name none, or are not what this program has written (a workspace may come from elsewhere)."""
    try:
        user = json.loads(options).get("user")
        start, stop = user
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    is_there = type(start) is int and type(stop) is int and 0 <= start < stop <= end
    return (start, stop) if is_there else None
