"""Commands about workspaces as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidOption
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
        raise InvalidOption("/switch", "", "a name is needed", hint="See /workspaces.")
    session.seats.switch(argument)
    _arrived(session)


def fork(session: Session, argument: str) -> None:
    name = _name(argument)
    if session.seat.durable and name is None:
        raise InvalidOption("/fork", "", "a workspace that is kept needs a name", hint="Use /fork NAME.")
    if not session.seat.durable and name is not None:
        raise InvalidOption(
            "/fork",
            name,
            "this workspace ends with the chat, so do its forks",
            hint="Use /fork without a name.",
        )
    session.seats.fork(name)
    _arrived(session)


def remove(session: Session, argument: str) -> None:
    if not argument:
        raise InvalidOption("/rm", "", "a name is needed", hint="See /workspaces.")
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
