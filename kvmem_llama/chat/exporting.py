"""A conversation as a file: Markdown to read, JSONL for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import StoreFailed
from .refusing import refused

if TYPE_CHECKING:
    from ..conversation import Turn

FORMATS: Final = (".md", ".jsonl")


def export(path: Path, title: str, system: str | None, turns: Sequence[Turn]) -> None:
    """Writes `turns` in the format that the name ends with. Raises InvalidOption or StoreFailed."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise refused(f"/export {path}", "the name tells the format", f"End it with {' or '.join(FORMATS)}.")
    text = markdown(title, system, turns) if suffix == ".md" else jsonl(system, turns)
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StoreFailed(path, why, hint="Choose another place.") from None


def messages(system: str | None, turns: Sequence[Turn]) -> list[dict[str, str]]:
    """In the form that chat programs take."""
    found = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        found.append({"role": "user", "content": turn.context + turn.question})
        found.append({"role": "assistant", "content": turn.answer})
    return found


def markdown(title: str, system: str | None, turns: Sequence[Turn]) -> str:
    parts = [f"# {title}"]
    for message in messages(system, turns):
        parts.append(f"## {message['role'].capitalize()}\n\n{message['content'].strip()}")
    return "\n\n".join(parts) + "\n"


def jsonl(system: str | None, turns: Sequence[Turn]) -> str:
    """One message a line."""
    return "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in messages(system, turns))
