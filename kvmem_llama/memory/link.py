"""The line from a running step to whoever watches it."""

from __future__ import annotations

from collections.abc import Callable

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import Phase

from .report import Event, Progress


class TaskLink:
    """Events of the engine's current task, and its request to stop. Owner thread only."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @property
    def stop_requested(self) -> bool:
        task = self._core.current_task
        return task is not None and task.stop_requested

    def emit(self, event: Event) -> None:
        task = self._core.current_task
        if task is not None:
            self._core.emit(task, event)

    def progress(self, phase: Phase, start: int, end: int) -> Callable[[int], None]:
        """To be called with token positions reached: emits the Progress of a phase over start .. end-1."""
        return lambda at: self.emit(Progress(phase.value, at - start, end - start))
