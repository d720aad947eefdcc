"""From the options of a chat to its screen."""

from __future__ import annotations

import sys

from .lines import JsonScreen, LineScreen
from .look import Look
from .screen import Screen
from .seats import Seats


def open_screen(look: Look, seats: Seats, *, as_json: bool, simple: bool) -> Screen:
    """The best that both ends can do. simple: no more than lines."""
    if as_json:
        return JsonScreen(look)
    typed = sys.stdin is not None and sys.stdin.isatty()
    shown = sys.stdout.isatty()
    look.thinking = look.thinking and shown
    if simple or not (typed and shown):
        return LineScreen(look, typed=typed and shown)

    from prompt_toolkit.utils import is_dumb_terminal

    if is_dumb_terminal():
        return LineScreen(look, typed=True)

    from .completing import ChatCompleter
    from .markdown import terminal_size
    from .prompt import PromptScreen
    from .table import BY_NAME
    from .talk_commands import changeable
    from .toolbar import bar_text
    from .typed_before import ChatHistory, history_path

    completer = ChatCompleter(
        {"workspace": seats.names, "option": changeable, "command": lambda: sorted(BY_NAME)}
    )
    history = ChatHistory(history_path())
    return PromptScreen(look, history, completer, lambda: bar_text(seats.now, terminal_size()[0]))
