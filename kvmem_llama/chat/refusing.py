"""Commands that cannot be carried out as they were typed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..errors import InvalidOption

_MOST: Final = 60  # characters of what was typed
_GENERAL: Final = InvalidOption("", "", "").hint  # names the command line's help, which is of no use here


def refused(typed: str, why: str, hint: str = "") -> InvalidOption:
    """typed: the command with its slash, and what was typed after it. hint: else that of its /help."""
    words = typed.split()
    shown = " ".join(words)
    shown = shown if len(shown) <= _MOST else shown[: _MOST - 1] + "…"
    return InvalidOption(shown, True, why, hint=hint or f"See /help {words[0].removeprefix('/')}.")


def in_chat(error: InvalidOption, command: str) -> InvalidOption:
    """`error`, which `command` met, with a hint that can be followed here."""
    if error.hint != _GENERAL:
        return error
    return InvalidOption(error.name, error.value, error.why, hint=f"See /help {command}.")


def close_match(name: str, known: Iterable[str]) -> str:
    """The one of `known` that `name` may have been meant for; empty if none is like it."""
    import difflib

    found = difflib.get_close_matches(name, list(known), 1)
    return found[0] if found else ""
