"""Commands about workspaces as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .refusing import refused
from .rows import wrapped
from .toolbar import counted

if TYPE_CHECKING:
    from .session import Session


def list_them(session: Session, argument: str) -> None:
    rows = list(session.seats.listing())
    width = max(len(label) for label, _, _ in rows)
    lines = []
    for i, (label, n, remark) in enumerate(rows):
        count = "" if n is None else f"{n:,} tokens"
        lines.append(f"{'*' if i == 0 else ' '} {label:<{width}}  {count:>16}  {remark}".rstrip())
    session.screen.say(
        lines,
        "workspaces",
        workspaces=[{"name": label, "tokens": n, "remark": remark} for label, n, remark in rows],
    )


def new(session: Session, argument: str) -> None:
    session.seats.new(_name(argument), session.system)
    _arrived(session)


def switch(session: Session, argument: str) -> None:
    if not argument:
        raise refused("/switch", "a name is needed", "See /workspaces.")
    session.seats.switch(argument)
    _arrived(session)


def fork(session: Session, argument: str) -> None:
    name = _name(argument)
    if session.seat.durable and name is None:
        raise refused("/fork", "a fork of a workspace that is kept needs a name", "Use /fork NAME.")
    if not session.seat.durable and name is not None:
        raise refused(
            f"/fork {name}",
            "this workspace ends with the chat, and so do its forks",
            "Use /fork without a name. /new NAME, or kvmem chat -w NAME, begins a workspace that is kept.",
        )
    session.seats.fork(name)
    _arrived(session)


def remove(session: Session, argument: str) -> None:
    if not argument:
        raise refused("/rm", "a name is needed", "See /workspaces.")
    if argument != session.seat.label and not session.screen.confirm(f"Delete the workspace {argument}?"):
        session.say("[nothing was deleted]")
        return
    session.seats.remove(argument)
    session.say(f"[deleted: {argument}]")


def verify(session: Session, argument: str) -> None:
    if not session.seat.durable:
        session.say("[this workspace lies in RAM: nothing of it is stored]")
        return
    session.say(*session.seats.verify())


def _name(argument: str) -> str | None:
    if not argument:
        return None
    from ..store.names import checked_name

    return checked_name(argument)


def _arrived(session: Session) -> None:
    session.note_stats()
    session.say(f"[{greeting(session)}]")


def greeting(session: Session) -> str:
    """Where the chat is."""
    seat = session.seat
    n_tokens, n_turns = seat.workspace.n_tokens, len(seat.workspace.turns())
    kept = "" if seat.durable else ", which ends with the chat"
    held = f"{n_tokens:,} tokens, {counted(n_turns, 'question')}" if n_tokens else "empty"
    return f"workspace {seat.label}{kept}: {held}"


def opening_lines(session: Session) -> list[str]:
    """Where the chat begins, and what whoever opens it would not guess."""
    lines = [greeting(session)]
    if not session.seat.durable:
        lines.append("kvmem chat -w NAME begins one that is kept; so does /new NAME.")
    stats = session.seat.stats
    if stats is not None and stats.n_orphans:
        n = counted(stats.n_orphans, "block")
        lines += wrapped(
            f"A step was interrupted: its question or text is not in the history. {n} of it had been read; "
            "the same text goes on from there."
        )
    if session.pending:
        names = ", ".join(document.source for document in session.pending)
        lines += wrapped(f"Read with the first message: {names}")
    return lines
