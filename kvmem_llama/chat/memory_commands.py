"""Commands about memory: what is in it, what is recalled, what is kept in view."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from typing import TYPE_CHECKING, Final

from ..cli.inputs import Document, read_documents
from ..cli.messages import warn
from ..errors import InputError, InvalidOption
from .refusing import refused
from .stats_lines import stats_lines

if TYPE_CHECKING:
    from .session import Session

N_FOUND: Final = 10  # blocks that a search shows
_WORD: Final = re.compile(r""" "([^"]*)" | '([^']*)' | \S+ """, re.VERBOSE)
_RANGE: Final = re.compile(r"(\d+)(?:\.\.|-)(\d+)")


def read(session: Session, argument: str) -> None:
    if not argument:
        raise refused("/read", "a file is needed", "For example /read notes.md or /read src/*.py.")
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
    from .recall_rows import found_rows, recalled_rows

    if argument:
        found = session.seat.workspace.search(argument, N_FOUND)
        session.screen.say(
            found_rows(found),
            "found",
            n_candidates=len(found.ranking.candidates),
            blocks=[dataclasses.asdict(block) for block in found.blocks],
        )
        return
    last = session.seat.last
    if last is None:
        why = "there is no answer yet"
        if session.seat.workspace.turns():
            why = "there is no answer since this workspace was opened or changed"
        raise refused("/recall", why, "Ask something, or use /recall QUERY.")
    if not last.recalls:
        session.say("[everything fitted the view: nothing had to be recalled]")
    for report in last.recalls:
        session.screen.say(recalled_rows(report), "recall", **dataclasses.asdict(report))


def why(session: Session, argument: str) -> None:
    from .recall_rows import attended_rows
    from .rows import wrapped

    if not session.seat.workspace.turns():
        raise refused("/why", "there is no answer yet", "Ask something first.")
    found = session.seat.workspace.attended()
    last = session.seat.last
    report = last.recalls[-1] if last is not None and last.recalls else None
    share = f"{sum(block.mass for block in found):.0%}"
    lines = wrapped(
        f"{share} of the attention went to the blocks of the view, the rest to the answer's newest tokens"
    )
    lines += attended_rows(found[:N_FOUND], report)
    session.screen.say(lines, "attended", blocks=[dataclasses.asdict(block) for block in found])


def pin(session: Session, argument: str) -> None:
    if not argument:
        pins = session.seat.workspace.stats().pins
        session.say(*(f"  {start}..{end - 1}" for start, end in pins) if pins else ["[nothing is pinned]"])
        return
    start, end = _range("/pin", argument)
    try:
        session.seat.workspace.pin(start, end)
    except InvalidOption as error:
        raise refused(f"/pin {argument}", error.why) from None
    session.note_stats()
    session.say(f"[pinned: tokens {start}..{end - 1}]")


def unpin(session: Session, argument: str) -> None:
    start, end = _range("/unpin", argument)
    try:
        session.seat.workspace.unpin(start, end)
    except InvalidOption as error:
        raise refused(f"/unpin {argument}", error.why, "/pin lists the pins.") from None
    session.note_stats()
    session.say(f"[no longer pinned: tokens {start}..{end - 1}]")


def stats(session: Session, argument: str) -> None:
    found = session.seat.workspace.stats()
    lines = stats_lines(found, session.seat.last)
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
        raise refused(f"{what} {text}".strip(), "the first and the last token are needed, such as 320..351")
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise refused(f"{what} {text}", f"the last token, {last:,}, comes before the first, {first:,}")
    return first, last + 1
