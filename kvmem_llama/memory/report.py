"""What a step tells about itself while it runs and when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .positions import TokenPos, ViewPos

Why: TypeAlias = Literal["sink", "pinned", "selected", "recent", "query"]
Tier: TypeAlias = Literal["device", "host", "disk", "tokens"]
"""Where the rows of a block are: in cells (hidden ones included), in RAM, on disk; or lost, and only its
token ids are left."""
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
    own: Mapping[str, int] = field(default_factory=dict)
    """Its rank in each channel by its own score alone, without what its neighbours gave it. A channel of
    `channels` that is missing here knows it by its neighbours only."""
    tier: Tier = "device"  # where its rows were when the recall began
    age: int = 0  # steps since the one that appended its first token; 0: the step that recalls
    recomputed: bool = False  # its rows were lost, and computed again for this recall
    carried: bool = False  # rows of it were taken over when the history before it was edited
    held: bool = False  # selected only because it was in the view before
    refreshed: bool = False  # its tokens were evaluated anew in this view; its record is as it was


@dataclass(frozen=True, slots=True)
class RecallTimings:
    """Seconds."""

    score_s: float
    select_s: float
    apply_s: float
    replay_s: float
    refresh_s: float = 0.0  # evaluating selected blocks anew

    @property
    def total_s(self) -> float:
        return self.score_s + self.select_s + self.apply_s + self.refresh_s + self.replay_s


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
    n_held: int = 0  # selected blocks that are there only because they were selected before


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
    n_cached: int = 0  # tokens of the history that were there before, and stay
    n_carried: int = 0  # tokens whose rows were taken over from where the same tokens stood before an edit

    @property
    def n_prompt(self) -> int:
        """Tokens of the history before the answer."""
        return self.n_cached + self.n_reused + self.n_carried + self.n_evaluated

    @property
    def n_evaluated(self) -> int:
        """Tokens before the answer that were new; those of the query that were replayed count once."""
        return self.n_read + self.n_query


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
