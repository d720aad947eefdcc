"""What was recalled, found or attended to, as rows for a terminal: the best first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..cli.recall_table import found_by, found_lines, recall_lines, why_text
from .rows import Column, table, wrapped

if TYPE_CHECKING:
    from ..memory.attending import AttendedBlock
    from ..memory.report import RecallReport
    from ..memory.search import SearchResult

N_ROWS: Final = 20  # blocks that a list shows


def recalled_rows(report: RecallReport) -> list[str]:
    """A recall: blocks that were selected by their rank, then those that are in every view."""
    lines = wrapped(next(recall_lines(report)))
    if not report.blocks:
        return lines
    ordered = sorted(report.blocks, key=lambda block: (block.rank is None, block.rank or 0, block.start))
    blocks = ordered[:N_ROWS]
    lines += table(
        [
            Column("rank", ["-" if block.rank is None else str(block.rank) for block in blocks], True),
            Column(
                "score", ["-" if block.score is None else f"{block.score:.3g}" for block in blocks], True, 1
            ),
            Column("tokens", [_tokens(block.start, block.count) for block in blocks], True),
            Column("view at", [str(block.position) for block in blocks], True, 5),
            Column("why", [why_text(block) for block in blocks]),
            Column("tier", [block.tier for block in blocks], spare=3),
            Column("age", [str(block.age) for block in blocks], True, 4),
            Column("found by", [found_by(block.channels, block.own) for block in blocks], spare=2),
        ],
        [block.text for block in blocks],
    )
    n_more = len(ordered) - len(blocks)
    return [*lines, f"  and {n_more:,} more of the view"] if n_more else lines


def found_rows(found: SearchResult) -> list[str]:
    """What a search has found."""
    lines = wrapped(next(found_lines(found)))
    blocks = found.blocks
    if not blocks:
        return lines
    return lines + table(
        [
            Column("rank", [str(rank) for rank in range(1, len(blocks) + 1)], True),
            Column("score", [f"{block.score:.3g}" for block in blocks], True, 1),
            Column("tokens", [_tokens(block.start, block.count) for block in blocks], True),
            Column("tier", [block.tier for block in blocks], spare=3),
            Column("age", [str(block.age) for block in blocks], True, 4),
            Column("found by", [found_by(block.ranks, block.own) for block in blocks], spare=2),
        ],
        [block.text for block in blocks],
    )


def attended_rows(blocks: Sequence[AttendedBlock], report: RecallReport | None) -> list[str]:
    """report: the recall that made the view, if there was one."""
    whys = {block.start: block.why for block in report.blocks} if report is not None else {}
    columns = [
        Column("share", [f"{block.mass:.1%}" for block in blocks], True),
        Column("tokens", [_tokens(block.start, block.count) for block in blocks], True),
    ]
    if whys:
        columns.append(Column("why", [whys.get(block.start, "") for block in blocks]))
    return table(columns, [block.text for block in blocks])


def _tokens(start: int, count: int) -> str:
    return f"{start}..{start + count - 1}"
