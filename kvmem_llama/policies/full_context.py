"""llama.cpp's own behaviour: the whole history is in the view, and it cannot outgrow it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvmem_llama.errors import MandatoryTooLarge
from kvmem_llama.native.layout import I32

from .plain import PlainMemory


class FullContext(PlainMemory):
    """Works with every model llama.cpp can decode; a step that does not fit is refused, an answer ends
    where the view is full."""

    name: ClassVar[str] = "full_context"

    def _check(self, n_tokens: int) -> None:
        if n_tokens > self._budget.n_view:
            raise MandatoryTooLarge(
                n_tokens,
                self._budget.n_view,
                hint="Policy full_context keeps the whole history in the view: use a larger view (-c), "
                "or --policy kvmem.",
            )

    def _view(self, t: int) -> I32:
        return np.arange(t, dtype=np.int32)

    def _next_change(self, t: int) -> int:
        return self._budget.n_view

    @property
    def _is_full(self) -> bool:
        return len(self._cells.held) >= self._budget.n_view
