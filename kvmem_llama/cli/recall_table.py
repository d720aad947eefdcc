"""What was recalled, as lines of text: one block a line, in the order the model sees them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ..memory.report import RecalledBlock, RecallReport

if TYPE_CHECKING:
    from ..memory.search import SearchResult

_HEAD: Final = "  rank    score           tokens  view at  why       text"
_FOUND_HEAD: Final = "  rank           tokens  found by               text"
_MIN_SNIPPET: Final = 24  # characters


def recall_lines(report: RecallReport) -> Iterator[str]:
    """Lines without line ends. Blocks that were not scored have no rank and no score."""
    times = report.timings
    when = "recall in mid-answer" if report.mid_answer else "recall"
    yield (
        f"{when}: {report.n_selected} of {report.n_candidates} blocks selected, view {report.n_view} tokens"
        + (", view unchanged" if report.noop else "")
        + f"; score {_ms(times.score_s)}, select {_ms(times.select_s)}, apply {_ms(times.apply_s)},"
        f" replay {_ms(times.replay_s)}"
    )
    if not report.blocks:
        return
    yield _HEAD
    for block in report.blocks:
        yield _block_line(block, _width(_HEAD))


def found_lines(found: SearchResult) -> Iterator[str]:
    """Lines without line ends: what a search has found, the best first, with its rank in every channel."""
    n = len(found.ranking.candidates)
    yield f"{len(found.blocks)} of {n} blocks that are not in every view anyway"
    if not found.blocks:
        return
    yield _FOUND_HEAD
    for rank, block in enumerate(found.blocks, 1):
        tokens = f"{block.start}..{block.start + block.count - 1}"
        ranks = ", ".join(f"{name} {at}" for name, at in block.ranks.items()) or "-"
        yield f"  {rank:>4}  {tokens:>15}  {ranks:<21}  {snippet(block.text, _width(_FOUND_HEAD))}"


def _width(head: str) -> int:
    """Characters of a line that are left for a text."""
    return max(_MIN_SNIPPET, shutil.get_terminal_size((110, 24)).columns - len(head) + len("text") - 1)


def _block_line(block: RecalledBlock, width: int) -> str:
    rank = "-" if block.rank is None else str(block.rank)
    score = "-" if block.score is None else f"{block.score:.3g}"
    tokens = f"{block.start}..{block.start + block.count - 1}"
    text = snippet(block.text, width)
    return f"  {rank:>4}  {score:>7}  {tokens:>15}  {block.position:>7}  {_why(block):<8}  {text}"


def _why(block: RecalledBlock) -> str:
    """Rows that were lost and computed again are marked."""
    return f"{block.why}*" if block.recomputed else block.why


def snippet(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, without characters that would drive a terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
