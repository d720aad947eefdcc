"""The texts that questions are asked about, by name.

Names: "data:FILE", a text file of the folder KVMEM_TEST_DATA; "llama.cpp:PATH", a file of the llama.cpp
source that the build has unpacked; "agent:FILE", a chat-completions body of KVMEM_TEST_DATA as one text.
Question files hold offsets into these texts and their checksums, never the texts.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

LLAMA_CPP = Path(__file__).resolve().parents[2] / "vendor" / "build" / "stock" / "llama.cpp"


class MissingSource(Exception):
    """A source is not here, or its name or its content is not what source_text reads."""


def source_text(name: str) -> str:
    """The whole text of a source; line ends stay as they are, since offsets count them.

    Raises MissingSource, with a text that says what to do.
    """
    kind, _, path = name.partition(":")
    if kind == "llama.cpp":
        return _read(LLAMA_CPP, path, f"{name}: run scripts/build")
    if kind not in ("data", "agent"):
        raise MissingSource(f"{name}: a source is data:FILE, agent:FILE or llama.cpp:PATH")
    folder = os.environ.get("KVMEM_TEST_DATA")
    if not folder:
        raise MissingSource(f"{name}: set KVMEM_TEST_DATA to the folder of the test data")
    text = _read(Path(folder), path, f"{name}: set KVMEM_TEST_DATA to the folder that has the file")
    return text if kind == "data" else _rendered(name, text)


def source_sha256(text: str) -> str:
    """SHA-256 of the text in UTF-8, as hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def agent_text(messages: list[dict[str, Any]]) -> str:
    """Messages of a chat-completions body as one plain text.

    A message is a line "[user]", "[assistant]" or "[tool]" and its text. An assistant's reasoning comes
    before its text, under "[thinking]"; each of its tool calls comes after it, as "[call NAME] " and the
    arguments in JSON, exactly as the model wrote them. Empty parts are left out; an empty line separates
    the others. System prompts are left out (no one asks about them), and so are the definitions of the tools.
    """
    parts = []
    for message in messages:
        role = message["role"]
        if role == "system":
            continue
        if reasoning := message.get("reasoning_content"):
            parts.append(f"[thinking]\n{reasoning}")
        if content := message.get("content"):
            parts.append(f"[{role}]\n{content}")
        for call in message.get("tool_calls") or ():
            parts.append(f"[call {call['function']['name']}] {call['function']['arguments']}")
    return "\n\n".join(parts) + "\n"


def _rendered(name: str, body: str) -> str:
    try:
        return agent_text(json.loads(body)["messages"])
    except (ValueError, KeyError, TypeError) as error:
        raise MissingSource(f"{name}: not a chat-completions body ({error!r}); give one") from error


def _read(folder: Path, path: str, hint: str) -> str:
    file = folder / path
    if not path or not file.is_file():
        raise MissingSource(f"{hint}; there is no file {file}")
    return file.read_bytes().decode("utf-8")
