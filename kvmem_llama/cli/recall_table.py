"""What was recalled, as lines of text: one block a line, in the order the model sees them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from ..memory.report import RecalledBlock, RecallReport

if TYPE_CHECKING:
    from ..memory.search import SearchResult

_HEAD: Final = (
    "  rank    score           tokens  view at  why         tier     age  found by                  text"
)
_FOUND_HEAD: Final = "  rank    score           tokens  tier     age  found by                  text"
_MIN_SNIPPET: Final = 24  # characters


def recall_lines(report: RecallReport) -> Iterator[str]:
    """Lines without line ends. Blocks that were not scored have no rank and no score."""
    times = report.timings
    when = "recall in mid-answer" if report.mid_answer else "recall"
    yield (
        f"{when}: {report.n_selected} of {report.n_candidates} blocks selected, view {report.n_view} tokens"
        + (f", {report.n_held} of them only because they were before" if report.n_held else "")
        + (", view unchanged" if report.noop else "")
        + f"; score {_ms(times.score_s)}, select {_ms(times.select_s)}, apply {_ms(times.apply_s)},"
        + (f" refresh {_ms(times.refresh_s)}," if times.refresh_s else "")
        + f" replay {_ms(times.replay_s)}"
    )
    if not report.blocks:
        return
    yield _HEAD
    for block in report.blocks:
        yield _block_line(block, _width(_HEAD))


def no_recall_line(n_tokens: int) -> str:
    """What stands in the place of a recall where there was none. n_tokens: of the history."""
    return f"recall: not needed, the whole history ({n_tokens:,} tokens) is in the view"


def found_lines(found: SearchResult) -> Iterator[str]:
    """Lines without line ends: what a search has found, the best first."""
    n = len(found.ranking.candidates)
    yield f"{len(found.blocks)} of {n} blocks that are not in every view anyway"
    if not found.blocks:
        return
    yield _FOUND_HEAD
    for rank, block in enumerate(found.blocks, 1):
        tokens = f"{block.start}..{block.start + block.count - 1}"
        ranks = found_by(block.ranks, block.own)
        yield (
            f"  {rank:>4}  {block.score:>7.3g}  {tokens:>15}  {block.tier:<6}  {block.age:>4}  {ranks:<24}"
            f"  {snippet(block.text, _width(_FOUND_HEAD))}"
        )


def _width(head: str) -> int:
    """Characters of a line that are left for a text."""
    return max(_MIN_SNIPPET, shutil.get_terminal_size((110, 24)).columns - len(head) + len("text") - 1)


def _block_line(block: RecalledBlock, width: int) -> str:
    rank = "-" if block.rank is None else str(block.rank)
    score = "-" if block.score is None else f"{block.score:.3g}"
    tokens = f"{block.start}..{block.start + block.count - 1}"
    text = snippet(block.text, width)
    ranks = found_by(block.channels, block.own)
    return (
        f"  {rank:>4}  {score:>7}  {tokens:>15}  {block.position:>7}  {why_text(block):<10}"
        f"  {block.tier:<6}  {block.age:>4}  {ranks:<24}  {text}"
    )


def found_by(ranks: Mapping[str, int], own: Mapping[str, int]) -> str:
    """Ranks by channel; in brackets the rank by the block's own score where its neighbours have changed it,
    `-` if it has none."""
    parts = []
    for name, rank in ranks.items():
        alone = own.get(name)
        parts.append(f"{name} {rank}" + ("" if alone == rank else f" ({'-' if alone is None else alone})"))
    return ", ".join(parts) or "-"


def why_text(block: RecalledBlock) -> str:
    """With marks for rows that were lost and computed again, rows that were taken over when the history was
    edited, blocks that only stay, and refreshed ones."""
    marks = "*" * block.recomputed + "+" * block.carried + "=" * block.held + "~" * block.refreshed
    return block.why + marks


def snippet(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, without characters that would drive a terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
