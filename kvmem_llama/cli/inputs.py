"""Texts that a command reads: files, standard input, and the words of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from ..errors import InputError
from .messages import note

if TYPE_CHECKING:
    from ..workspace import Workspace

STDIN: Final = "-"
_CHUNK: Final = 1 << 20  # bytes

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
        return Document(source, _decode(_bytes_of(sys.stdin.buffer, source), source, warn))
    try:
        with open(os.path.expanduser(name), "rb") as file:
            data = _bytes_of(file, repr(name))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        why = "it is a folder" if isinstance(error, IsADirectoryError) else ""
        raise InputError(repr(name), why or getattr(error, "strerror", None) or str(error)) from None
    return Document(os.path.basename(name), _decode(data, repr(name), warn))


def _bytes_of(file: BinaryIO, source: str) -> bytes:
    """All bytes; stops at the first NUL, so that an endless device ends too."""
    pieces: list[bytes] = []
    while piece := file.read(_CHUNK):
        if b"\0" in piece:
            start = (pieces or [piece])[0]
            if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise InputError(source, "it is UTF-16", hint="Convert it: iconv -f UTF-16 -t UTF-8 FILE.")
            raise InputError(source, "it is binary (it holds NUL bytes)", hint="Only text can be read.")
        pieces.append(piece)
    return b"".join(pieces)


def _decode(data: bytes, source: str, warn: Warn) -> str:
    data = data.removeprefix(b"\xef\xbb\xbf")  # byte order mark
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", errors="replace")
        warn(f"{source} is not UTF-8 (first at byte {error.start}): read with replacement characters")
        return text
