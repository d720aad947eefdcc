"""What a list of messages asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def question_of(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The text of the newest message that is to be answered, a user's or a tool's; empty: there is none."""
    for message in reversed(messages):
        if message.get("role") in ("user", "tool", "function"):
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = next((part["text"] for part in content if part.get("type") == "text"), "")
            return str(content).strip().encode()
    return b""
