"""The commands of a chat: one table for what runs, /help, completion and docs/chat.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from . import memory_commands as memory
from . import talk_commands as talk
from . import workspace_commands as workspaces

if TYPE_CHECKING:
    from .session import Session

Takes = Literal["", "path", "workspace", "option", "command"]


@dataclass(frozen=True, slots=True)
class Command:
    """One row. `run` gets what stands after the name, without spaces around it."""

    name: str
    arguments: str  # as /help shows them
    help: str
    run: Callable[[Session, str], None]
    takes: Takes = ""  # what is completed


COMMANDS: Final = (
    Command("help", "[COMMAND]", "what can be typed", talk.show_help, "command"),
    Command("exit", "", "end the chat, as Ctrl-D does", talk.leave),
    # the conversation
    Command("regen", "", "drop the last answer and answer the question again", talk.regenerate),
    Command("edit", "[TEXT]", "change the last message and ask it again", talk.edit),
    Command("undo", "[N]", "take back the last question and its answer, or the last N", talk.undo),
    Command("clear", "", "begin the conversation anew; texts read before it stay", talk.clear),
    Command("system", "[TEXT]", "show the system prompt, or set that of new workspaces", talk.system),
    Command("think", "[on|off]", "let the model reason first, or not; alone: show it or not", talk.think),
    Command("copy", "[N]", "copy the last answer, or its N-th block of code, to the clipboard", talk.copy),
    Command("export", "FILE", "write the conversation to a file: .md or .jsonl", talk.export_talk, "path"),
    # workspaces
    Command("workspaces", "", "list the workspaces", workspaces.list_them),
    Command(
        "new", "[NAME]", "begin in a new workspace; without a name it ends with the chat", workspaces.new
    ),
    Command("switch", "NAME", "go on in another workspace", workspaces.switch, "workspace"),
    Command("fork", "[NAME]", "go on in a copy of this workspace", workspaces.fork),
    Command("rm", "NAME", "delete a workspace for good; asks first", workspaces.remove, "workspace"),
    Command("verify", "", "check every stored byte of this workspace", workspaces.verify),
    # memory
    Command("read", "FILE...", "read texts into memory; * and ** stand for any names", memory.read, "path"),
    Command("paste", "", "read the lines that follow, up to /end, into memory", memory.paste),
    Command("forget", "", "forget everything that was read and said; asks first", memory.forget),
    Command("recall", "[QUERY]", "what the last answer recalled, or what QUERY would", memory.recall),
    Command("why", "", "which blocks the last answer attended to", memory.why),
    Command("pin", "[FIRST..LAST]", "keep these tokens in every view; without them: list pins", memory.pin),
    Command("unpin", "FIRST..LAST", "take a pin back", memory.unpin),
    Command("stats", "", "counts and sizes of memory, and times of the last answer", memory.stats),
    # options
    Command("set", "NAME VALUE", "change an option of the answers to come", talk.set_option, "option"),
    Command(
        "show", "[NAME]", "show the options that /set changes, or one of all", talk.show_options, "option"
    ),
)

BY_NAME: Final[Mapping[str, Command]] = {command.name: command for command in COMMANDS}
