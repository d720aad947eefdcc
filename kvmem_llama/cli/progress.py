"""The bar shown while a long text is read: tokens, tokens per second, time left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ..memory.report import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

DELAY: Final = 0.3  # seconds of work before a bar appears: short questions need none
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
