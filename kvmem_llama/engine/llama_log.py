"""llama.cpp's messages: kept for error texts, shown on stderr only if asked for.

The callback is global in llama.cpp, so it is global here; it stays installed for the life of the process,
because a context may log until its last call.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections import deque
from typing import Any, Final

from ..native.library import import_binding

# enum ggml_log_level
_DEBUG: Final = 1
_WARN: Final = 3
_ERROR: Final = 4
_CONTINUED: Final = 5  # the text goes on from the last message

_lines: Final[deque[str]] = deque(maxlen=32)
_pieces: Final[list[str]] = []  # of a line whose end has not come yet
_lock: Final = threading.Lock()
_state: Final = {"level": 0, "shown": False}


def _message(level: int, text: bytes | None, user_data: object) -> None:
    """Called by llama.cpp on any thread; an exception here would only be printed, so there must be none."""
    piece = (text or b"").decode("utf-8", errors="replace")
    with _lock:
        if level != _CONTINUED:
            _pieces.clear()
            _state["level"] = level
        if _state["shown"] and _state["level"] != _DEBUG:
            sys.stderr.write(piece)
        _pieces.append(piece)
        if piece.endswith("\n"):
            line = "".join(_pieces).strip()
            _pieces.clear()
            if line and _state["level"] in (_WARN, _ERROR):
                _lines.append(line)


def install() -> None:
    """Takes llama.cpp's messages away from stderr."""
    binding: Any = import_binding()
    binding.llama_log_set(_callback(), ctypes.c_void_p(0))


@functools.cache
def _callback() -> Any:
    """One callback for the process: llama.cpp keeps a pointer to it, so it may never be freed."""
    binding: Any = import_binding()
    return binding.llama_log_callback(_message)


def show(shown: bool) -> None:
    """Whether messages are copied to stderr from now on; those for debugging llama.cpp never are: a graph has
    hundreds of them."""
    _state["shown"] = shown


def forget() -> None:
    """Drops the kept lines: what `last_lines` returns afterwards belongs to the next call."""
    with _lock:
        _lines.clear()


def last_lines() -> list[str]:
    """The last warnings and errors since `forget`, oldest first."""
    with _lock:
        return list(_lines)
