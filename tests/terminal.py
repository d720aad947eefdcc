"""A terminal for tests: a program runs in it, keys are typed, and what its screen shows can be read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

TESTS = Path(__file__).resolve().parent
PATIENCE = 90.0  # seconds; only a broken program takes so long


class _Screen(pyte.HistoryScreen):
    """Answers the program's questions about the cursor, as a real terminal does."""

    answer: Callable[[bytes], None] = staticmethod(lambda _data: None)

    def write_process_input(self, data: str) -> None:
        self.answer(data.encode())


class Terminal:
    """A running program and the screen it writes to."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
        stderr: Path | None = None,
    ) -> None:
        """stderr: a file that standard error goes to instead."""
        leader, follower = pty.openpty()
        self._leader = leader
        self.raw = b""  # everything the program wrote
        self._screen = _Screen(columns, rows, history=5000, ratio=0.5)
        self._screen.answer = self._send
        self._stream = pyte.ByteStream(self._screen)
        self._changed = threading.Condition()
        self._ended = False
        self._set_size(columns, rows)
        given = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "TERM": "xterm-256color"}
        unset = ("COLUMNS", "LINES", "NO_COLOR")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        with open(stderr or os.devnull, "wb") as file:
            self.process = subprocess.Popen(
                arguments,
                stdin=follower,
                stdout=follower,
                stderr=follower if stderr is None else file,
                env={**inherited, **given, **(env or {})},
                start_new_session=True,
                preexec_fn=_take_terminal,
            )
        os.close(follower)
        self._reader = threading.Thread(target=self._read, name="terminal", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        os.close(self._leader)

    # -- what the program gets

    def type(self, text: str | bytes) -> None:
        self._send(text.encode() if isinstance(text, str) else text)

    def paste(self, text: str) -> None:
        """As a terminal with bracketed paste sends it."""
        self._send(b"\x1b[200~" + text.encode().replace(b"\n", b"\r") + b"\x1b[201~")

    def resize(self, columns: int, rows: int) -> None:
        with self._changed:
            self._screen.resize(rows, columns)
        self._set_size(columns, rows)
        self.signal(signal.SIGWINCH)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    # -- what it shows

    @property
    def text(self) -> str:
        """The screen, and what was scrolled off it; without spaces at the ends of lines."""
        with self._changed:
            return self._text()

    def wait_for(self, shown: str | Callable[[str], bool]) -> str:
        """Waits until the text is on the screen, or the condition holds of it -> the screen."""
        holds = shown if callable(shown) else lambda text: shown in text
        with self._changed:
            found = self._changed.wait_for(lambda: holds(self._text()) or self._ended, PATIENCE)
            text = self._text()
        assert found and holds(text), f"not shown: {shown!r}\n{text}"
        return text

    def ended(self) -> int:
        """Waits for the end of the program -> its exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    # -- private

    def _text(self) -> str:
        above = [
            "".join(line[x].data for x in range(self._screen.columns)) for line in self._screen.history.top
        ]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display])

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._leader, data[:512]) :]

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the other end was closed
            while piece := os.read(self._leader, 65536):
                with self._changed:
                    self.raw += piece
                    self._stream.feed(piece)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _take_terminal() -> None:
    """The terminal's Ctrl-C goes to the program."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
