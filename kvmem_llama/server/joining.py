"""A conversation that stands after something else in its workspace: a text, or another conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..conversation import N_CLOSING
from ..engine.chat_template import ChatTemplate, Turn
from ..engine.templates import TemplateOptions
from ..engine.vocab import Vocab
from ..errors import InvalidRequest, TemplateUnsupported
from ..native.layout import I32
from .choosing import n_common

_IN_MIDST: Final = "\0"  # no rendering begins with it
_ASKED: Final = "..."  # a question of no meaning
_NEXT: Final = "@next@"
_MOST_COMPARED: Final = 256  # characters of a first message


def said(message: Mapping[str, Any]) -> str:
    """The first text of a message, as templates write it."""
    content = message.get("content")
    if isinstance(content, list):
        content = content[0].get("text") if content else ""
    return content.strip() if isinstance(content, str) else ""


def around(template: ChatTemplate) -> tuple[str, str]:
    """As ChatTemplate.around; empty for a template that refuses to tell."""
    try:
        return template.around()
    except (InvalidRequest, TemplateUnsupported):
        return "", ""


def without_preamble(
    template: ChatTemplate, turn: Turn, messages: Sequence[Mapping[str, Any]], options: TemplateOptions
) -> Turn:
    """`turn`, of all `messages`, without what the template puts before a whole conversation of its own
    accord. Instructions and tools of the client's stay."""
    if messages[0]["role"] != "user" or options.tools or options.json_schema is not None:
        return turn
    before, _ = around(template)
    at = turn.text.find(before + said(messages[0]))
    if at <= 0:
        return turn
    spans = tuple((first - at, last - at) for first, last in turn.spans)
    return replace(turn, text=turn.text[at:], spans=spans)


def after_other(
    vocab: Vocab,
    template: ChatTemplate,
    stored: I32,
    answer: str,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions,
) -> Turn:
    """The text of `messages`, as `template` closes a history first, [n] token ids, whose last answer was
    `answer`."""
    newest = _IN_MIDST + vocab.detokenize(stored[-N_CLOSING:]).decode("utf-8", "replace")
    before = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": answer}]
    return template.turn(newest, [*before, *messages], options=options)


def closed_first(vocab: Vocab, template: ChatTemplate, stored: I32, answer: str, turn: Turn) -> Turn:
    """`turn`, which need not be what the template would put there, after the end of the last answer."""
    asked = [{"role": "user", "content": _NEXT}]
    text = after_other(vocab, template, stored, answer, asked, TemplateOptions()).text
    closing, found, _ = text.partition(around(template)[0] + _NEXT)
    if not found:  # a template that changes what users say
        return turn
    n = len(closing)
    spans = tuple((first + n, last + n) for first, last in turn.spans)
    return replace(turn, text=closing + turn.text, spans=spans)


def joined_at(vocab: Vocab, turn: Turn, first: str, stored: I32, prompt_end: int, *, n_after: int) -> int:
    """Where in a history, [n] token ids, a conversation begins that the text of `turn` goes on with; the
    newest place; 0: nowhere but, perhaps, at its beginning.

    first: the text of its first message. prompt_end: tokens of the history before its last answer. n_after:
    how many of them are the template's, after the newest message.
    """
    at = turn.text.find(first)
    if not first or at < 0:
        return 0
    # The last token may have grown together with what came after it.
    head = vocab.tokenize(turn.text[: at + min(len(first), _MOST_COMPARED)])[:-1]
    if not len(head):
        return 0
    tokens = vocab.tokenize(turn.text)
    last = min(prompt_end, len(stored) - len(head) + 1)
    for start in np.flatnonzero(stored[1:last] == head[0])[::-1] + 1:
        if np.array_equal(stored[start : start + len(head)], head):
            n = n_common(stored[start:], tokens, vocab)
            if n >= prompt_end - start - n_after:
                return int(start)
    return 0
