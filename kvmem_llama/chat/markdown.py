"""Markdown on a terminal while it comes: text appears at once, each block is drawn again when it is whole.

A block (paragraph, list, heading, table) is written as plain text first, in rows of our own making, so that
their number is known. When its last line has come, the rendered block takes their place in one write. Nothing
else is ever drawn twice, so nothing flickers. Code is left as it came: its lines are never re-wrapped.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Final, TextIO

from rich.cells import cell_len

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING: Final = re.compile(r" {0,3}#{1,6} ")
_PIECES: Final = re.compile(r"[^\n]*\n|[^\n]+")

Size = Callable[[], tuple[int, int]]


def terminal_size() -> tuple[int, int]:
    """(columns, rows) as they are now."""
    size = shutil.get_terminal_size((80, 24))
    return size.columns, size.lines


class MarkdownWriter:
    """See answer.Writer."""

    def __init__(
        self,
        out: TextIO,
        *,
        color: Callable[[], str | None],
        size: Size = terminal_size,
        render: Callable[[], bool] = lambda: True,
    ) -> None:
        """color: gives Rich's name of the colour system; None: no colours, but bold and the like.
        render: asked for each block; else it stays as it came."""
        self._render = render
        self._out = out
        self._color = color
        self._size = size
        self._block = ""  # text of the block that is not complete
        self._fence = ""  # of the code that is not complete
        self._rows = 0  # line ends written for the block
        self._column = 0  # cells used in its last row
        self._width, self._height = size()
        self._is_empty = True  # nothing was written for this answer
        self._gap = False  # an empty line comes before what is written next
        self._was_reasoning = False

    def text(self, text: str) -> None:
        if self._was_reasoning:
            self.end()
            self._gap, self._is_empty = True, False
        written: list[str] = []
        for line in _PIECES.findall(text):
            self._feed(line, written)
        self._send(written)

    def reasoning(self, text: str) -> None:
        self._was_reasoning = True
        written: list[str] = []
        self._begin(written)
        self._raw(text, written, dim=True)
        self._send(written)

    def end(self) -> None:
        written: list[str] = []
        self._complete(written)
        if self._column:
            written.append("\n")
        self._send(written)
        self._fence, self._was_reasoning = "", False
        self._rows = self._column = 0
        self._is_empty, self._gap = True, False

    # -- private

    def _feed(self, piece: str, written: list[str]) -> None:
        """A piece of one line, with or without its end."""
        line = self._block.rpartition("\n")[2] + piece
        ends = piece.endswith("\n")
        if self._fence:
            written.append(piece)  # the terminal wraps what is too long, and copies it as one line
            self._column = 0 if ends else 1
            self._block = line if not ends else ""
            if ends and line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence, self._gap, self._rows = "", True, 0
            return
        if ends and not line.strip():
            self._complete(written)
            return
        if not self._block and not piece.strip("\n"):
            return
        self._begin(written)
        self._raw(piece, written)
        self._block += piece
        fence = _FENCE.match(line)
        if not ends or not (fence or _HEADING.match(line)):
            return
        before = self._block[: -len(line)]
        if before.strip():  # code and headings need no empty line before them
            self._block = before
            self._complete(written)
            self._begin(written)
            self._raw(line, written)
            self._block = line
        if fence:
            self._fence, self._block, self._rows = fence[1], "", 0
        else:
            self._complete(written)

    def _begin(self, written: list[str]) -> None:
        if self._block or self._column:
            return
        self._width, self._height = self._size()
        self._rows = 0
        if self._gap and not self._is_empty:
            written.append("\n")
        self._gap, self._is_empty = False, False

    def _raw(self, text: str, written: list[str], *, dim: bool = False) -> None:
        """Text as it is, in rows of at most the terminal's width; as it comes if it is not to be rendered."""
        if not self._render():
            self._column = 0 if text.endswith("\n") else 1
            written.append(f"\x1b[2m{text}\x1b[22m" if dim else text)
            return
        out: list[str] = []
        for character in text.expandtabs(4):
            n = 0 if character == "\n" else cell_len(character)
            if character == "\n" or self._column + n > max(self._width - 1, 2):
                self._rows += 1
                self._column = 0
                out.append("\n")
            if character != "\n":
                out.append(character)
                self._column += n
        rows = "".join(out)
        written.append(f"\x1b[2m{rows}\x1b[22m" if dim else rows)

    def _complete(self, written: list[str]) -> None:
        """The block has its last line: it is drawn anew, if its rows are all on the screen."""
        block, self._block = self._block, ""
        if not block.strip() or self._fence:
            return
        self._gap = True
        on_screen = (
            self._render() and self._size() == (self._width, self._height) and self._rows < self._height
        )
        if on_screen:
            up = f"\x1b[{self._rows}A" if self._rows else ""
            written.append(f"\r{up}\x1b[J{self._rendered(block)}\n")
        elif self._column:
            written.append("\n")
        self._rows = self._column = 0

    def _rendered(self, block: str) -> str:
        from .rendering import rendered  # takes long to import; the first prompt does not wait for it

        return rendered(block, self._width, self._color())

    def _send(self, written: list[str]) -> None:
        if text := "".join(written):
            self._out.write(text)
            self._out.flush()
