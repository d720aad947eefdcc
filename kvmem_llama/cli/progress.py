"""What is shown while a long text is read: tokens, tokens per second, time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from ..memory.report import Progress
from .messages import note

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID
    from rich.status import Status

DELAY: Final = 0.3  # seconds of work before a bar appears: short questions need none
PATIENCE: Final = 1.0  # seconds without anything to see before a sign of life
INTERVAL: Final = 10.0  # seconds of work before a line of progress, and between two
_NAMES: Final = {"read": "reading", "query": "asking", "replay": "recalling", "summary": "summarizing"}


class ReadingBar:
    """One line on standard error that goes away when the work is done, or a sign of life while nothing can be
    counted. Only for terminals."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the sign comes on a thread of its own
        self._timer: threading.Timer | None = None
        self._sign: Status | None = None
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._phase = ""
        self._started = 0.0

    def wait(self) -> None:
        """Nothing can be counted from now on, until the next event."""
        with self._lock:
            self._drop_sign()
            self._timer = threading.Timer(PATIENCE, self._give_sign)
            self._timer.daemon = True
            self._timer.start()

    def show(self, event: Progress) -> None:
        """Draws `event` (counts in tokens), once its phase has taken a while."""
        with self._lock:
            self._drop_sign()
            self._draw(event)
            if event.done >= event.total:
                self.wait()

    def close(self) -> None:
        """Takes the line off the screen; a later event may draw a new one."""
        with self._lock:
            self._drop_sign()
            if self._bar is not None:
                self._bar.stop()
            self._bar = self._task = None
            self._phase = ""

    # -- private

    def _draw(self, event: Progress) -> None:
        now = time.monotonic()
        if event.phase != self._phase:
            self.close()
            self._phase, self._started = event.phase, now
        if self._bar is None:
            if now - self._started < DELAY or event.done >= event.total:
                return
            self._open()
        assert self._bar is not None
        if self._task is None:
            self._task = self._bar.add_task(_NAMES.get(event.phase, event.phase), total=event.total)
        self._bar.update(self._task, completed=event.done, total=event.total)

    def _give_sign(self) -> None:
        from rich.console import Console

        with self._lock:
            if self._timer is threading.current_thread():
                self.close()
                self._sign = Console(stderr=True).status("thinking ...")
                self._sign.start()

    def _drop_sign(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sign is not None:
            self._sign.stop()
        self._timer = self._sign = None

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

    def wait(self) -> None:
        """A log needs no sign of life."""

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
