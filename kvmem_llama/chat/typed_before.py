"""The lines typed in earlier chats, in a file that only its owner can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import platformdirs
from prompt_toolkit.history import FileHistory

MAX_BYTES: Final = 1 << 20  # a longer file is cut to its newer half when it is opened


def history_path() -> Path:
    """In the folder of the user's state: ~/.local/state/kvmem on Linux."""
    return platformdirs.user_state_path("kvmem", appauthor=False) / "chat_history"


class ChatHistory(FileHistory):
    """See prompt_toolkit.history. Where the file cannot be used, lines are kept until the chat ends."""

    def __init__(self, path: Path) -> None:
        self._usable = False
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            path.chmod(0o600)  # it may be older than this rule
            _shorten(path)
            self._usable = True
        super().__init__(str(path))

    def load_history_strings(self) -> Iterable[str]:
        return super().load_history_strings() if self._usable else []

    def store_string(self, string: str) -> None:
        if self._usable:
            with contextlib.suppress(OSError):
                super().store_string(string)


def _shorten(path: Path) -> None:
    data = path.read_bytes()
    if len(data) > MAX_BYTES:
        _, found, newer = data[len(data) // 2 :].partition(b"\n#")
        path.write_bytes(b"\n#" + newer if found else b"")
