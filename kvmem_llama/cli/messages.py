"""Lines on standard error: notes, warnings, errors."""

from __future__ import annotations

import sys

from ..errors import KvmemError


def note(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """One line that says what may surprise, and that work goes on."""
    note(f"warning: {text}")


def report_error(error: KvmemError) -> None:
    """What happened on one line, what to do on a second one."""
    note(f"error: {_one_line(error.what)}")
    if error.hint:
        note(_one_line(error.hint))


def report_defect(error: BaseException) -> None:
    """An exception nobody foresaw."""
    text = _one_line(str(error))
    note(f"internal error: {type(error).__name__}{': ' if text else ''}{text[:500]}")
    note("Run again with --verbose to see where it happened, and please report it.")


def _one_line(text: str) -> str:
    return " ".join(text.split())
