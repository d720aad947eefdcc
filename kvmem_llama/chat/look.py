"""What a chat shows of an answer, as its user wants it now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Look:
    recall: bool = False  # the blocks of every recall
    thinking: bool = True  # the model's reasoning
    markdown: bool = True  # rendered; only on a terminal that can
