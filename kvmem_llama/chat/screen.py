"""What a chat needs of whoever types and reads: a full terminal, a plain one, a pipe, or a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import KvmemError

if TYPE_CHECKING:
    from ..cli.output import Presenter

QUOTES: Final = '"""'
END: Final = "/end"


class Terminated(BaseException):
    """SIGTERM came while a message was awaited."""


class Screen(Protocol):
    """Main thread only, but for `leave`."""

    typed: bool  # somebody types the messages and sees the answers
    presenter: Presenter

    def next_message(self, prefill: str = "") -> str | None:
        """What was typed, as it was typed; None: there is nothing more.

        prefill: text to start from, where it can be edited. Raises KeyboardInterrupt, Terminated.
        """
        ...

    def long_text(self) -> str:
        """Lines up to one that is `/end`, or to the end of the input."""
        ...

    def confirm(self, question: str) -> bool:
        """Where nobody can be asked: no."""
        ...

    def say(self, lines: Iterable[str], event: str = "note", **fields: Any) -> None:
        """The output of a command. event, fields: the same for a program."""
        ...

    def failed(self, error: KvmemError) -> None: ...

    def copy(self, text: str) -> None:
        """To the clipboard. Raises InputError where there is none."""
        ...

    def leave(self) -> None:
        """Makes a running `next_message` raise Terminated; from a signal handler."""
        ...


def is_open(text: str) -> bool:
    '''Begins with """ and still lacks the closing ones.'''
    body = text.lstrip()
    return body.startswith(QUOTES) and not (len(body) >= 2 * len(QUOTES) and body.rstrip().endswith(QUOTES))


def unquoted(typed: str) -> str:
    '''A message as it was meant: without the """ around it, the last of which may be missing.'''
    text = typed.strip()
    if not text.startswith(QUOTES):
        return text
    body = text.removeprefix(QUOTES)
    return (body if is_open(text) else body.removesuffix(QUOTES)).strip("\n")


def collected(first: str, more: Callable[[], str | None]) -> str:
    """What begins with the line `first`; `more` gives further lines, None at the end of the input."""
    lines = [first]
    while is_open("\n".join(lines)):
        line = more()
        if line is None:
            break
        lines.append(line)
    return "\n".join(lines)
