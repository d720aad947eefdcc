"""Standard output and standard error while a command runs: any text can be written, losses have a name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class OutputClosed(Exception):
    """Whoever read standard output went away. Not a BrokenPipeError: Typer would end the process on that."""


class OutputFailed(Exception):
    """Standard output takes no more; the text says why (no space left, an I/O error)."""


class _Stream:
    """A text stream that tells its own failures from those of other files."""

    def __init__(self, stream: TextIO | None) -> None:
        # A closed standard stream swallows what it gets.
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115
        self.failed = False
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="replace")  # any text, whatever the locale

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def silence(self) -> None:
        """What is still buffered must not fail again when Python ends: that would change the exit code."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def _lost(self, error: OSError) -> None:
        self.failed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Output(_Stream):
    def _lost(self, error: OSError) -> None:
        super()._lost(error)
        if isinstance(error, BrokenPipeError):
            raise OutputClosed from None
        raise OutputFailed(error.strerror or str(error)) from None


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Within: writing to sys.stdout raises OutputClosed or OutputFailed where it fails.

    What sys.stderr cannot take is dropped, for the answer must not be lost with it.
    """
    before = sys.stdout, sys.stderr
    output, notes = _Output(sys.stdout), _Stream(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, notes)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in (output, notes):
            if stream.failed:
                stream.silence()
