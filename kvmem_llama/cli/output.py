"""How events of a step are shown: as text for a person, or as JSON lines for a program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from ..memory.report import (
    Finished,
    MessagePiece,
    Progress,
    Recalled,
    RecallReport,
    StepResult,
    TextPiece,
)
from .messages import note
from .progress import reading_progress
from .recall_table import recall_lines

if TYPE_CHECKING:
    from ..engine.answer_parser import MessageDelta
    from ..workspace import Step

# Control characters but newline and tab: recalled or generated text must not drive the terminal.
_UNSAFE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` without the characters that would drive a terminal."""
    return text.translate(_UNSAFE)


class Presenter(Protocol):
    """Shows one step after the other."""

    answering: bool  # the first piece of the answer has been shown

    def begin(self) -> None:
        """A step begins; nothing of it is known yet."""

    def progress(self, event: Progress) -> None: ...
    def recalled(self, report: RecallReport) -> None: ...
    def text(self, piece: TextPiece) -> None: ...
    def message(self, delta: MessageDelta) -> None:
        """What the texts before it added to the answer's message; a presenter shows these or the texts."""

    def finished(self, result: StepResult) -> None: ...
    def interrupted(self) -> None:
        """The step ended without a result."""


def show(stream: Step, presenter: Presenter, counts: list[Progress] | None = None) -> StepResult:
    """Hands every event of `stream` to `presenter`. Raises what the step raised.

    counts: takes the progress of the step.
    """
    presenter.begin()
    try:
        for event in stream:
            match event:
                case Progress():
                    presenter.progress(event)
                    if counts is not None:
                        counts.append(event)
                case Recalled():
                    presenter.recalled(event.report)
                case TextPiece():
                    presenter.text(event)
                    presenter.answering = True
                case MessagePiece():
                    presenter.message(event.delta)
                case Finished():
                    presenter.finished(event.result)
        return stream.result()
    except BaseException:
        presenter.interrupted()
        raise


class TextPresenter:
    """The answer on standard output; everything else on standard error."""

    def __init__(self, *, show_recall: bool, bar: bool = True) -> None:
        """bar: the progress of a long read is drawn, where both streams are terminals. See progress.py."""
        self.answering = False
        self.show_recall = show_recall
        self._safe = sys.stdout.isatty()
        self._bar = reading_progress(bar=bar)
        self._late: list[RecallReport] = []  # recalls in mid-answer, kept until the answer's last line
        self._mid_line = False

    def begin(self) -> None:
        self.answering = False
        if self._bar is not None:
            self._bar.wait()

    def progress(self, event: Progress) -> None:
        if self._bar is not None:
            self._bar.show(event)

    def recalled(self, report: RecallReport) -> None:
        if not self.show_recall:
            return
        if self.answering:
            self._late.append(report)
        else:
            self._print_recall(report)

    def text(self, piece: TextPiece) -> None:
        self.close_bar()
        text = printable(piece.text) if self._safe else piece.text
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._mid_line = not text.endswith("\n")

    def message(self, delta: MessageDelta) -> None:
        pass

    def finished(self, result: StepResult) -> None:
        self.close_bar()
        self.end_line()
        for report in self._late:
            self._print_recall(report)
        self._late.clear()
        if result.finish_reason == "length" and self._safe:
            note(f"[the answer ends at the limit of {result.n_generated} tokens]")

    def interrupted(self) -> None:
        self.close_bar()
        self._late.clear()
        self.end_line()

    def end_line(self) -> None:
        if self._mid_line:
            self._mid_line = False
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _print_recall(self, report: RecallReport) -> None:
        self.close_bar()
        for line in recall_lines(report):
            note(line)

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
