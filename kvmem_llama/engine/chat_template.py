"""From messages to text: the model's chat template, and the text that a new turn adds to a history.

Rendering is llama.cpp's (llama_chat_apply_template: a list of known templates, no jinja). Where message
contents lie in the rendered text is found by rendering once more with a placeholder in their place, so no
template needs to be known here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import TemplateUnsupported
from ..native.library import import_binding
from .vocab import Vocab

_SPEAKERS: Final = {"system": "", "user": "User: ", "assistant": "Assistant: "}


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # "system", "user", "assistant" or what else the template knows
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Text to append to a history; `spans` are where the contents of its messages lie in it."""

    text: str
    spans: tuple[tuple[int, int], ...]  # characters start <= i < end, ascending; the last is the question


class ChatTemplate:
    """The chat template of one model. Any thread.

    A model without one is rendered as chatml if its vocabulary has <|im_start|>, else as plain text:
    `User: ...`, `Assistant: ...`, the system prompt without a name, an empty line between them.
    """

    def __init__(self, vocab: Vocab, template: str | None) -> None:
        """template: the model's own, or a name llama.cpp knows (chatml, gemma, ...).

        Raises TemplateUnsupported for a template that llama.cpp does not know.
        """
        self._llama: Any = import_binding()
        self._vocab = vocab
        if template is None and len(vocab.tokenize("<|im_start|>")) == 1:
            template = "chatml"
        self._template = None if template is None else template.encode("utf-8")
        self.render([Message("user", "?")], add_assistant=True)

    @property
    def is_plain(self) -> bool:
        """The model has no template: its turns end only where a stop string says so."""
        return self._template is None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts at which an answer ends, besides the end-of-generation tokens."""
        return ("\nUser:",) if self.is_plain else ()

    def render(self, messages: Sequence[Message], *, add_assistant: bool) -> str:
        """The text of `messages`; add_assistant: with the beginning of an answer after it.

        NUL characters, which would end a C string, become U+FFFD. Raises TemplateUnsupported.
        """
        if self._template is None:
            return _plain(messages, add_assistant)
        count = len(messages)
        array = (self._llama.llama_chat_message * count)()
        size = 256
        for slot, message in zip(array, messages, strict=True):
            content = message.content.replace("\0", "\ufffd").encode("utf-8", errors="replace")
            slot.role = message.role.encode("utf-8", errors="replace")
            slot.content = content
            size += len(content) + 128
        while True:
            buffer = ctypes.create_string_buffer(size)
            n: int = self._llama.llama_chat_apply_template(
                self._template, array, count, add_assistant, buffer, size
            )
            if n < 0:
                raise self._unsupported()
            if n <= size:
                return buffer.raw[:n].decode("utf-8")
            size = n

    def turn(self, history: str, messages: Sequence[Message], *, closed: bool | None = None) -> Turn:
        """What makes `history` the text of `messages`, with the beginning of an answer, when appended to it.

        history: what the workspace holds, special tokens as text; "" for a new one. It need not be what the
        template would have rendered (an answer keeps its spaces, lacks its end when it was cut short): then
        the text goes on after the last answer of `messages`, whose end is put in if the history lacks it.
        A history that holds no answer of `messages` is left as it is, and all of them are appended.
        closed: the history's last token ended the answer; None: judged by its text.
        """
        full = self.render(messages, add_assistant=True)
        bos = self._bos_text()
        if bos and history.startswith(bos) and not full.startswith(bos):
            history = history[len(bos) :]
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if full.startswith(history):
            text = full[len(history) :]
        elif answers:
            text = self._after_answer(history, messages, answers[-1], closed)
        else:
            text = full
        first = answers[-1] + 1 if answers else 0
        offset = len(full) - len(text)
        if not full.endswith(text):
            return Turn(text, ())
        spans = []
        for i in range(first, len(messages)):
            start, end = self._span(full, messages, i)
            if start >= offset and end > start:
                spans.append((start - offset, end - offset))
        return Turn(text, tuple(sorted(spans)))

    def around(self) -> tuple[str, str]:
        """What always comes right before and right after the content of a user message that is answered."""
        marked, mark = _marked([Message("user", "")], 0)
        earlier = [Message("user", "?"), Message("assistant", "?")]
        first, _, after = self.render(marked, add_assistant=True).partition(mark)
        later = self.render([*earlier, *marked], add_assistant=True).partition(mark)[0]
        n = 0
        while n < min(len(first), len(later)) and first[-1 - n] == later[-1 - n]:
            n += 1
        return first[len(first) - n :], after

    def _after_answer(
        self, history: str, messages: Sequence[Message], answer: int, closed: bool | None
    ) -> str:
        marked, mark = _marked(messages, answer)
        _, found, rest = self.render(marked, add_assistant=True).partition(mark)
        _, _, closing = self.render(marked[: answer + 1], add_assistant=False).partition(mark)
        if not found:
            raise TemplateUnsupported("it leaves out answers, so a conversation cannot be continued")
        if closed is False:
            return rest
        # What the history has of the closing already: at least its end-of-turn token, or nothing.
        ends = [token for token in self._vocab.tokenize(closing).tolist() if self._vocab.is_eog(token)]
        end = self._vocab.piece(ends[0]).decode("utf-8", errors="replace") if ends else ""
        for n in range(len(closing), 0, -1):
            if end and end in closing[:n] and history.endswith(closing[:n]):
                return rest[n:]
        return rest

    def _span(self, full: str, messages: Sequence[Message], i: int) -> tuple[int, int]:
        """Characters of message `i`'s content in `full`; (0, 0) if it is left out, or not only trimmed."""
        marked, mark = _marked(messages, i)
        before, found, after = self.render(marked, add_assistant=True).partition(mark)
        if not found or mark in after or not full.startswith(before) or not full.endswith(after):
            return 0, 0
        return len(before), len(full) - len(after)

    def _bos_text(self) -> str:
        vocab = self._vocab
        return vocab.piece(vocab.bos).decode("utf-8", errors="replace") if vocab.add_bos else ""

    def _unsupported(self) -> TemplateUnsupported:
        count = self._llama.llama_chat_builtin_templates(None, 0)
        names = (ctypes.c_char_p * count)()
        self._llama.llama_chat_builtin_templates(names, count)
        known = ", ".join(name.decode() for name in names if name)
        return TemplateUnsupported(
            "llama.cpp does not know the one in the model file", hint=f"It can render these: {known}."
        )


def _marked(messages: Sequence[Message], i: int) -> tuple[list[Message], str]:
    """The messages with a placeholder, found nowhere in them, as the content of message `i`."""
    mark = "@content@"
    while any(mark in message.content for message in messages):
        mark = f"@{mark}@"
    marked = list(messages)
    marked[i] = replace(marked[i], content=mark)
    return marked, mark


def _plain(messages: Sequence[Message], add_assistant: bool) -> str:
    parts = []
    for message in messages:
        name = _SPEAKERS.get(message.role, f"{message.role.capitalize()}: ")
        parts.append(f"{name}{message.content}\n\n")
    # Without the space: it is part of the answer's first token.
    return "".join(parts) + ("Assistant:" if add_assistant else "")
