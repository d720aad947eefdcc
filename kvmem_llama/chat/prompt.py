"""A chat on a full terminal: line editing, completion, history, a bar with the state of memory."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import Completer
from prompt_toolkit.cursor_shapes import CursorShape
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.styles import Style

from ..cli.messages import report_error
from ..errors import KvmemError
from .answer import ChatPresenter
from .look import Look
from .markdown import MarkdownWriter
from .pasting import Pasted
from .screen import END, Terminated, is_open

PROMPT: Final = "> "
PLACEHOLDER: Final = "ask something, or /help"
_STYLE: Final = Style.from_dict({"bottom-toolbar": "noreverse dim", "placeholder": "dim"})


class PromptScreen:
    """See screen.Screen."""

    typed = True

    def __init__(self, look: Look, history: History, completer: Completer, bar: Callable[[], str]) -> None:
        """bar: the text of the last line of the screen."""
        writer = MarkdownWriter(sys.stdout, color=_terminal_color, render=lambda: look.markdown)
        self.presenter: Any = ChatPresenter(look, writer, bar=True)
        self._pasted = Pasted()
        self._session: PromptSession[str] = PromptSession(
            history=history,
            completer=completer,
            complete_while_typing=False,
            auto_suggest=AutoSuggestFromHistory(),
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            style=_STYLE,
            cursor=CursorShape.BEAM,
        )
        self._bar = bar
        self._asking: PromptSession[str] | None = None
        self._keys = self._bindings()

    def next_message(self, prefill: str = "") -> str | None:
        try:
            typed = self._ask(
                self._session,
                PROMPT,
                default=prefill,
                multiline=Condition(self._wants_more),
                key_bindings=self._keys,
                placeholder=[("class:placeholder", PLACEHOLDER)],
                bottom_toolbar=self._bar,
                prompt_continuation="  ",
            )
        except EOFError:
            return None
        return self._pasted.expanded(typed)

    def long_text(self) -> str:
        """Also ended by Alt-Enter."""
        keys = KeyBindings()
        ended = False

        @keys.add("enter")
        def _line(event: KeyPressEvent) -> None:
            nonlocal ended
            buffer = event.current_buffer
            if buffer.document.current_line.strip() == END:
                ended = True
                buffer.validate_and_handle()
            else:
                buffer.insert_text("\n")

        _add_paste(keys, self._pasted)
        session: PromptSession[str] = PromptSession(multiline=True, key_bindings=keys)
        try:
            text = self._ask(session, f"text, then {END}:\n")
        except EOFError:
            return ""
        lines = text.split("\n")
        return self._pasted.expanded("\n".join(lines[:-1] if ended else lines))

    def confirm(self, question: str) -> bool:
        session: PromptSession[str] = PromptSession()
        try:
            return self._ask(session, f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False

    def say(self, lines: Iterable[str], event: str = "note", **fields: Any) -> None:
        for line in lines:
            print(line)
        sys.stdout.flush()

    def failed(self, error: KvmemError) -> None:
        report_error(error)

    def copy(self, text: str) -> None:
        """By OSC 52, which most terminals know, also over ssh; they do not say whether they did it."""
        sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
        sys.stdout.flush()

    def leave(self) -> None:
        app = None if self._asking is None else self._asking.app
        if app is None or app.loop is None:
            raise Terminated
        app.loop.call_soon_threadsafe(lambda: app.is_running and app.exit(exception=Terminated()))

    # -- private

    def _ask(self, session: PromptSession[str], prompt: str, **options: Any) -> str:
        self._asking = session
        try:
            return session.prompt(prompt, **options)
        finally:
            self._asking = None

    def _wants_more(self) -> bool:
        return is_open(self._session.default_buffer.text)

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-g")
        def _editor(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            buffer.text = self._pasted.expanded(buffer.text)
            buffer.open_in_editor()

        _add_paste(keys, self._pasted)
        return keys


def _terminal_color() -> str | None:
    from .rendering import terminal_color

    return terminal_color()


def _add_paste(keys: KeyBindings, pasted: Pasted) -> None:
    @keys.add(Keys.BracketedPaste)
    def _paste(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(pasted.shown(event.data))
