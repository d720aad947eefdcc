"""A chat line by line: through pipes, on terminals that can do no more, and where that is asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any, Final

from ..cli.inputs import from_stdin
from ..cli.json_lines import JsonPresenter, emit, emit_error
from ..cli.messages import note, report_error, warn
from ..errors import InputError, KvmemError
from .answer import ChatPresenter, PlainWriter
from .look import Look
from .screen import END, Terminated, collected

PROMPT: Final = "> "
MORE: Final = ". "


class LineScreen:
    """See screen.Screen. Without a terminal, nothing but answers goes to standard output."""

    def __init__(self, look: Look, *, typed: bool) -> None:
        self.typed = typed
        self.presenter: Any = ChatPresenter(look, PlainWriter(sys.stdout, dim=False), bar=False)
        if typed:
            _edit_lines()
        elif hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8")
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")  # `from_stdin` warns of what is replaced

    def next_message(self, prefill: str = "") -> str | None:
        line = self._line(PROMPT)
        if line is None:
            return None
        return from_stdin(collected(line, lambda: self._line(MORE)), "the message", warn)

    def long_text(self) -> str:
        lines: list[str] = []
        while (line := self._line(MORE)) is not None and line.strip() != END:
            lines.append(line)
        return from_stdin("\n".join(lines), "the text", warn)

    def confirm(self, question: str) -> bool:
        if not self.typed:
            note(f"{question} Nobody can be asked: no.")
            return False
        return (self._line(f"{question} [y/N] ") or "").strip().lower() in ("y", "yes")

    def say(self, lines: Iterable[str], event: str = "note", **fields: Any) -> None:
        for line in lines:
            if self.typed:
                print(line, flush=True)
            else:
                note(line)

    def failed(self, error: KvmemError) -> None:
        report_error(error)

    def copy(self, text: str) -> None:
        raise InputError("the clipboard", "this terminal has none", hint="Use /export FILE instead.")

    def leave(self) -> None:
        raise Terminated

    def _line(self, prompt: str) -> str | None:
        if sys.stdin is None:
            return None
        try:
            return input(prompt if self.typed else "")
        except EOFError:
            if self.typed:
                print(flush=True)
            return None


class JsonScreen(LineScreen):
    """Every event as a line of JSON; messages come line by line."""

    def __init__(self, look: Look) -> None:
        super().__init__(look, typed=False)
        self.presenter = JsonPresenter()

    def confirm(self, question: str) -> bool:
        return False

    def say(self, lines: Iterable[str], event: str = "note", **fields: Any) -> None:
        emit(event, **fields) if fields else emit("note", text="\n".join(lines))

    def failed(self, error: KvmemError) -> None:
        emit_error(error)


def _edit_lines() -> None:
    """Line editing and the lines typed before, for input()."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
