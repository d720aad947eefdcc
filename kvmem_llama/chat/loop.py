"""From messages to what is done about them, until there are no more."""

from __future__ import annotations

from typing import Final

from ..cli.interrupts import SecondPress
from ..cli.messages import note
from ..errors import Cancelled, InvalidOption, KvmemError
from .refusing import close_match, in_chat, refused
from .screen import Terminated, unquoted
from .session import Session, is_fatal
from .table import BY_NAME
from .workspace_commands import opening_lines

HINT: Final = ("Ctrl-C stops an answer; Ctrl-D or Ctrl-C twice ends the chat.", "/help shows all commands.")


def run(session: Session) -> None:
    """Main thread only. Raises KeyboardInterrupt for a second Ctrl-C, and what ends the chat."""
    if session.screen.typed:
        session.note_stats()
        session.say(*opening_lines(session), *HINT)
    with session.signals.installed():
        try:
            while not (session.ended or session.signals.terminated):
                typed = _next_message(session)
                if typed is None:
                    return
                if typed:
                    session.signals.typed()
                handle(session, typed)
        except Terminated:
            pass


def handle(session: Session, typed: str) -> None:
    """A command is carried out; what else was typed is asked. Raises what ends the chat."""
    try:
        if typed.startswith("/"):
            _carry_out(session, typed)
        elif message := unquoted(typed):
            session.ask(message)
    except Cancelled:
        session.say("[cancelled]")
    except KvmemError as error:
        if is_fatal(error):
            raise
        session.screen.failed(error)
        session.refused = error
    except SecondPress:
        raise
    except KeyboardInterrupt:  # at a question of the command, or while it worked
        if session.signals.second():
            raise
        session.say("[stopped]")


def _carry_out(session: Session, typed: str) -> None:
    name, _, argument = typed[1:].strip().partition(" ")
    command = BY_NAME.get(name)
    if command is None:
        meant = close_match(name, BY_NAME)
        raise refused(
            f"unknown command /{name}", f"did you mean /{meant}?" if meant else "/help lists them",
            "A message that begins with / can be sent with a space before it.",
        )  # fmt: skip
    try:
        command.run(session, argument.strip())
    except InvalidOption as error:
        raise in_chat(error, name) from None


def _next_message(session: Session) -> str | None:
    prefill, session.prefill = session.prefill, ""
    try:
        return session.screen.next_message(prefill)
    except KeyboardInterrupt:
        if session.signals.second():
            note("")
            raise
        session.say(*HINT)
        return ""
