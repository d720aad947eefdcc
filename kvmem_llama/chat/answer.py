"""How an answer is shown in a chat: text as it comes, reasoning apart from it, recalls on request."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TextIO

from ..cli.messages import note
from ..cli.output import TextPresenter, printable
from ..memory.report import RecallReport, TextPiece
from .look import Look
from .recall_rows import recalled_rows

if TYPE_CHECKING:
    from ..engine.answer_parser import MessageDelta

_DIM = "\x1b[2m"
_PLAIN = "\x1b[22m"


class Writer(Protocol):
    """Takes the text of one answer after the other."""

    def text(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...

    def end(self) -> None:
        """The answer is complete: what follows begins on a line of its own."""
        ...


class PlainWriter:
    """Writes text as it comes."""

    def __init__(self, out: TextIO, *, dim: bool) -> None:
        """dim: the terminal can show reasoning dimmed."""
        self._out = out
        self._dim = dim
        self._mid_line = False
        self._was_reasoning = False

    def text(self, text: str) -> None:
        if self._was_reasoning:
            self.end()
        self._write(text, text)

    def reasoning(self, text: str) -> None:
        self._was_reasoning = True
        self._write(text, f"{_DIM}{text}{_PLAIN}" if self._dim else text)

    def end(self) -> None:
        if self._mid_line:
            self._write("\n", "\n")
        self._was_reasoning = False

    def _write(self, text: str, styled: str) -> None:
        if text:
            self._out.write(styled)
            self._out.flush()
            self._mid_line = not text.endswith("\n")


class ChatPresenter(TextPresenter):
    """See cli.output.Presenter."""

    def __init__(self, look: Look, writer: Writer, *, bar: bool) -> None:
        """bar: progress of a long read may be drawn."""
        super().__init__(show_recall=False, bar=bar)
        self._look = look
        self._writer = writer
        self._to_terminal = sys.stdout.isatty()
        self._shown: bool | None = None  # what was shown last is reasoning; None: nothing of this answer

    def recalled(self, report: RecallReport) -> None:
        self.show_recall = self._look.recall
        super().recalled(report)

    def text(self, piece: TextPiece) -> None:
        self.close_bar()

    def message(self, delta: MessageDelta) -> None:
        if delta.reasoning_content:
            self._show(delta.reasoning_content, True)
        if delta.content:
            self._show(delta.content, False)
        if delta.tool_call is not None:  # the chat offers none, but a model may ask for one all the same
            self._show(delta.tool_call.name + delta.tool_call.arguments, False)

    def end_line(self) -> None:
        self._shown = None
        self._writer.end()

    def _print_recall(self, report: RecallReport) -> None:
        self.close_bar()
        for line in recalled_rows(report):
            note(line)

    def _show(self, text: str, is_reasoning: bool) -> None:
        if self._to_terminal:
            text = printable(text)
        if self._shown is not is_reasoning:
            text = text.lstrip("\n")  # empty lines stand around the tags of a reasoning
        if not text:
            return
        self._shown = is_reasoning
        if not is_reasoning:
            self._writer.text(text)
        elif self._look.thinking:
            self._writer.reasoning(text)
