"""From messages to the tokens of a step: which turns a workspace holds, and what the next one appends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from .engine.chat_template import ChatTemplate, Message
from .engine.turn_tokens import TurnTokens, tokenize_turn
from .engine.vocab import Vocab
from .native.layout import I32
from .store.rows import StepRow

_PLACEHOLDER: Final = Message("user", "...")
N_CLOSING: Final = 32  # newest tokens of the history that can hold the end of an answer
_N_BEFORE_SYSTEM: Final = 64  # most tokens of a template before a system prompt
_IN_MIDST: Final = "\0"  # no rendering begins with it


@dataclass(frozen=True, slots=True)
class _Turn:
    """A question and its answer in the history."""

    start: int  # token position of its first token
    answer_start: int  # token position
    end: int  # token position after its last token
    answer: str
    closed: bool | None  # the answer's last token ended it; None: to be judged by the text of the history


class Conversation:
    """The turns of one workspace. Only the last answer is needed to go on: what comes after it is rendered,
    never the whole history again."""

    def __init__(
        self,
        vocab: Vocab,
        template: ChatTemplate,
        system: str | None,
        turns: Sequence[_Turn] = (),
        system_start: int | None = None,
    ) -> None:
        """turns, system_start: of a fork."""
        self.stop_strings: Final = template.stop_strings
        self._vocab = vocab
        self._template = template
        self._system = system
        self._turns = list(turns)
        self._system_start = system_start  # token position of the turn that begins with the system prompt

    def fork(self) -> Conversation:
        return Conversation(self._vocab, self._template, self._system, self._turns, self._system_start)

    @classmethod
    def resumed(
        cls,
        vocab: Vocab,
        template: ChatTemplate,
        system: str | None,
        steps: Sequence[StepRow],
        history: I32,
    ) -> Conversation:
        """The conversation of a stored workspace: `steps` that were finished, `history` their tokens."""
        self = cls(vocab, template, system)
        for step in steps:
            if step.kind != "ask":
                if not step.closed and self._turns:  # it was cut
                    self._turns[-1] = replace(self._turns[-1], closed=None)
                continue
            if self._system_start is None and not self._turns:
                self._system_start = step.start
            self._resume_turn(step, history)
        if not self._turns and not self._holds_system(history):
            self._system_start = None
        return self

    def _resume_turn(self, step: StepRow, history: I32) -> None:
        options = json.loads(step.options)
        answer_start, n_generated = int(options["answer_start"]), int(options["n_generated"])
        end, answer = answer_start + n_generated, step.answer
        if step.end < end and step.end <= answer_start:  # nothing is left of the answer
            if self._turns:
                self._turns[-1] = replace(self._turns[-1], closed=None)
            return
        if step.end < end:
            left = self._vocab.detokenize(history[answer_start : step.end], special=False)
            answer = left.decode("utf-8", "replace")
        self._turns.append(_Turn(step.start, answer_start, step.end, answer, bool(step.closed)))

    def text_tokens(self, text: str, *, first: bool) -> I32:
        """Tokens of a text that is read as it is; `first`: it begins the history, so BOS comes before it."""
        return self._vocab.tokenize(text, add_bos=first, parse_special=False)

    def next_turn(self, question: str, documents: Sequence[tuple[str, str]], history: I32) -> TurnTokens:
        """Tokens that ask `question`, after `documents` (name, text); `history` are the workspace's newest.

        The last span of the turn is the question alone: the documents are read as history. Messages that
        are rendered only to find out what follows them never become part of the turn.
        """
        content = "".join(document_text(name, text) for name, text in documents) + question
        messages = []
        if self._system and (self._turns or self._system_start is None):
            messages.append(Message("system", self._system))
        closed = None
        newest = ""
        if self._turns:
            messages += [_PLACEHOLDER, Message("assistant", self._turns[-1].answer)]
            closed = self._turns[-1].closed
            # Were this the beginning of the rendering, all messages after it would be taken as missing.
            newest = _IN_MIDST + self._vocab.detokenize(history[-N_CLOSING:]).decode("utf-8", "replace")
        messages.append(Message("user", content))
        turn = self._template.turn(newest, messages, closed=closed)
        spans = list(turn.spans)
        asked = question.strip()
        if spans and asked and turn.text[slice(*spans[-1])].endswith(asked):
            start, end = spans.pop()
            spans += [(start, end - len(asked)), (end - len(asked), end)]
        return tokenize_turn(self._vocab, turn.text, spans, add_bos=not len(history))

    def answered(self, start: int, answer_start: int, answer: str, tokens: Sequence[int]) -> None:
        """A turn was committed: its first token lies at `start`, the answer's `tokens` at `answer_start`."""
        if self._system_start is None and not self._turns:
            self._system_start = start
        closed = bool(tokens) and self._vocab.is_eog(tokens[-1])
        self._turns.append(_Turn(start, answer_start, answer_start + len(tokens), answer, closed))

    def truncate(self, history: I32, was: int) -> None:
        """The history was cut from `was` tokens to `history`.

        A turn stays as long as something of its answer does. Without a turn the next one begins anew, with
        the system prompt only if that was cut.
        """
        n = len(history)
        if n == was:
            return
        turns = self._turns
        while turns and n < turns[-1].end and n <= turns[-1].answer_start:
            turns.pop()
        if turns and n < turns[-1].end:
            answer = self._vocab.detokenize(history[turns[-1].answer_start :], special=False)
            turns[-1] = replace(turns[-1], end=n, answer=answer.decode("utf-8", "replace"), closed=False)
        elif turns and n > turns[-1].end:  # what is left of a text or a question comes after it
            turns[-1] = replace(turns[-1], closed=None)
        if not turns and not self._holds_system(history):
            self._system_start = None

    def _holds_system(self, history: I32) -> bool:
        if not self._system or self._system_start is None:
            return False
        system = self._system.strip().replace("\0", "\ufffd").encode("utf-8", errors="replace")
        end = self._system_start + _N_BEFORE_SYSTEM + len(system)  # a token is at least one byte
        return system in self._vocab.detokenize(history[self._system_start : end])


def document_text(name: str, text: str) -> str:
    """A document as the model reads it: its name, if it has one, above its text."""
    return f"{name}:\n{text}\n\n" if name else f"{text}\n\n"
