"""Completion of what is typed: commands, then what the command takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from ..errors import KvmemError
from .table import BY_NAME, Takes

Words = Callable[[], Iterable[str]]


class ChatCompleter(Completer):
    """Only lines that begin with / are completed."""

    def __init__(self, words: dict[Takes, Words]) -> None:
        """words: what there is of each kind now."""
        self._words: Final = words
        self._paths: Final = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            yield from _matching(name, sorted(BY_NAME))
            return
        command = BY_NAME.get(name)
        if command is None:
            return
        if command.takes == "path":
            yield from self._paths.get_completions(Document(argument.lstrip()), complete_event)
        elif command.takes in self._words and " " not in argument.lstrip():
            try:
                words = list(self._words[command.takes]())
            except KvmemError:
                return
            yield from _matching(argument.lstrip(), words)


def _matching(begun: str, words: Iterable[str]) -> Iterable[Completion]:
    for word in words:
        if word.startswith(begun):
            yield Completion(word, start_position=-len(begun))
