"""The one place where a model's reasoning is told from its answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer."""

    text: str
    is_reasoning: bool


class ReasoningSplitter:
    """Splits one answer while it comes. Reasoning stands between <think> and </think> at its start."""

    def __init__(self) -> None:
        self._held = ""  # may be the beginning of a tag
        self._inside: bool | None = None  # None: nothing but spaces so far
        self._after = False  # line ends after the reasoning are left out

    def push(self, text: str) -> Iterator[Part]:
        """Parts whose kind is known now."""
        self._held += text
        if self._inside is None:
            start = self._held.lstrip()
            if OPEN.startswith(start[: len(OPEN)]) and len(start) < len(OPEN):
                return
            self._inside = start.startswith(OPEN)
            if self._inside:
                self._held = start[len(OPEN) :].lstrip("\n")
        if self._inside:
            reasoning, closed, rest = self._held.partition(CLOSE)
            if not closed:
                n = _n_begun(reasoning)
                reasoning, self._held = reasoning[: len(reasoning) - n], reasoning[len(reasoning) - n :]
                if reasoning:
                    yield Part(reasoning, True)
                return
            if reasoning.rstrip("\n"):
                yield Part(reasoning.rstrip("\n"), True)
            self._inside, self._after, self._held = False, True, rest
        if self._after:
            self._held = self._held.lstrip("\n")
            self._after = not self._held
        if self._held:
            yield Part(self._held, False)
            self._held = ""

    def finish(self) -> Iterator[Part]:
        """What was held back, at the end of the answer."""
        if self._held:
            yield Part(self._held, bool(self._inside))
            self._held = ""


def split_reasoning(answer: str) -> tuple[str, str]:
    """(reasoning, the rest) of a whole answer."""
    splitter = ReasoningSplitter()
    parts = [*splitter.push(answer), *splitter.finish()]
    return (
        "".join(part.text for part in parts if part.is_reasoning),
        "".join(part.text for part in parts if not part.is_reasoning),
    )


def _n_begun(text: str) -> int:
    """Characters at the end of `text` that may be the beginning of the closing tag."""
    return next((n for n in range(min(len(CLOSE) - 1, len(text)), 0, -1) if CLOSE.startswith(text[-n:])), 0)
