"""Files of text: what can be read of them and what is refused, and writing one whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

from .errors import InputError

_CHUNK: Final = 1 << 20  # bytes


def read_text(path: str | os.PathLike[str]) -> tuple[str, int | None]:
    """The text of a file -> it, and the first byte of it that is not UTF-8 (such bytes are replaced), if any.

    Raises InputError for a file that cannot be read, and for one that is not text.
    """
    name = os.fspath(path)
    try:
        with open(os.path.expanduser(name), "rb") as file:
            data = bytes_of(file, repr(name))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        why = "it is a folder" if isinstance(error, IsADirectoryError) else ""
        raise InputError(repr(name), why or getattr(error, "strerror", None) or str(error)) from None
    return decode(data)


def bytes_of(file: BinaryIO, source: str) -> bytes:
    """All bytes; stops at the first NUL, so that an endless device ends too. Raises InputError for it."""
    pieces: list[bytes] = []
    while piece := file.read(_CHUNK):
        if b"\0" in piece:
            start = (pieces or [piece])[0]
            if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise InputError(source, "it is UTF-16", hint="Convert it: iconv -f UTF-16 -t UTF-8 FILE.")
            raise InputError(source, "it is binary (it holds NUL bytes)", hint="Only text can be read.")
        pieces.append(piece)
    return b"".join(pieces)


def decode(data: bytes) -> tuple[str, int | None]:
    """As `read_text`."""
    data = data.removeprefix(b"\xef\xbb\xbf")  # byte order mark
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        return data.decode("utf-8", errors="replace"), error.start


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Makes `text` the content of a file: at every moment it is the old one or the new one, whole.

    Folders are made. mode: of a file that is made, before the process' mask. Raises OSError; nothing is left
    behind.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
