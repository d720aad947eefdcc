"""Which tokens of a history a summary stands for, which ones stay as they are, and how much room each has.

Pure arithmetic over token positions and counts of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvmem_llama.errors import MandatoryTooLarge
from kvmem_llama.memory.budget import Budget
from kvmem_llama.native.layout import I32

Range: TypeAlias = tuple[int, int]
"""Token positions start <= t < end."""


@dataclass(frozen=True, slots=True, eq=False)
class Compacted:
    """A state of compaction: sink, summary, `kept`, and the tail from `cut` on are in the view."""

    at: int  # tokens of the history when it was made; one cut to that or less goes back to the state before
    cut: int
    kept: Range | None  # a question older than `cut` whose answer was still growing
    summary: I32  # of the tokens from the sink to `cut` without `kept`; may be empty

    def ranges(self, t: int) -> list[Range]:
        """What is in the view of the tokens before `t`, after the summary."""
        return [*([self.kept] if self.kept else []), (self.cut, max(t, self.cut))]

    def n_verbatim(self, t: int) -> int:
        """Tokens of `ranges(t)`."""
        return sum(end - start for start, end in self.ranges(t))

    def plan(self, t: int, n_recent: int, asked: Range | None) -> tuple[int, Range | None]:
        """`cut` and `kept` of the next state, which keeps the newest `n_recent` of the tokens before `t`.

        asked: the question of a growing answer. It stays, and so does what came after it unless that alone
        is longer than `n_recent`.
        """
        cut = max(t - n_recent, self.cut)
        if asked is None or cut <= asked[0]:
            return cut, None
        if cut <= asked[1] and self.kept != asked:
            return asked[0], None
        return cut, asked

    def replaced(self, cut: int, kept: Range | None) -> list[Range]:
        """What is in the view now and no longer in that of the next state: the text to be summarized."""
        out = [self.kept] if self.kept and self.kept != kept else []
        if kept and self.kept != kept:
            out += [(self.cut, kept[0]), (kept[1], cut)]
        else:
            out.append((self.cut, cut))
        return [r for r in out if r[0] < r[1]]


@dataclass(frozen=True, slots=True)
class Shares:
    """How the view is divided, in tokens."""

    n_view: int
    n_sink: int
    n_summary: int  # at most, as it stands in the view
    n_recent: int
    n_reserve: int
    n_least: int  # the smallest view that goes on at all

    @classmethod
    def of(cls, budget: Budget, n_summary: int, n_prompt: int) -> Shares:
        """n_prompt: the smallest view in which a summary can be written."""
        n_least = max(budget.n_sink + n_summary + budget.block, n_prompt)
        n_reserve = max(budget.n_reserve, 2)  # an answer needs a token to go on from and room for one
        return cls(budget.n_view, budget.n_sink, n_summary, budget.n_recent, n_reserve, n_least)

    def check(self) -> None:
        """Raises MandatoryTooLarge if the view is too small for any history."""
        if self.n_least > self.n_view:
            raise MandatoryTooLarge(self.n_least, self.n_view, hint="Use a larger view (-c).")

    def outside_sink(self, span: Range) -> Range:
        return max(span[0], self.n_sink), max(span[1], self.n_sink)

    def check_question(self, span: Range) -> None:
        """Raises MandatoryTooLarge if the hard set of the question `span` cannot fit: sink, summary, question
        and reserve."""
        free = self.n_free(self.outside_sink(span))
        if free < 0:
            raise MandatoryTooLarge(
                self.n_view - free,
                self.n_view,
                hint="Use a larger view (-c), a shorter question or a smaller --n-reserve.",
            )

    def n_free(self, asked: Range) -> int:
        """What the hard set of a question leaves; negative if it does not fit."""
        return self.n_view - self.n_sink - self.n_summary - (asked[1] - asked[0]) - self.n_reserve

    def n_recent_beside(self, asked: Range) -> int:
        """Newest tokens that a compaction keeps before a question."""
        return min(self.n_recent, self.n_free(asked))

    def n_recent_of_answer(self, asked: Range, n_passages: int) -> int:
        """Newest tokens that a compaction keeps in the middle of an answer, which goes on from them."""
        return max(min(self.n_recent, self.n_free(asked) - n_passages), self.n_reserve // 2)

    @property
    def n_recent_of_reading(self) -> int:
        """Newest tokens that a compaction keeps while a text is read: at least half of the view gets free."""
        return min(self.n_recent, (self.n_view - self.n_sink - self.n_summary) // 2)
