"""Server-sent events as llama-server frames them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from .responses import json_bytes

PING: Final = b":\n\n"
"""A comment, which keeps a connection open."""

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {"x-accel-buffering": "no", "cache-control": "no-store"}
MEDIA_TYPE: Final = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream."""

    data: dict[str, Any]
    name: str = ""  # of the event; empty: it has none

    def encode(self) -> bytes:
        head = f"event: {self.name}\n".encode() if self.name else b""
        return head + b"data: " + json_bytes(self.data) + b"\n\n"


def encode(events: Iterable[Event]) -> bytes:
    return b"".join(event.encode() for event in events)
