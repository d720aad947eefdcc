"""From messages to the tokens of a step: which turns a workspace holds, and what the next one appends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from .engine.answer_parser import ParsedMessage
from .engine.chat_template import AnyMessage, ChatTemplate, Message, as_json
from .engine.chat_template import Turn as Rendered
from .engine.message_reader import MessageReader
from .engine.templates import AppliedTemplate, TemplateOptions
from .engine.turn_tokens import TurnTokens, tokenize_turn
from .engine.vocab import Vocab
from .found_turns import TurnText, find_turns
from .native.layout import I32
from .store.rows import StepRow

_PLACEHOLDER: Final = Message("user", "...")
N_CLOSING: Final = 32  # newest tokens of the history that can hold the end of an answer
_N_BEFORE_SYSTEM: Final = 64  # most tokens of a template before a system prompt
_SYSTEM_ROLES: Final = ("system", "developer")
_IN_MIDST: Final = "\0"  # no rendering begins with it


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer in the history."""

    start: int  # token position of its first token
    answer_start: int  # token position
    end: int  # token position after its last token
    context: str  # the texts that came with the question; empty, or with an empty line at its end
    question: str
    answer: str  # without the end token


@dataclass(frozen=True, slots=True)
class _Turn:
    start: int
    question: int  # token position; of a stored one maybe later, in the midst of a long question
    answer_start: int
    end: int
    answer: str
    closed: bool | None  # the answer's last token ended it; None: to be judged by the text of the history


@dataclass(frozen=True, slots=True)
class Asked:
    """Where a step that asks lies in the history; token positions."""

    start: int
    question: int  # of the question alone
    answer_start: int
    is_whole: bool = False  # it holds what is new of a whole list of messages, not one turn


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
        began: int | None = None,
    ) -> None:
        """turns, system_start, began: of a fork."""
        self._vocab = vocab
        self._template = template
        self._system = system
        self._turns = list(turns)
        self._system_start = system_start  # token position of the turn that begins with the system prompt
        self._began = began  # token position of the first turn, also where nothing but its beginning is left

    def fork(self) -> Conversation:
        return Conversation(
            self._vocab, self._template, self._system, self._turns, self._system_start, self._began
        )

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
            if self._began is None:
                self._began = step.start
            self._resume_turn(step, history)
        if not self._turns and not self._holds_system(history):
            self._system_start = None
        return self

    def _resume_turn(self, step: StepRow, history: I32) -> None:
        options = json.loads(step.options)
        answer_start, n_generated = int(options["answer_start"]), int(options["n_generated"])
        end, answer = answer_start + n_generated, step.answer
        question = max(step.query_start, step.start)
        begin = step.start
        is_cut = step.end < end and step.end <= answer_start  # nothing is left of the answer
        if options.get("is_whole"):
            cut = step.end if is_cut else answer_start
            begin, question = self._read_turns(history[:cut], begin, question, is_cut=is_cut)
        if is_cut:
            if self._turns and self._turns[-1].end < step.end:
                self._turns[-1] = replace(self._turns[-1], closed=None)
            return
        if step.end < end:
            left = self._vocab.detokenize(history[answer_start : step.end], special=False)
            answer = left.decode("utf-8", "replace")
        self._turns.append(_Turn(begin, question, answer_start, step.end, answer, bool(step.closed)))

    @property
    def system(self) -> str | None:
        """The system prompt, which the first turn begins with."""
        return self._system

    @property
    def last_answer(self) -> tuple[int, int]:
        """Token positions start, end of the newest answer; 0, -1 if there is none."""
        return (self._turns[-1].answer_start, self._turns[-1].end) if self._turns else (0, -1)

    def turns(self, history: I32) -> tuple[Turn, ...]:
        """Questions and answers, oldest first. history: token ids of the workspace.

        A question is found in the history: what the template puts before and after a message is taken off.
        """
        before, after = (text.encode() for text in self._template.around())
        found = []
        for turn in self._turns:
            text = TurnText(self._vocab, history[turn.start : turn.answer_start])
            whole = text.data
            cut = len(self._vocab.detokenize(history[turn.start : turn.question]))
            end = whole.rfind(after) if after in whole else len(whole)
            floor = text.end_of_eog_before(end)  # of several messages the last one is the question
            at = whole.find(before, floor)
            if at < 0:  # the question itself holds what ends a message
                at = whole.rfind(before, 0, end)
            start = at + len(before) if at >= 0 else floor
            system = _storable(self._system) if self._system and turn is self._turns[0] else b""
            if system and whole.startswith(system, start):  # some templates put it into the first message
                start += len(system)
                start += len(whole[start:]) - len(whole[start:].lstrip(b"\n"))
            context, question = _split(whole[start:end], cut - start)
            found.append(Turn(turn.start, turn.answer_start, turn.end, context, question, turn.answer))
        return tuple(found)

    def last_message(self, history: I32) -> ParsedMessage | None:
        """What the newest answer says, and what was its reasoning; None if there is none.

        history: token ids of the workspace. Raises as ChatTemplate.apply.
        """
        if not self._turns:
            return None
        turn = self._turns[-1]
        prompt = self._vocab.detokenize(history[turn.start : turn.answer_start])
        thinking, not_thinking = (
            self._template.apply([_PLACEHOLDER], TemplateOptions(enable_thinking=thinks))
            for thinks in (True, False)
        )
        asked = thinking
        if not prompt.endswith(thinking.generation_prompt.encode()):
            end = not_thinking.generation_prompt.encode()
            asked = not_thinking if prompt.endswith(end) else thinking
        return MessageReader(asked).message(turn.answer)

    def text_tokens(self, text: str, *, first: bool) -> I32:
        """Tokens of a text that is read as it is; `first`: it begins the history, so BOS comes before it."""
        return self._vocab.tokenize(text, add_bos=first, parse_special=False)

    def next_turn(
        self,
        question: str,
        documents: Sequence[tuple[str, str]],
        history: I32,
        options: TemplateOptions | None = None,
    ) -> tuple[TurnTokens, AppliedTemplate]:
        """Tokens that ask `question`, after `documents` (name, text), and how the answer is sampled and read;
        `history` are the workspace's newest.

        The last span of the turn is the question alone: the documents are read as history. Messages that
        are rendered only to find out what follows them never become part of the turn.
        """
        content = "".join(document_text(name, text) for name, text in documents) + question
        messages = []
        holds_system = self._system_start is not None
        if self._system and (self._turns or not holds_system):
            messages.append(Message("system", self._system))
        closed = None
        newest = ""
        if self._turns:
            messages += [_PLACEHOLDER, Message("assistant", self._turns[-1].answer)]
            closed = self._turns[-1].closed
            # Were this the beginning of the rendering, all messages after it would be taken as missing.
            newest = _IN_MIDST + self._vocab.detokenize(history[-N_CLOSING:]).decode("utf-8", "replace")
        messages.append(Message("user", content))
        turn = self._template.turn(newest, messages, closed=closed, options=options)
        if holds_system and not self._turns:  # what comes before all messages is there, too
            turn = self._template.without_preamble(turn)
        spans = list(turn.spans)
        asked = question.strip()
        if spans and asked and turn.text[slice(*spans[-1])].endswith(asked):
            start, end = spans.pop()
            spans += [(start, end - len(asked)), (end - len(asked), end)]
        tokens = tokenize_turn(self._vocab, turn.text, spans, add_bos=not len(history))
        return tokens, turn.applied

    def render(self, messages: Sequence[AnyMessage], options: TemplateOptions | None = None) -> Rendered:
        """The whole text of a list of messages, with the beginning of an answer after it unless the options
        say otherwise; its spans are where the contents of the messages after the last answer lie in it.
        The system prompt of the conversation comes first if the list has none."""
        if self._system and as_json(messages[0])["role"] not in _SYSTEM_ROLES:
            messages = [Message("system", self._system), *messages]
        return self._template.turn("", messages, options=options)

    def answered(self, asked: Asked, answer: str, tokens: Sequence[int], history: I32) -> None:
        """A step that asks was committed, with the answer's `tokens`.

        history: token ids up to the answer; not looked at but for a whole list."""
        if self._system_start is None and not self._turns:
            self._system_start = asked.start
        if self._began is None:
            self._began = asked.start
        start, question = asked.start, asked.question
        if asked.is_whole:
            start, question = self._read_turns(history, start, question)
        closed = bool(tokens) and self._vocab.is_eog(tokens[-1])
        end = asked.answer_start + len(tokens)
        self._turns.append(_Turn(start, question, asked.answer_start, end, answer, closed))

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
        if self._began is not None and n <= self._began:
            self._began = None

    def _read_turns(
        self, history: I32, begun: int, question: int, *, is_cut: bool = False
    ) -> tuple[int, int]:
        """Takes up the turns that end in `history`, which a whole list of messages was read into from token
        `begun` on -> where the turn begins that does not, and its question. is_cut: no answer follows."""
        turns = self._turns
        last = turns[-1].end if turns else 0
        is_open = bool(turns) and not turns[-1].closed
        found = find_turns(
            self._vocab, history[last:], self._template.around(), max(begun - last, 0), after_open=is_open
        )
        if found.rest:
            answer = turns[-1].answer + found.rest_text
            turns[-1] = replace(turns[-1], end=last + found.rest, answer=answer, closed=True)
        start, is_first = max(begun, turns[-1].end if turns else 0), not turns
        for it in found.turns:
            start, question = last + it.start, last + it.question
            if is_first and self._began is not None:
                start = min(start, self._began)
            is_first = False
            if it.is_open and not (is_cut and it.answer):
                break
            end, answer_start = last + it.end, last + it.answer_start
            turns.append(_Turn(start, question, answer_start, end, it.answer, not it.is_open))
            start = end
        return start, max(question, start)

    def _holds_system(self, history: I32) -> bool:
        if not self._system or self._system_start is None:
            return False
        system = _storable(self._system)
        end = self._system_start + _N_BEFORE_SYSTEM + len(system)  # a token is at least one byte
        return system in self._vocab.detokenize(history[self._system_start : end])


def _storable(system: str) -> bytes:
    """A system prompt as it stands in a history."""
    return system.strip().encode("utf-8", errors="replace")


def _split(content: bytes, cut: int) -> tuple[str, str]:
    """(context, question) of a message whose question begins about byte `cut`: a token may reach over the
    edge, and the texts that come with a question end with an empty line."""
    cut = max(cut, 0)
    while content[cut : cut + 1] == b"\n":
        cut += 1
    if not content[:cut].endswith(b"\n\n"):
        cut = 0
    return content[:cut].decode("utf-8", "replace"), content[cut:].decode("utf-8", "replace")


def document_text(name: str, text: str) -> str:
    """A document as the model reads it: its name, if it has one, above its text."""
    return f"{name}:\n{text}\n\n" if name else f"{text}\n\n"
