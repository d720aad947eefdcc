"""Tables and sentences in lines that are no wider than the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len

from ..cli.recall_table import snippet

_BETWEEN: Final = "  "
_MIN_TEXT: Final = 24  # cells; columns are left out before the text gets fewer


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. spare: where the terminal is narrow, the highest is left out first; 0: never."""

    head: str
    cells: Sequence[str]
    right: bool = False
    spare: int = 0

    @property
    def width(self) -> int:
        return max(len(cell) for cell in (self.head, *self.cells))

    def shown(self, cell: str) -> str:
        return cell.rjust(self.width) if self.right else cell.ljust(self.width)


def line_width() -> int:
    """Cells of a line; one less than the terminal has, as some begin a new line after the last one."""
    return max(20, shutil.get_terminal_size((111, 24)).columns - 1)


def table(columns: Sequence[Column], texts: Sequence[str]) -> list[str]:
    """A head and a line for every text, which stands in the last column and is cut to what room there is."""
    kept = list(columns)
    while (room := _room(kept)) < _MIN_TEXT and (spare := [column for column in kept if column.spare]):
        kept.remove(max(spare, key=lambda column: column.spare))
    heads = [column.shown(column.head) for column in kept]
    lines = [_BETWEEN + _BETWEEN.join([*heads, "text"])]
    for i, text in enumerate(texts):
        cells = [column.shown(column.cells[i]) for column in kept]
        lines.append((_BETWEEN + _BETWEEN.join([*cells, _cut(text, max(room, 1))])).rstrip())
    return lines


def wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """`text` in lines that end between words. first, rest: what the first line and the others begin with."""
    lines = textwrap.wrap(
        text,
        line_width(),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first.rstrip()]


def _room(columns: Sequence[Column]) -> int:
    return line_width() - sum(column.width + len(_BETWEEN) for column in columns) - len(_BETWEEN)


def _cut(text: str, width: int) -> str:
    """One line of `text`; some characters take two cells."""
    line = snippet(text, width)
    while cell_len(line) > width:
        line = snippet(line, len(line) - 1)
    return line
