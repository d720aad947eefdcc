"""Long pasted texts: the line that is edited holds a short mark in their place."""

from __future__ import annotations

from typing import Final

MAX_SHOWN: Final = 2000  # characters
MAX_LINES: Final = 12


class Pasted:
    """The long texts that were pasted into this chat."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # by mark

    def shown(self, text: str) -> str:
        """What to put into the line for a pasted text: itself, or a mark."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        n_lines = text.count("\n") + 1
        if len(text) <= MAX_SHOWN and n_lines <= MAX_LINES:
            return text
        mark = f"[pasted text {len(self._texts) + 1}: {n_lines:,} lines, {len(text):,} characters]"
        self._texts[mark] = text
        return mark

    def expanded(self, message: str) -> str:
        """The message with the texts in place of their marks."""
        for mark, text in self._texts.items():
            message = message.replace(mark, text, 1)
        return message
