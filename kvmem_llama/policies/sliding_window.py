"""Sink and newest tokens only: what llama.cpp calls context shift, at the canonical view's points."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.native.layout import I32

from .plain import PlainMemory


class SlidingWindow(PlainMemory):
    """What slides out is forgotten for good. A token is moved a few times at most before it is gone, so its
    K is rotated in place and no records are kept; without hooks llama.cpp's K-shift does it.
    """

    name: ClassVar[str] = "sliding_window"

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self._canonical = self._budget.canonical(())

    def _check(self, n_tokens: int) -> None:
        self._budget.check_read(self._canonical)

    def _view(self, t: int) -> I32:
        sink = np.arange(min(self._canonical.n_sink, t), dtype=np.int32)
        return np.concatenate([sink, np.arange(self._canonical.tail_start(t), t, dtype=np.int32)])

    def _next_change(self, t: int) -> int:
        return self._canonical.next_room(t)

    @property
    def _is_full(self) -> bool:
        return False
