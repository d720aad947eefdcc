"""`kvmem chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import ahead
from ..errors import KvmemError, exit_code
from ..settings import Settings
from .inputs import from_argument, note_repeated, read_documents
from .messages import warn
from .parameters import GoOn, ReadOnly, ShowRecall
from .parameters import Workspace as NamedWorkspace


def chat(
    settings: Settings,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="text to read with the first message; may be repeated"
        ),
    ] = None,
    workspace: NamedWorkspace = None,
    go_on: GoOn = False,
    read_only: ReadOnly = False,
    show_recall: ShowRecall = False,
    simple_io: Annotated[
        bool, typer.Option("--simple-io", help="plain lines: no colours, no bar, nothing drawn twice")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print events as lines of JSON; messages are read line by line")
    ] = False,
) -> None:
    """Talk with the model; the conversation may outgrow its window.

    Ctrl-C stops an answer (what there is of it stays in the conversation), twice within a second ends the
    chat, as Ctrl-D does. /help lists the commands. Without a terminal, every line of standard input is one
    message, and the exit code is that of the last message that was refused, if any was.
    """
    from .opening import chosen_workspace, grammar_of, opened_engine, workspace_on

    try:
        chosen = chosen_workspace(settings, workspace, go_on=go_on, read_only=read_only)
        documents = read_documents(file or [], warn, stdin=False)
        system = from_argument(settings.system_prompt, "the system prompt", warn)
        grammar_of(settings)  # what is wrong with it is told before the model is loaded

        ahead.want("chat.opening", "chat.loop")
        greets = _typed() and sys.stdout.isatty() and not as_json  # which names the workspace
        if greets:
            ahead.want("chat.prompt", "chat.completing", "chat.typed_before")
        with opened_engine(settings) as engine:
            from ..chat.look import Look
            from ..chat.loop import run
            from ..chat.opening import open_screen
            from ..chat.seats import Seats
            from ..chat.session import Session

            look = Look(recall=show_recall)
            first = workspace_on(engine, settings, system, chosen, name_last=not greets)
            seats = Seats(engine, settings, first)
            try:
                if chosen is not None:
                    note_repeated(seats.now.workspace, documents)
                screen = open_screen(look, seats, as_json=as_json, simple=simple_io)
                session = Session(settings, seats, screen, look, documents)
                run(session)
            finally:
                seats.close()
    except KvmemError as error:
        if as_json:
            from .json_lines import emit_error

            emit_error(error)
        raise
    if session.refused is not None and not _typed():
        raise typer.Exit(exit_code(session.refused))


def _typed() -> bool:
    """Someone types the messages, and has seen which were refused."""
    return sys.stdin is not None and sys.stdin.isatty()
