"""The terminal while a step runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silent_keys() -> Iterator[None]:
    """Within: what is typed does not appear in the midst of an answer; it is there for the next message."""
    if sys.platform == "win32" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return

    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    changed[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed meanwhile
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
