"""Texts that a command reads: files, standard input, and the words of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..text_file import bytes_of, decode, read_text
from .messages import note

if TYPE_CHECKING:
    from ..memory.report import StepResult
    from ..workspace import Workspace

STDIN: Final = "-"

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from."""

    source: str
    text: str


def read_documents(files: Sequence[str], warn: Warn, *, stdin: bool) -> list[Document]:
    """Texts of `files` in order ("-" is standard input); texts without a character are left out.

    stdin: without files, read standard input if something is piped into it.
    Raises InputError for what cannot be read and for binary data.
    """
    if not files and stdin and _is_piped():
        files = [STDIN]
    documents = [_read(name, warn) for name in files]
    return [document for document in documents if document.text]


def note_repeated(workspace: Workspace, documents: Sequence[Document]) -> None:
    """Says which of the texts a workspace holds already: they are about to be read once more."""
    for document in documents:
        if workspace.has_read(document.text, document.source):
            note(
                f"{document.source} is in this workspace already, word for word; it is read once more. "
                "Leave it out to ask about what was read."
            )


def note_reused(result: StepResult) -> None:
    """Says how much of a text an interrupted step had read already."""
    if result.n_reused:
        note(f"note: {result.n_reused:,} tokens of this were read before; it went on from there")


def from_argument(text: str, name: str, warn: Warn) -> str:
    """A word of the command line; bytes that are not UTF-8 arrive as lone surrogates and are replaced."""
    return _decode(os.fsencode(text), name, warn)


def from_stdin(line: str, name: str, warn: Warn) -> str:
    """A line of standard input, read with `surrogateescape`: what is not UTF-8 is replaced."""
    return _decode(line.encode("utf-8", "surrogateescape"), name, warn)


def _is_piped() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def _read(name: str, warn: Warn) -> Document:
    if name == STDIN:
        if sys.stdin is None or sys.stdin.closed:
            return Document("standard input", "")
        source = "standard input"
        return Document(source, _decode(bytes_of(sys.stdin.buffer, source), source, warn))
    text, bad = read_text(name)
    _warn_of(bad, repr(name), warn)
    return Document(os.path.basename(name), text)


def _decode(data: bytes, source: str, warn: Warn) -> str:
    text, bad = decode(data)
    _warn_of(bad, source, warn)
    return text


def _warn_of(bad: int | None, source: str, warn: Warn) -> None:
    if bad is not None:
        warn(f"{source} is not UTF-8 (first at byte {bad}): read with replacement characters")
