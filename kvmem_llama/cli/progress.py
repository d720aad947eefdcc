"""What is shown while a long text is read: tokens, tokens per second, time left."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from ..memory.report import Progress
from .messages import note

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

DELAY: Final = 0.3  # seconds of work before a bar appears: short questions need none
INTERVAL: Final = 10.0  # seconds of work before a line of progress, and between two
_NAMES: Final = {"read": "reading", "query": "asking", "replay": "recalling", "summary": "summarizing"}


class ReadingBar:
    """One line on standard error that goes away when the work is done. Only for terminals."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._started = 0.0

    def show(self, event: Progress) -> None:
        """Draws `event` (counts in tokens), once its phase has taken a while."""
        now = time.monotonic()
        if event.phase != self._phase:
            self.close()
            self._phase, self._started = event.phase, now
        if self._bar is None:
            if now - self._started < DELAY or event.total <= 0 or event.done >= event.total:
                return
            self._open()
        assert self._bar is not None
        if self._task is None:
            self._task = self._bar.add_task(_NAMES.get(event.phase, event.phase), total=event.total)
        self._bar.update(self._task, completed=event.done, total=event.total)

    def close(self) -> None:
        """Takes the bar off the screen; a later event may draw a new one."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
        self._phase = ""

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
        from rich.text import Text

        class Speed(ProgressColumn):
            def render(self, task: Task) -> Text:
                speed = task.finished_speed or task.speed
                return Text(f"{speed:,.0f} tokens/s" if speed else "")

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
            Speed(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.start()


class ReadingLines:
    """For standard error that is no terminal, a log: a line now and then, none for short work."""

    def __init__(self) -> None:
        self._phase = ""
        self._started = 0.0
        self._first = 0  # tokens that were done when the phase began
        self._told = 0.0

    def show(self, event: Progress) -> None:
        """Prints a line if the last one of the phase, or its beginning, was INTERVAL ago."""
        now = time.monotonic()
        if event.phase != self._phase:
            self._phase, self._started, self._first, self._told = event.phase, now, event.done, now
        if now - self._told < INTERVAL or event.done >= event.total:
            return
        self._told = now
        name, speed = _NAMES.get(event.phase, event.phase), (event.done - self._first) / (now - self._started)
        left = f", {(event.total - event.done) / speed:,.0f} s left" if speed > 0 else ""
        note(f"{name}: {event.done:,} of {event.total:,} tokens, {speed:,.0f} tokens/s{left}")

    def close(self) -> None:
        """The work is done; the next event begins anew."""
        self._phase = ""


def reading_progress(*, bar: bool = True) -> ReadingBar | ReadingLines | None:
    """What fits the streams: lines in a log; a bar, if one is wanted, where both are terminals; nothing where
    only the answer goes elsewhere."""
    if not sys.stderr.isatty():
        return ReadingLines()
    return ReadingBar() if bar and sys.stdout.isatty() else None
