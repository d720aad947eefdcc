"""Names of workspaces. A name is data: it is kept in catalogs and never becomes a path."""

from __future__ import annotations

import json
import os
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from kvmem_llama.errors import InvalidName, StoreError, StoreFailed

from .files import Files
from .small_files import is_missing, read_file, remove_if_there, replace_file

MAX_NAME: Final = 200  # characters

_DIGITS: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # without the letters that look like others
_CONTROL: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control, half a character, ends of line and paragraph


def checked_name(name: str) -> str:
    """The name as it is kept, in Unicode's composed form. Raises InvalidName."""
    composed = unicodedata.normalize("NFC", name)
    if not composed:
        raise InvalidName(name, "it is empty")
    if len(composed) > MAX_NAME:
        raise InvalidName(name, f"it has {len(composed)} characters, {MAX_NAME} are allowed")
    for character in composed:
        if unicodedata.category(character) in _CONTROL:
            raise InvalidName(name, f"it holds the control character U+{ord(character):04X}")
    return composed


def new_id() -> str:
    """26 characters that nobody else draws: 48 bits of time in ms, so that they sort by it, 80 random ones.

    Nothing depends on the clock: one that goes backwards makes ids that sort wrongly.
    """
    number = (int(time.time() * 1000) & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10))
    return "".join(_DIGITS[number >> shift & 31] for shift in range(125, -1, -5))


def is_id(text: str) -> bool:
    return len(text) == 26 and set(text) <= set(_DIGITS)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a workspace is."""

    family: str
    workspace: str


class NameCache:
    """Which workspace has which name, so that opening one does not read all catalogs.

    It is deleted before a name is changed and written afterwards, both under the root's lock: if it is there,
    and knows all families that are there, it is right. The catalogs are the truth.
    """

    def __init__(self, root: Path, files: Files) -> None:
        self._path: Final = root / "names.json"
        self._files: Final = files

    def read(self, families: set[str]) -> dict[str, Place] | None:
        """Places by name; None if it cannot be relied on. families: ids of those that are there."""
        try:
            line, _, digest = read_file(self._files, self._path).rpartition(b"\n")
            if xxhash.xxh3_128_hexdigest(line).encode() != digest:
                return None
            found = json.loads(line)
            if set(found["families"]) != families:
                return None
            return {name: Place(*place) for name, place in found["names"].items()}
        except StoreFailed as error:
            if is_missing(error):
                return None
            raise
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, families: set[str], names: dict[str, Place]) -> None:
        """A failure is not one: the catalogs are read instead."""
        rows = {name: [place.family, place.workspace] for name, place in names.items()}
        line = json.dumps({"families": sorted(families), "names": rows}).encode()
        try:
            data = line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode()
            replace_file(self._files, self._path, data, sync=False)
        except StoreError:
            remove_if_there(self._files, self._path)

    def forget(self) -> None:
        """Durably: after a power cut an old one must not come back. Raises StoreFailed."""
        if remove_if_there(self._files, self._path):
            self._files.sync_dir(self._path.parent)
