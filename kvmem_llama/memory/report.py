"""What a step tells about itself while it runs and when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .positions import TokenPos, ViewPos

Why: TypeAlias = Literal["sink", "pinned", "selected", "recent", "query"]
FinishReason: TypeAlias = Literal["stop", "length", "truncated"]


@dataclass(frozen=True, slots=True)
class RecalledBlock:
    """A block of the view that a recall has made."""

    start: TokenPos
    count: int  # tokens; fewer than a block for one that is still open
    rank: int | None  # 1 is the best of the candidates; None for a block that was not selected
    score: float | None  # of several ways of searching: the part that it has of all scores
    why: Why
    position: ViewPos  # of the first token
    resident: bool  # its rows were in cells already
    text: str  # characters cut at its edges are replaced
    channels: Mapping[str, int] = field(default_factory=dict)  # its rank in each channel
    recomputed: bool = False  # its rows were lost, and computed again for this recall


@dataclass(frozen=True, slots=True)
class RecallTimings:
    """Seconds."""

    score_s: float
    select_s: float
    apply_s: float
    replay_s: float

    @property
    def total_s(self) -> float:
        return self.score_s + self.select_s + self.apply_s + self.replay_s


@dataclass(frozen=True, slots=True)
class RecallReport:
    """One recall of memory."""

    blocks: tuple[RecalledBlock, ...]  # the whole view, in history order
    n_view: int  # tokens in the view
    n_candidates: int
    n_selected: int
    timings: RecallTimings
    noop: bool  # the view did not change
    mid_answer: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has done. `timings` in seconds: read_s, query_s, recall_s, replay_s, decode_s, total_s."""

    text: str  # of the answer, without the stop string
    tokens: tuple[int, ...]  # of the answer as it stands in the history, the end token included
    finish_reason: FinishReason
    n_read: int  # tokens read as history
    n_query: int
    n_generated: int
    n_reused: int  # tokens that a cancelled step had read
    timings: Mapping[str, float]
    recalls: tuple[RecallReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` tokens of a phase: 'read', 'query', 'replay'."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Recalled:
    report: RecallReport


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer. `token` is the one that completed it; None when held-back text is released last."""

    text: str
    token: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    result: StepResult


Event: TypeAlias = Progress | Recalled | TextPiece | Finished
