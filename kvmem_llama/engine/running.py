"""One running task: its generator, the request it waits for, and the rule that its errors are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .core import EngineCore
from .requests import Decode, Decoded, TaskGenerator, Wait
from .task import Task


class Run:
    """Drives a task's generator. Owner thread only.

    Whatever a generator raises ends its task and reaches nobody but the task's `result`. `on_end` is called
    once, before the waiters of the task wake up.
    """

    def __init__(self, core: EngineCore, task: Task[Any], seq: int, on_end: Callable[[Run], None]) -> None:
        self.task = task
        self.request: Decode | Wait | None = None  # what it waits for; None once it has ended
        self.last_served = -1  # number of the last batch with tokens of this task
        self.ended = False
        self._core = core
        self._on_end = on_end
        self._generator: TaskGenerator[Any] | None = None
        task.start(seq)

    @property
    def ready(self) -> bool:
        """It has tokens to evaluate, and the reader of its events keeps up."""
        return isinstance(self.request, Decode) and not self.task.behind

    @property
    def has_waited(self) -> bool:
        """What it waited for has come, or it is to end."""
        return isinstance(self.request, Wait) and (self.task.stop_requested or self.request.over())

    def start(self) -> None:
        """Makes the generator and runs it to its first request."""

        def first() -> Decode | Wait:
            self._generator = self.task.make(self._core)
            return next(self._generator)

        self._advance(first)

    def send(self, decoded: Decoded) -> None:
        """Goes on to the next request, or to the end."""
        generator = self._generator
        assert generator is not None
        self._advance(lambda: generator.send(decoded))

    def throw(self, error: Exception) -> None:
        """Raises `error` where the generator waits; it may handle it and go on."""
        generator = self._generator
        assert generator is not None
        self._advance(lambda: generator.throw(error))

    def throw_out(self, error: Exception) -> None:
        """Raises `error` where the generator waits and ends the task.

        The generator may clean up, and even return a result, but not ask for another decode: a rollback
        that needs the model could fail or be cancelled itself.
        """
        generator = self._generator
        assert generator is not None

        def last() -> Decode | Wait:
            generator.throw(error)
            generator.close()
            raise RuntimeError("a task asked for a decode while it was rolled back") from error

        self._advance(last)

    def _advance(self, step: Callable[[], Decode | Wait]) -> None:
        self.request = None
        self._core.current_task = self.task
        try:
            request = step()
            while (problem := self._problem(request)) is not None:
                assert self._generator is not None
                request = self._generator.throw(problem)
            self.request = request
        except StopIteration as stop:
            self._end(stop.value, None)
        except BaseException as error:
            self._end(None, error)
        finally:
            self._core.current_task = None

    def _end(self, result: object, error: BaseException | None) -> None:
        self.ended = True
        try:
            self._on_end(self)
        finally:
            self.task.finish(result, error)

    def _problem(self, request: Decode | Wait) -> ValueError | None:
        """A malformed request is a defect of its task: found here, before it can harm a batch with others."""
        if isinstance(request, Wait):
            return None
        n = len(request.tokens)
        if request.seq != self.task.seq:
            return ValueError(f"request for sequence {request.seq}, the task runs on {self.task.seq}")
        if not n or len(request.positions) != n or len(request.cells) != n:
            counts = f"{n} tokens, {len(request.positions)} positions, {len(request.cells)} cells"
            return ValueError(f"a request needs as many of each, at least one: {counts}")
        n_vocab = self._core.decoder.n_vocab
        lowest, highest = (request.tokens.min(), request.tokens.max()) if n > 1 else (request.tokens[0],) * 2
        if lowest < 0 or highest >= n_vocab:
            return ValueError("a token id outside the vocabulary")
        if request.positions[0] < 0 or (n > 1 and bool(np.any(np.diff(request.positions) <= 0))):
            return ValueError("view positions must ascend, from 0 or more")
        if not self._core.pool.is_used(request.cells) or (n > 1 and len(np.unique(request.cells)) != n):
            return ValueError("a cell that is not allocated, or the same cell twice")
        return None
