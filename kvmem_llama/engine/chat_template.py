"""From messages to text: the model's chat template, and the text that a new turn adds to a history.

Rendering is llama.cpp's (engine/templates.py); no template needs to be known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from ..errors import InvalidOption, InvalidRequest, TemplateUnsupported
from ..settings import Settings
from . import plain_template
from .model import Model
from .rendered_texts import find_texts, unused
from .templates import CONTENT_ONLY, AppliedTemplate, ChatTemplates, TemplateOptions, read_template
from .vocab import Vocab

_USER: Final = "?"  # a message of no meaning


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # "system", "user", "assistant" or what else the template knows
    content: str


AnyMessage: TypeAlias = Message | Mapping[str, Any]
"""A message, or one of OpenAI's API."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Text to append to a history; `spans` are where the contents of its messages lie in it."""

    text: str
    spans: tuple[tuple[int, int], ...]  # characters start <= i < end, ascending; the last is the question
    roles: tuple[str, ...] = ()  # whose text each span is; empty: all a user's
    applied: AppliedTemplate = CONTENT_ONLY  # how the answer is sampled and read


class ChatTemplate:
    """The chat template of one model. Any thread.

    A model without one is rendered as chatml if its vocabulary has <|im_start|>, else as plain text:
    `User: ...`, `Assistant: ...`, the system prompt without a name, an empty line between them.
    """

    def __init__(self, vocab: Vocab, templates: ChatTemplates | None) -> None:
        """templates: None: plain text. They are closed with this."""
        self._vocab = vocab
        self._templates = templates
        self._around: tuple[str, str] | None = None

    @classmethod
    def open(cls, model: Model, settings: Settings) -> ChatTemplate:
        """The template that the settings name, else the model's own.

        Raises TemplateUnsupported for one that cannot be parsed, InputError for a file that cannot be read,
        InvalidOption, LibraryMissing or LibraryMismatch.
        """
        source = template_text(settings)
        if not source and model.chat_template is None and len(model.vocab.tokenize("<|im_start|>")) > 1:
            return cls(model.vocab, None)
        return cls(model.vocab, ChatTemplates(model, source, jinja=settings.jinja))

    @property
    def is_plain(self) -> bool:
        """The model has no template: its turns end only where a stop string says so."""
        return self._templates is None

    def apply(
        self, messages: Sequence[AnyMessage], options: TemplateOptions | None = None
    ) -> AppliedTemplate:
        """The whole text of `messages`, and how its answer is sampled and read.

        Raises InvalidRequest or TemplateUnsupported.
        """
        return self._applied([as_json(message) for message in messages], options or TemplateOptions())

    def turn(
        self,
        history: str,
        messages: Sequence[AnyMessage],
        *,
        closed: bool | None = None,
        options: TemplateOptions | None = None,
    ) -> Turn:
        """What makes `history` the text of `messages`, with the beginning of an answer, when appended to it.

        history: what the workspace holds, special tokens as text; "" for a new one. It need not be what the
        template would have rendered (an answer keeps its spaces, lacks its end when it was cut short): then
        the text goes on after the last answer of `messages`, whose end is put in if the history lacks it.
        A history that holds no answer of `messages` is left as it is, and all of them are appended.
        closed: the history's last token ended the answer; None: judged by its text.
        Spans are of what comes after the last answer. Raises as `apply`.
        """
        options = options or TemplateOptions()
        found = [as_json(message) for message in messages]
        applied = self._applied(found, options)
        full, last = applied.prompt, last_answer(found, options)
        bos = self._bos_text()
        if bos and history.startswith(bos) and not full.startswith(bos):
            history = history[len(bos) :]
        if full.startswith(history):
            text = full[len(history) :]
        elif last >= 0:
            text = self._after_answer(history, found, last, closed, options)
        else:
            text = full
        if not full.endswith(text):
            return Turn(text, (), (), applied)
        offset = len(full) - len(text)
        texts = find_texts(full, found, last + 1, lambda marked: self._applied(marked, options).prompt)
        texts = [it for it in texts if it.start >= offset]
        spans = tuple((it.start - offset, it.end - offset) for it in texts)
        return Turn(text, spans, tuple(it.role for it in texts), applied)

    def around(self) -> tuple[str, str]:
        """What always comes right before and right after the content of a user message that is answered, but
        for white space before and for what switches reasoning off."""
        if self._around is None:
            mark, earlier = "@content@", "@answer@"
            asked = Message("user", mark)
            first, _, after = self.apply([asked]).prompt.partition(mark)
            other = self.apply([asked], TemplateOptions(enable_thinking=False)).prompt.partition(mark)[2]
            answered = [Message("user", _USER), Message("assistant", earlier), asked]
            between = self.apply(answered).prompt.partition(earlier)[2].partition(mark)[0]
            between = self._after_end(between)
            n = _n_common(first[::-1], between[::-1])
            before = first[len(first) - n :].lstrip() or first
            self._around = before, after[: _n_common(after, other)]
        return self._around

    def without_preamble(self, turn: Turn) -> Turn:
        """`turn`, of one message of a user, without what the template puts before a whole conversation."""
        before, _ = self.around()
        start = turn.spans[0][0] - len(before) if turn.spans else 0
        if start <= 0 or not turn.text.startswith(before, start):
            return turn
        spans = tuple((first - start, last - start) for first, last in turn.spans)
        return replace(turn, text=turn.text[start:], spans=spans)

    def close(self) -> None:
        """Idempotent."""
        if self._templates is not None:
            self._templates.close()

    # -- private

    def _applied(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> AppliedTemplate:
        """messages: as `as_json` gives them."""
        if self._templates is None:
            return plain_template.apply(messages, options)
        return self._templates.apply(messages, options)

    def _after_answer(
        self,
        history: str,
        messages: Sequence[Mapping[str, Any]],
        answer: int,
        closed: bool | None,
        options: TemplateOptions,
    ) -> str:
        mark = unused("@answer@", messages)
        marked = [*messages]
        marked[answer] = {"role": "assistant", "content": mark}
        _, found, rest = self._applied(marked, options).prompt.partition(mark)
        if not found:
            raise TemplateUnsupported("it leaves out answers, so a conversation cannot be continued")
        if closed is False:
            return rest
        ended = replace(options, add_generation_prompt=False, continue_final_message=False)
        closing = self._applied(marked[: answer + 1], ended).prompt.partition(mark)[2]
        # What the history has of the closing already: at least its end-of-turn token, or nothing.
        tokens = self._vocab.tokenize(closing).tolist()
        ends = [token for token in tokens if self._vocab.is_eog(token)]
        if not ends:  # if tokens close an answer here, the one that did it stands in place of them
            replaced = closed and any(self._vocab.is_control(token) for token in tokens)
            return rest.removeprefix(closing) if replaced else rest
        end = self._vocab.piece(ends[0]).decode("utf-8", errors="replace")
        for n in range(len(closing), 0, -1):
            if end in closing[:n] and history.endswith(closing[:n]):
                return rest[n:]
        return rest

    def _after_end(self, text: str) -> str:
        """What comes after the last end-of-generation token in `text`."""
        at = start = 0
        for token in self._vocab.tokenize(text).tolist():
            at += len(self._vocab.piece(token))
            start = at if self._vocab.is_eog(token) else start
        return text.encode("utf-8")[start:].decode("utf-8", errors="replace")

    def _bos_text(self) -> str:
        vocab = self._vocab
        return vocab.piece(vocab.bos).decode("utf-8", errors="replace") if vocab.add_bos else ""


def template_text(settings: Settings) -> str:
    """The jinja text that the settings give, or a name; "": the model's own template.

    Raises InvalidOption, or InputError for a file that cannot be read.
    """
    text = settings.chat_template
    if settings.chat_template_file:
        if text:
            raise InvalidOption(
                "--chat-template-file", settings.chat_template_file, "there is a --chat-template already",
                hint="Give one of them.",
            )  # fmt: skip
        return read_template(settings.chat_template_file)
    if settings.jinja and text and text != "chatml" and "{{" not in text and "{%" not in text:
        raise InvalidOption(
            "--chat-template", text, "it is neither jinja nor chatml",
            hint="Give the text of a jinja template, or its file with --chat-template-file; a name that "
            "llama.cpp knows goes with --no-jinja.",
        )  # fmt: skip
    return text


def as_json(message: AnyMessage) -> dict[str, Any]:
    """A message of OpenAI's API. Half characters, which UTF-8 cannot hold, become question marks.

    Raises InvalidRequest for what is no message.
    """
    if isinstance(message, Message):
        return {"role": message.role, "content": _whole(message.content)}
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"a message must be an object, not a {type(message).__name__}")
    found = dict(message)
    if isinstance(found.get("content"), str):
        found["content"] = _whole(found["content"])
    return found


def last_answer(messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> int:
    """Number of the last message that is an answer, but for one that is to be continued; -1: none is."""
    n = len(messages) - bool(options.continue_final_message)
    return max((i for i in range(n) if messages[i].get("role") == "assistant"), default=-1)


def _whole(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _n_common(a: str, b: str) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n
