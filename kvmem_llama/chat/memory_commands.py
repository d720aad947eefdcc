"""Commands about memory: what is in it, what is recalled, what is kept in view."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from typing import TYPE_CHECKING, Final

from ..cli.inputs import Document, read_documents
from ..cli.messages import warn
from ..cli.recall_table import snippet
from ..errors import InputError, InvalidOption
from .toolbar import size, tokens_per_second

if TYPE_CHECKING:
    from .session import Session

N_FOUND: Final = 10  # blocks that a search shows
_WORD: Final = re.compile(r""" "([^"]*)" | '([^']*)' | \S+ """, re.VERBOSE)
_NAMES: Final = {"n_orphans": "blocks_read_ahead"}  # of facts, where the field's does not tell
_RANGE: Final = re.compile(r"(\d+)(?:\.\.|-)(\d+)")


def read(session: Session, argument: str) -> None:
    if not argument:
        raise InvalidOption(
            "/read", "", "a file is needed", hint="For example /read notes.md or /read src/*.py."
        )
    files = _matching(argument)
    documents = read_documents(files, warn, stdin=False)
    if not documents:
        session.say("[there is no text in it]")
    session.read(documents)


def paste(session: Session, argument: str) -> None:
    text = session.screen.long_text().strip("\n")
    if not text:
        session.say("[nothing was pasted]")
        return
    session.read([Document(argument or "pasted text", text)])


def forget(session: Session, argument: str) -> None:
    seat = session.seat
    n = seat.workspace.n_tokens
    if not n:
        session.say("[there is nothing to forget]")
        return
    if not session.screen.confirm(f"Forget all {n:,} tokens of the workspace {seat.label}?"):
        session.say("[nothing was forgotten]")
        return
    seat.workspace.truncate(0)
    seat.last = None
    session.note_stats()
    session.say(f"[{n:,} tokens are forgotten]")


def recall(session: Session, argument: str) -> None:
    from ..cli.recall_table import found_lines, recall_lines

    if argument:
        found = session.seat.workspace.search(argument, N_FOUND)
        session.screen.say(
            found_lines(found),
            "found",
            n_candidates=len(found.ranking.candidates),
            blocks=[dataclasses.asdict(block) for block in found.blocks],
        )
        return
    last = session.seat.last
    if last is None:
        raise InputError(
            "the last recall", "there is no answer yet", hint="Ask something, or use /recall QUERY."
        )
    if not last.recalls:
        session.say("[everything fitted the view: nothing had to be recalled]")
    for report in last.recalls:
        session.screen.say(recall_lines(report), "recall", **dataclasses.asdict(report))


def why(session: Session, argument: str) -> None:
    found = session.seat.workspace.attended()
    last = session.seat.last
    report = last.recalls[-1] if last is not None and last.recalls else None
    whys = {block.start: block.why for block in report.blocks} if report is not None else {}
    share = f"{sum(block.mass for block in found):.0%}"
    lines = [
        f"{share} of the attention went to the blocks of the view, the rest to the answer's newest tokens"
    ]
    for block in found[:N_FOUND]:
        tokens = f"{block.start}..{block.start + block.count - 1}"
        text = snippet(block.text, 60)
        lines.append(f"  {block.mass:>6.1%}  {tokens:>15}  {whys.get(block.start, ''):<8}  {text}")
    session.screen.say(lines, "attended", blocks=[dataclasses.asdict(block) for block in found])


def pin(session: Session, argument: str) -> None:
    if not argument:
        pins = session.seat.workspace.stats().pins
        session.say(*(f"  {start}..{end - 1}" for start, end in pins) if pins else ["[nothing is pinned]"])
        return
    start, end = _range("/pin", argument)
    session.seat.workspace.pin(start, end)
    session.note_stats()
    session.say(f"[pinned: tokens {start}..{end - 1}]")


def unpin(session: Session, argument: str) -> None:
    start, end = _range("/unpin", argument)
    session.seat.workspace.unpin(start, end)
    session.note_stats()
    session.say(f"[no longer pinned: tokens {start}..{end - 1}]")


def stats(session: Session, argument: str) -> None:
    found = session.seat.workspace.stats()
    lines = []
    for name, value in dataclasses.asdict(found).items():
        if name == "tiers":
            lines += [_fact(key, item) for key, item in (value or {}).items()]
        elif name != "pins" and value not in ("", None, {}):
            lines.append(_fact(name, value))
    last = session.seat.last
    if last is not None:
        lines.append("  of the last answer")
        lines += [_fact(name, seconds) for name, seconds in last.timings.items()]
        if (speed := tokens_per_second(last)) is not None:
            lines.append(_fact("tokens_per_second", round(speed, 1)))
    session.screen.say(lines, "stats", **dataclasses.asdict(found))


# -- private


def _matching(argument: str) -> list[str]:
    """File names that `argument` stands for: itself, or several words or patterns. Raises InputError."""
    if os.path.exists(os.path.expanduser(argument)):
        return [argument]
    files = []
    for word in _words(argument):
        path = os.path.expanduser(word)
        if os.path.exists(path) or not glob.has_magic(path):
            files.append(path)
            continue
        found = [name for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
        if not found:
            raise InputError(repr(word), "no file has such a name")
        files += found
    return files


def _words(argument: str) -> list[str]:
    """Split at spaces, which quotes keep; a backslash is one, as Windows wants it."""
    return [found[1] or found[2] or found[0] for found in _WORD.finditer(argument)]


def _range(what: str, text: str) -> tuple[int, int]:
    """`320..351` -> 320, 352."""
    match = _RANGE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise InvalidOption(what, text, "must be the first and the last token, such as 320..351")
    return int(match[1]), int(match[2]) + 1


def _fact(name: str, value: object) -> str:
    name = _NAMES.get(name, name)
    if isinstance(value, dict):
        value = ", ".join(f"{key} {round(n, 1):,g}" for key, n in value.items())
    elif name.endswith("_bytes") and isinstance(value, int):
        value = f"{value:,} ({size(value)})"
    elif name.endswith(("_s", "_seconds")) and isinstance(value, float):
        value = f"{value:.3f}"
    elif type(value) is int:
        value = f"{value:,}"
    return f"  {name.replace('_', ' '):<22} {value}"
