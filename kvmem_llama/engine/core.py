"""What a task may touch. Everything here belongs to the owner thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import EngineClosed
from ..settings import Settings
from .cells import CellPool
from .chat_template import ChatTemplate
from .requests import Decoder
from .task import Task

if TYPE_CHECKING:
    from ..native.hooks import Hooks
    from .model import Model


@dataclass(slots=True)
class EngineCore:
    """The parts of one engine, handed to the function that makes a task's generator."""

    model: Model
    decoder: Decoder
    hooks: Hooks | None  # None: stock placement, no capture; only full_context and sliding_window can run
    pool: CellPool  # without hooks it only counts: llama.cpp chooses the cells itself
    settings: Settings
    n_view: int  # budget of the execution view, tokens
    kernels: Any = None  # native.kernels, handed through for the layers above
    scorer: Any = None  # memory.scoring.BlockScorer, set by the layers above; the engine never calls it
    calibration: Any = None  # calibration.Calibration of the model, if there is one; set likewise
    current_task: Task[Any] | None = None  # the task whose generator runs right now
    _template: ChatTemplate | None = None
    _template_lock: threading.Lock = field(default_factory=threading.Lock)
    _template_closed: bool = False

    def chat_template(self) -> ChatTemplate:
        """The chat template of the model, or the one that the settings name; opened when it is first asked
        for. Any thread. Raises as ChatTemplate.open, or EngineClosed."""
        with self._template_lock:
            if self._template_closed:  # the model it is made of is about to go
                raise EngineClosed()
            if self._template is None:
                self._template = ChatTemplate.open(self.model, self.settings)
            return self._template

    def close_template(self) -> None:
        """Idempotent."""
        with self._template_lock:
            self._template_closed = True
            if self._template is not None:
                self._template.close()

    def emit(self, task: Task[Any], event: object) -> None:
        """Sends `event` to whoever watches `task`; never waits. Errors of its on_event come out here."""
        task.emit(event)

    @property
    def seq(self) -> int:
        """Sequence id of the current task. Raises RuntimeError outside of a task."""
        if self.current_task is None or self.current_task.seq < 0:
            raise RuntimeError("no task is running")
        return self.current_task.seq
