"""The message of an answer, while its text comes and when it is complete."""

from __future__ import annotations

import threading
from typing import Final

from ..errors import KvmemError, OutputMismatch
from .answer_parser import AnswerParser, MessageDelta, ParsedMessage
from .templates import AppliedTemplate


class MessageReader:
    """Reads one answer in the chat template it was asked in. Any thread."""

    def __init__(self, applied: AppliedTemplate) -> None:
        self.applied: Final = applied
        self._lock = threading.Lock()
        self._parser: AnswerParser | None = None  # opened by the first one who reads
        self._text = ""  # of all pieces
        self._n_fed = 0  # characters of it that the parser has taken
        self._content = ""  # of all deltas
        self._only_content = True
        self._message: ParsedMessage | None = None

    def push(self, piece: str) -> list[MessageDelta]:
        """A piece of text of whole characters -> what it adds to the message, often nothing."""
        with self._lock:
            self._text += piece
            try:
                return self._feed(is_partial=True)
            except OutputMismatch:  # more text may help
                return []

    def finish(self, text: str) -> list[MessageDelta]:
        """The answer is complete, and this is all of its text -> what else there is of its message.

        Where the text turns out not to have the template's form, and parts of it went out as reasoning or
        tool calls, the deltas do not add up to the message.
        """
        message = self.message(text)
        with self._lock:
            if not text.startswith(self._text):  # pieces were lost: the reader was too slow
                return []
            self._text = text
            try:
                return self._feed(is_partial=False)
            except KvmemError:
                rest = message.content.removeprefix(self._content)
                fits = self._only_content and message.content.startswith(self._content)
                return [MessageDelta(content=rest)] if rest and fits else []

    def message(self, text: str) -> ParsedMessage:
        """The message of the whole answer. A text that does not have the template's form is its content, so
        that nothing is lost."""
        with self._lock:
            if self._message is None:
                try:
                    self._message = self._parse(text)
                except KvmemError:
                    self._message = ParsedMessage(text, "", ())
            return self._message

    # -- private, under the lock

    @property
    def _is_content(self) -> bool:
        return not self.applied.parser

    def _opened(self) -> AnswerParser:
        if self._parser is None:
            self._parser = self.applied.open_parser()
        return self._parser

    def _parse(self, text: str) -> ParsedMessage:
        return ParsedMessage(text, "", ()) if self._is_content else self._opened().parse(text)

    def _feed(self, *, is_partial: bool) -> list[MessageDelta]:
        piece = self._text[self._n_fed :]
        if self._is_content:
            deltas = [MessageDelta(content=piece)] if piece else []
        else:
            deltas = self._opened().feed(piece, is_partial=is_partial)
        self._n_fed = len(self._text)
        for delta in deltas:
            self._content += delta.content
            self._only_content &= not delta.reasoning_content and delta.tool_call is None
        return deltas
