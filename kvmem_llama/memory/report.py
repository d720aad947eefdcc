"""What a step tells about itself while it runs and when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvmem_llama.engine.token_probs import TokenProbs as TokenProbs

from .positions import TokenPos, ViewPos
from .usage import Timings, Usage

if TYPE_CHECKING:
    from kvmem_llama.engine.answer_parser import MessageDelta, ParsedMessage

Why: TypeAlias = Literal["sink", "pinned", "selected", "recent", "query"]
Tier: TypeAlias = Literal["device", "host", "disk", "tokens"]
"""Where the rows of a block are: in cells (hidden ones included), in RAM, on disk; or lost, and only its
token ids are left."""
FinishReason: TypeAlias = Literal["stop", "length", "truncated"]
StopType: TypeAlias = Literal["eos", "limit", "word", "none"]
"""What ended an answer, in llama-server's words; none: whoever asked for it, or a criterion of theirs."""


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
    n_replayed: int = 0  # tokens that were evaluated once more, over the new view


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has done."""

    text: str  # of the answer, without the stop string
    tokens: tuple[int, ...]  # of the answer as it stands in the history, the end token included
    finish_reason: FinishReason
    n_read: int  # tokens read as history
    n_query: int
    n_generated: int
    n_reused: int  # tokens that a cancelled step had read
    timings: Timings
    recalls: tuple[RecallReport, ...] = ()
    n_cached: int = 0  # tokens of the history that were there before, and stay
    n_carried: int = 0  # tokens whose rows were taken over from where the same tokens stood before an edit
    stop_type: StopType = "none"
    stopping_word: str = ""  # the stop string that ended the answer
    probs: tuple[TokenProbs, ...] = ()  # of the answer's tokens but an end token, with n_probs only
    end_probs: TokenProbs | None = None  # of the end token, likewise
    message: ParsedMessage | None = None  # of an answer in the chat template

    @property
    def n_prompt(self) -> int:
        """Tokens of the history before the answer."""
        return self.n_cached + self.n_reused + self.n_carried + self.n_evaluated

    @property
    def n_evaluated(self) -> int:
        """Tokens before the answer that were new; those of the query that were replayed count once."""
        return self.n_read + self.n_query

    @property
    def usage(self) -> Usage:
        recalled = {block.start: block.count for r in self.recalls for block in r.blocks if block.rank}
        return Usage(
            prompt=self.n_prompt,
            cached=self.n_cached,
            reused=self.n_reused,
            carried=self.n_carried,
            evaluated=self.n_evaluated,
            generated=self.n_generated,
            recalled=sum(recalled.values()),
            replayed=sum(report.n_replayed for report in self.recalls),
        )


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
    """Text of the answer. `token` is the one that completed it; None when held-back text is released last.

    probs: of the tokens that became part of the text with it, with `n_probs` only. All pieces together have
    those of all tokens, each once and in order. Where tokens without text come last, the text is empty;
    with `every_token` it also is where a token adds none yet.
    """

    text: str
    token: int | None
    probs: tuple[TokenProbs, ...] = ()


@dataclass(frozen=True, slots=True)
class MessagePiece:
    """What the texts before it added to the message of an answer in the chat template."""

    delta: MessageDelta


@dataclass(frozen=True, slots=True)
class Finished:
    result: StepResult


Event: TypeAlias = Progress | Recalled | TextPiece | MessagePiece | Finished
