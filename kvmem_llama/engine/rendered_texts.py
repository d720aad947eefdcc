"""Where the texts of messages lie in what a chat template makes of them, whatever the template.

The messages are rendered once more with a mark in place of each text: what stands around the marks stands
around the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import TemplateUnsupported

_Messages: TypeAlias = Sequence[Mapping[str, Any]]
_Render: TypeAlias = Callable[[_Messages], str]
_Slot: TypeAlias = tuple[int, int | None]  # of a text: number of its message, and of its part of the content


@dataclass(frozen=True, slots=True, order=True)
class RenderedText:
    """The text of a message, or of a part of its content, in the whole: characters start <= i < end."""

    start: int
    end: int
    role: str  # of the message


def find_texts(full: str, messages: _Messages, first: int, render: _Render) -> list[RenderedText]:
    """The texts of the messages from number `first` on in `full`, which `render` made of all messages; in the
    order of their places, without those that are left out or cannot be found.

    render: may raise TemplateUnsupported for other messages than these.
    """
    slots = _slots(messages, first)
    spans = _all_at_once(full, messages, slots, render) if len(slots) > 1 else None
    if spans is None:
        spans = [_one(full, messages, slot, render) for slot in slots]
    found = zip(slots, spans, strict=True)
    return sorted(RenderedText(a, b, messages[slot[0]]["role"]) for slot, (a, b) in found if a < b)


def unused(mark: str, messages: _Messages) -> str:
    """`mark`, or a longer one that occurs nowhere in the messages."""
    texts = str(messages)
    while mark in texts:
        mark = f"@{mark}@"
    return mark


def _slots(messages: _Messages, first: int) -> list[_Slot]:
    slots: list[_Slot] = []
    for i in range(first, len(messages)):
        content = messages[i].get("content")
        if isinstance(content, str):
            slots += [(i, None)] if content else []
        elif isinstance(content, Sequence):
            slots += [(i, j) for j, part in enumerate(content) if part.get("text")]
    return slots


def _one(full: str, messages: _Messages, slot: _Slot, render: _Render) -> tuple[int, int]:
    """Where one text lies; (0, 0): nowhere."""
    pieces = _pieces(messages, [slot], render)
    if len(pieces) == 2 and full.startswith(pieces[0]) and full.endswith(pieces[1]):
        return len(pieces[0]), len(full) - len(pieces[1])
    # The template looks at the text: what it makes of another one tells nothing.
    text = _text(messages, slot).strip()
    at = full.rfind(text) if text else -1
    return (at, at + len(text)) if at >= 0 else (0, 0)


def _all_at_once(
    full: str, messages: _Messages, slots: Sequence[_Slot], render: _Render
) -> list[tuple[int, int]] | None:
    """Where the texts lie, whole or stripped, between what stands around the marks; None if that does not add
    up to `full`."""
    pieces = _pieces(messages, slots, render)
    if len(pieces) != len(slots) + 1 or not full.startswith(pieces[0]):
        return None
    spans, at = [], len(pieces[0])
    for slot, piece in zip(slots, pieces[1:], strict=True):
        text = _text(messages, slot)
        for said in (text, text.strip(), text.rstrip(), text.lstrip()):
            if full.startswith(said, at) and full.startswith(piece, at + len(said)):
                break
        else:
            return None
        spans.append((at, at + len(said)))
        at += len(said) + len(piece)
    return spans if at == len(full) else None


def _pieces(messages: _Messages, slots: Sequence[_Slot], render: _Render) -> list[str]:
    """What stands around the marks; [] if the template refuses them: it reads the text as data."""
    mark = unused("@content@", messages)
    marked = [*messages]
    for i, j in slots:
        content: Any = mark
        if j is not None:
            content = list(marked[i]["content"])
            content[j] = {**content[j], "text": mark}
        marked[i] = {**marked[i], "content": content}
    try:
        return render(marked).split(mark)
    except TemplateUnsupported:
        return []


def _text(messages: _Messages, slot: _Slot) -> str:
    content = messages[slot[0]]["content"]
    return str(content if slot[1] is None else content[slot[1]]["text"])
