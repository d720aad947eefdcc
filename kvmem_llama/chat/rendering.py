"""Markdown as text with the control sequences of a terminal."""

from __future__ import annotations

import io
import textwrap
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.padding import Padding
from rich.text import Text


def terminal_color() -> str | None:
    """Rich's name of the colour system of standard output; None: no colours."""
    console = Console()
    return None if console.no_color else console.color_system


def rendered(block: str, width: int, color: str | None) -> str:
    """A block of Markdown in rows of at most `width` cells, without empty ones around it."""
    lines = io.StringIO()
    console = Console(
        file=lines,
        width=width,
        force_terminal=True,
        color_system=color,  # type: ignore[arg-type]
        no_color=color is None,
        highlight=False,
    )
    first = block.split("\n", 1)[0]
    indent = len(first) - len(first.lstrip(" "))
    text = textwrap.dedent(block) if indent else block
    console.print(Padding(_Markdown(text, hyperlinks=False), (0, 0, 0, indent)))
    rows = [row.rstrip() for row in lines.getvalue().split("\n")]
    while rows and not Text.from_ansi(rows[-1]).plain.strip():
        rows.pop()
    while rows and not Text.from_ansi(rows[0]).plain.strip():
        rows.pop(0)
    return "\n".join(rows)


class _LeftHeading(Heading):
    """Rich centers headings and boxes the first ones."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": _LeftHeading}
