"""From messages to the tokens of a step: which turns a workspace holds, and what the next one appends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from .engine.chat_template import ChatTemplate, Message
from .engine.turn_tokens import TurnTokens, tokenize_turn
from .engine.vocab import Vocab
from .native.layout import I32

_PLACEHOLDER: Final = Message("user", "...")
N_CLOSING: Final = 32  # newest tokens of the history that can hold the end of an answer


@dataclass(frozen=True, slots=True)
class _Turn:
    """A question and its answer in the history."""

    start: int  # token position of its first token
    answer: str
    closed: bool  # the answer's last token ended it


class Conversation:
    """The turns of one workspace. Only the last answer is needed to go on: what comes after it is rendered,
    never the whole history again."""

    def __init__(
        self, vocab: Vocab, template: ChatTemplate, system: str | None, turns: Sequence[_Turn] = ()
    ) -> None:
        self.stop_strings: Final = template.stop_strings
        self._vocab = vocab
        self._template = template
        self._system = system
        self._turns = list(turns)

    def fork(self) -> Conversation:
        return Conversation(self._vocab, self._template, self._system, self._turns)

    def text_tokens(self, text: str, *, first: bool) -> I32:
        """Tokens of a text that is read as it is; `first`: it begins the history, so BOS comes before it."""
        return self._vocab.tokenize(text, add_bos=first, parse_special=False)

    def next_turn(self, question: str, documents: Sequence[tuple[str, str]], history: I32) -> TurnTokens:
        """Tokens that ask `question`, after `documents` (name, text); `history` are the workspace's newest.

        The last span of the turn is the question alone: the documents are read as history.
        """
        content = "".join(document_text(name, text) for name, text in documents) + question
        messages = [Message("system", self._system)] if self._system else []
        closed = None
        if self._turns:
            messages += [_PLACEHOLDER, Message("assistant", self._turns[-1].answer)]
            closed = self._turns[-1].closed
        messages.append(Message("user", content))
        newest = self._vocab.detokenize(history[-N_CLOSING:]).decode("utf-8", "replace")
        turn = self._template.turn(newest if self._turns else "", messages, closed=closed)
        spans = list(turn.spans)
        asked = question.strip()
        if spans and asked and turn.text[slice(*spans[-1])].endswith(asked):
            start, end = spans.pop()
            spans += [(start, end - len(asked)), (end - len(asked), end)]
        return tokenize_turn(self._vocab, turn.text, spans, add_bos=not len(history))

    def answered(self, start: int, answer: str, last_token: int | None) -> None:
        """A turn from token position `start` on was committed."""
        closed = last_token is not None and self._vocab.is_eog(last_token)
        self._turns.append(_Turn(start, answer, closed))

    def truncate(self, n_tokens: int, was: int) -> None:
        """The history was cut from `was` to `n_tokens` tokens."""
        while self._turns and self._turns[-1].start >= n_tokens:
            self._turns.pop()
        if self._turns and n_tokens < was:
            self._turns[-1] = replace(self._turns[-1], closed=False)


def document_text(name: str, text: str) -> str:
    """A document as the model reads it: its name, if it has one, above its text."""
    return f"{name}:\n{text}\n\n" if name else f"{text}\n\n"
