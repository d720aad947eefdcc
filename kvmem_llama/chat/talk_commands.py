"""Commands about the conversation and how it is shown."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..cli.inputs import Document
from ..errors import InputError, InvalidOption
from ..option import Value
from ..settings import BY_NAME as OPTIONS
from ..settings import Option
from .exporting import export
from .toolbar import counted

if TYPE_CHECKING:
    from ..conversation import Turn
    from .session import Session

KEYS: Final = """\
  Enter sends the message, Alt-Enter begins a new line in it, \"\"\" at its start and its end too.
  Ctrl-G opens the message in $EDITOR, Ctrl-R searches older ones, Tab completes, Ctrl-L clears the screen.
  Ctrl-C stops an answer or a reading, twice within a second ends the chat, as Ctrl-D does."""

LOOKS: Final = {"recall": "list the blocks of every recall", "markdown": "render Markdown"}
_CODE: Final = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*\s*$|\Z)", re.M | re.S)
_SWITCH: Final = {"on": True, "off": False}


# -- the chat


def show_help(session: Session, argument: str) -> None:
    from .table import BY_NAME, COMMANDS

    name = argument.removeprefix("/")
    if name and name not in BY_NAME:
        raise InvalidOption("/help", argument, "there is no such command", hint="See /help.")
    rows = [BY_NAME[name]] if name else list(COMMANDS)
    width = max(len(f"{row.name} {row.arguments}") for row in COMMANDS) + 1
    session.say(*(f"  {f'/{row.name} {row.arguments}':<{width}}  {row.help}" for row in rows))
    if not name:
        session.say(KEYS)


def leave(session: Session, argument: str) -> None:
    session.ended = True


# -- turns


def regenerate(session: Session, argument: str) -> None:
    last = _last_turn(session)
    if _may_drop(session, [last]):
        _take_back(session, [last])
        if not session.ask(last.question, again=True):
            session.prefill = last.question


def edit(session: Session, argument: str) -> None:
    last = _last_turn(session)
    if not argument:
        if not session.screen.typed:
            raise InvalidOption("/edit", "", "nobody can edit here", hint="Give the new text: /edit TEXT.")
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
        raise _nothing()
    if n > len(turns):
        raise InvalidOption("/undo", n, f"there are {len(turns)} questions")
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
        raise _nothing()
    text, what = answer.strip(), "the answer"
    if argument:
        n = _count(argument, "/copy")
        blocks = [match[2] for match in _CODE.finditer(answer)]
        if n > len(blocks):
            raise InvalidOption("/copy", n, f"the answer has {len(blocks)} blocks of code")
        text, what = blocks[n - 1], f"block {n}"
    session.screen.copy(text)
    session.say(f"[copied {what}: {len(text):,} characters]")


def export_talk(session: Session, argument: str) -> None:
    if not argument:
        raise InvalidOption("/export", "", "a file is needed", hint="For example /export talk.md.")
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
    name, _, value = argument.partition(" ")
    name, value = _plain_name(name), value.strip()
    if name in LOOKS:
        setattr(session.look, name, _switch(f"/set {name}", value))
    else:
        option = _option(name)
        if not _is_live(option):
            raise InvalidOption(
                f"/set {name}", value, "it is fixed when the chat begins",
                hint=f"Start kvmem chat with {option.flags[0]}. /show lists what can be changed.",
            )  # fmt: skip
        changed: dict[str, Any] = {name: option.parse(value)}
        session.settings = replace(session.settings, **changed)
    session.say(f"{name} = {_value(session, name)}")


def show_options(session: Session, argument: str) -> None:
    names = [_plain_name(argument)] if argument else changeable()
    for name in names:
        if name not in LOOKS:
            _option(name)
        help = LOOKS.get(name) or OPTIONS[name].help
        session.say(f"  {name:<16} {_value(session, name)!s:<10} {help}")


# -- private


def _last_turn(session: Session) -> Turn:
    turns = session.seat.workspace.turns()
    if not turns:
        raise _nothing()
    return turns[-1]


def _nothing() -> InputError:
    return InputError("the last answer", "there is none yet", hint="Ask something first.")


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


def _option(name: str) -> Option:
    if name not in OPTIONS:
        raise InvalidOption("option", name, "there is none of this name", hint="See /show.")
    return OPTIONS[name]


def _is_live(option: Option) -> bool:
    return option.section.startswith("Sampling")


def _value(session: Session, name: str) -> Value:
    if name in LOOKS:
        return "on" if getattr(session.look, name) else "off"
    value: Value = getattr(session.settings, name)
    return value if value != "" else "-"


def _switch(what: str, value: str) -> bool:
    if value not in _SWITCH:
        raise InvalidOption(what, value, "it is on or off")
    return _SWITCH[value]


def _count(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise InvalidOption(what, text, "must be a number from 1 on")
    return int(text)


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
