"""Commands about the conversation and how it is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..cli.inputs import Document
from ..errors import InvalidOption
from ..option import Value
from ..settings import BY_NAME as OPTIONS
from ..settings import Option
from .exporting import export
from .refusing import close_match, refused
from .rows import wrapped
from .toolbar import counted

if TYPE_CHECKING:
    from ..conversation import Turn
    from .session import Session

KEYS: Final = (
    'Enter sends the message, Alt-Enter begins a new line in it, """ at its start and its end too.',
    "Ctrl-G opens the message in $EDITOR, Ctrl-R searches older ones, Tab completes,"
    " Ctrl-L clears the screen.",
    "Ctrl-C stops an answer or a reading, twice within a second ends the chat, as Ctrl-D does.",
)

VALUE_WIDTH: Final = 10  # of the column of /show
LOOKS: Final = {"recall": "list the blocks of every recall", "markdown": "render Markdown"}
_CODE: Final = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*\s*$|\Z)", re.M | re.S)
_SWITCH: Final = {"on": True, "off": False}


# -- the chat


def show_help(session: Session, argument: str) -> None:
    from .table import BY_NAME, COMMANDS

    name = argument.removeprefix("/")
    if name and name not in BY_NAME:
        raise refused(f"/help {argument}", "there is no such command", "/help lists them.")
    rows = [BY_NAME[name]] if name else list(COMMANDS)
    width = max(len(f"{row.name} {row.arguments}") for row in COMMANDS) + 1
    rest = " " * (width + 4)
    for row in rows:
        session.say(*wrapped(row.help, f"  {f'/{row.name} {row.arguments}':<{width}}  ", rest))
    if not name:
        session.say(*(line for key in KEYS for line in wrapped(key, "  ", "    ")))


def leave(session: Session, argument: str) -> None:
    session.ended = True


# -- turns


def regenerate(session: Session, argument: str) -> None:
    last = _last_turn(session, "/regen", "no question to answer again")
    if _may_drop(session, [last]):
        _take_back(session, [last])
        if not session.ask(last.question, again=True):
            session.prefill = last.question


def edit(session: Session, argument: str) -> None:
    last = _last_turn(session, "/edit", "nothing to edit")
    if not argument:
        if not session.screen.typed:
            raise refused("/edit", "nobody can edit here", "Give the new text: /edit TEXT.")
        session.prefill = f"/edit {last.question}"
        return
    if _may_drop(session, [last]):
        _take_back(session, [last])
        if not session.ask(argument):
            session.prefill = argument


def undo(session: Session, argument: str) -> None:
    n = _count(argument or "1", "/undo")
    turns = session.seat.workspace.turns()
    if not turns:
        raise _nothing("/undo", "nothing to take back")
    if n > len(turns):
        raise refused(f"/undo {n}", f"the conversation has {counted(len(turns), 'question')}")
    gone = turns[-n:]
    if _may_drop(session, gone):
        _take_back(session, gone)
        more = f", and {n - 1} after it" if n > 1 else ""
        session.say(f"[taken back: {_shown(gone[0].question)}{more}{_pending(session)}]")


def clear(session: Session, argument: str) -> None:
    turns = session.seat.workspace.turns()
    if not turns:
        session.say("[there is no conversation yet]")
    elif _may_drop(session, turns):
        _take_back(session, turns)
        left = session.seat.workspace.n_tokens
        rest = f"; {left:,} tokens that were read before it stay in memory" if left else ""
        session.say(f"[the conversation is cleared{rest}{_pending(session)}]")


def system(session: Session, argument: str) -> None:
    workspace = session.seat.workspace
    if not argument:
        session.say(workspace.system or "[there is no system prompt]")
        if session.system != workspace.system:
            session.say(f"[of new workspaces: {session.system}]")
        return
    session.system = argument
    if workspace.n_tokens or session.seat.durable:
        session.say(
            "[this workspace keeps the system prompt it was made with; /new begins one with the new prompt]"
        )
        return
    label = session.seat.label
    session.seats.new(None, argument)
    session.seats.remove(label)
    session.note_stats()
    session.say("[the system prompt is set]")


# -- what is shown, what leaves the chat


def think(session: Session, argument: str) -> None:
    look = session.look
    if not argument:
        look.thinking = not look.thinking
        session.say(f"[reasoning is {'shown' if look.thinking else 'hidden'}]")
        return
    session.thinks = look.thinking = _switch("/think", argument)
    what = "on, and shown" if session.thinks else "off, if the model can do without; it is not shown"
    session.say(f"[reasoning is {what}]")


def copy(session: Session, argument: str) -> None:
    answer = session.last_answer()
    if not answer:
        raise _nothing("/copy", "no answer")
    text, what = answer.strip(), "the answer"
    if argument:
        n = _count(argument, "/copy")
        blocks = [match[2] for match in _CODE.finditer(answer)]
        if n > len(blocks):
            raise refused(f"/copy {n}", f"the answer has {counted(len(blocks), 'block')} of code")
        text, what = blocks[n - 1], f"block {n}"
    session.screen.copy(text)
    session.say(f"[copied {what}: {len(text):,} characters]")


def export_talk(session: Session, argument: str) -> None:
    if not argument:
        raise refused("/export", "a file is needed", "For example /export talk.md.")
    path = Path(os.path.expanduser(argument))
    turns = session.seat.workspace.turns()
    if os.path.exists(path) and not session.screen.confirm(f"Replace {path}?"):
        session.say("[nothing was written]")
        return
    export(path, session.seat.label, session.seat.workspace.system, turns)
    n_left = session.seat.workspace.n_tokens - sum(turn.end - turn.start for turn in turns)
    rest = f"; {n_left:,} tokens that were read apart from questions (/read) are left out" if n_left else ""
    session.say(f"[{path}: {counted(len(turns), 'question')} with answers{rest}]")


# -- options


def changeable() -> list[str]:
    """Names that /set takes."""
    return [*LOOKS, *(name for name, option in OPTIONS.items() if _is_live(option))]


def set_option(session: Session, argument: str) -> None:
    if not argument:
        raise refused(
            "/set", "a name and a value are needed", "For example /set temp 0. /show lists the names."
        )
    typed, _, value = argument.partition(" ")
    name, value = _known("/set", typed), value.strip()
    if name in LOOKS:
        setattr(session.look, name, _switch(f"/set {name}", value))
    else:
        option = OPTIONS[name]
        if not _is_live(option):
            raise refused(
                f"/set {argument}", "it is fixed when the chat begins",
                f"Start kvmem chat with {option.flags[0]}. /show lists what can be changed.",
            )  # fmt: skip
        if not value and option.type is not str:
            raise refused(f"/set {name}", "a value is needed", f"It is {_value(session, name)} now.")
        try:
            changed: dict[str, Any] = {name: option.parse(value)}
            session.settings = replace(session.settings, **changed)
        except InvalidOption as error:
            raise refused(f"/set {argument}", error.why, f"/show {name} tells what it is.") from None
    session.say(f"{name} = {_value(session, name)}")


def show_options(session: Session, argument: str) -> None:
    names = [_known("/show", argument)] if argument else changeable()
    width = max(len(name) for name in names)
    for name in names:
        help, value = LOOKS.get(name) or OPTIONS[name].help, str(_value(session, name))
        below = (
            [f"    {value}"] if len(value) > VALUE_WIDTH else []
        )  # it would push its help out of the column
        first = f"  {name:<{width}}  {'…' if below else value:<{VALUE_WIDTH}}  "
        session.say(*wrapped(help, first, " " * len(first)), *below)


# -- private


def _last_turn(session: Session, command: str, missing: str) -> Turn:
    turns = session.seat.workspace.turns()
    if not turns:
        raise _nothing(command, missing)
    return turns[-1]


def _nothing(command: str, missing: str) -> InvalidOption:
    return refused(command, f"there is {missing} yet", "Ask something first.")


def _may_drop(session: Session, turns: Sequence[Turn]) -> bool:
    """`turns` are the newest; asks where texts that were read since would be lost with them."""
    n_spoken = sum(turn.end - turn.start for turn in turns)
    n_lost = session.seat.workspace.n_tokens - turns[0].start - n_spoken
    if n_lost <= 0:
        return True
    if session.screen.confirm(f"{n_lost:,} tokens that were read since then are lost with it. Go on?"):
        return True
    session.say("[nothing was changed]")
    return False


def _take_back(session: Session, turns: Sequence[Turn]) -> None:
    """The history ends before `turns`; texts that came with their questions are to be read again."""
    seat = session.seat
    seat.workspace.truncate(turns[0].start)
    seat.last = None
    texts = [turn.context.removesuffix("\n\n") for turn in turns if turn.context]
    session.pending = [*(Document("", text) for text in texts), *session.pending]
    session.note_stats()


def _pending(session: Session) -> str:
    return "; the texts that came with it are read again with the next message" if session.pending else ""


def _plain_name(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _known(command: str, typed: str) -> str:
    """Name of the option that was typed as it is called here or as a flag of the command line."""
    name = _plain_name(typed)
    names = {_plain_name(flag): option.name for option in OPTIONS.values() for flag in option.flags}
    names |= {known: known for known in (*OPTIONS, *LOOKS)}
    if name not in names:
        meant = close_match(name, names)
        raise refused(
            f"{command} {typed}",
            "there is no option of this name",
            f"Did you mean {names[meant]}? /show lists what can be changed." if meant
            else "/show lists what can be changed.",
        )  # fmt: skip
    return names[name]


def _is_live(option: Option) -> bool:
    return option.section.startswith("Sampling")


def _value(session: Session, name: str) -> Value:
    if name in LOOKS:
        return "on" if getattr(session.look, name) else "off"
    value: Value = getattr(session.settings, name)
    return value if value != "" else "-"


def _switch(what: str, value: str) -> bool:
    if value not in _SWITCH:
        raise refused(f"{what} {value}", "it is on or off")
    return _SWITCH[value]


def _count(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise refused(f"{what} {text}", "must be a number from 1 on")
    return int(text)


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
