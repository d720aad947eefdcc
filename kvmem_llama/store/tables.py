"""Tables of the catalog. Each row carries a checksum over its fields, which is made here when the row is
written and compared here when it is read: there is no other way to a row."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar, cast

import xxhash

from .rows import (
    AheadRow,
    BlockRow,
    HeatRow,
    LineageRow,
    MetaRow,
    OwnedSegment,
    PinRow,
    SlotRow,
    StepRow,
    TextRow,
    TokensRow,
    WordsRow,
    WorkspaceRow,
)

Db = sqlite3.Connection

_INT: Final = struct.Struct("<cq")
_FLOAT: Final = struct.Struct("<cd")


# What sqlite3 raises for a file it cannot make sense of; the second one for damaged bytes in a message.
SQLITE_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)


class BadRow(Exception):
    """A row does not have the checksum it was written with, or rows that belong together do not fit."""


class MissingRow(BadRow):
    """Of rows that are counted elsewhere, some are not there."""


def storable(text: str) -> str:
    """Text that can be kept: halves of characters, as a damaged command line may hold them, become '?'."""
    return text.encode("utf-8", "replace").decode()


def seal(table: str, values: Iterable[object]) -> int:
    """Checksum of a row: xxh3-64 over its table's name and its typed fields, as a signed number."""
    digest = xxhash.xxh3_64(table.encode())
    parts = []
    for value in values:
        if type(value) is int:
            parts.append(_INT.pack(b"i", value))
        elif value is None:
            parts.append(b"n")
        elif type(value) is float:
            parts.append(_FLOAT.pack(b"f", value))
        elif isinstance(value, bytes):
            parts += [_INT.pack(b"b", len(value)), value]
        elif type(value) is str:
            data = value.encode()
            parts += [_INT.pack(b"s", len(data)), data]
        else:
            raise TypeError(f"{value!r} cannot be a field of {table}")
    digest.update(b"".join(parts))
    number = digest.intdigest()
    return number - (1 << 64) if number >> 63 else number


R = TypeVar("R")


class Table(Generic[R]):
    """Reads and writes the rows of one table."""

    def __init__(self, name: str, row: type[R], key: str) -> None:
        """row: a dataclass with the table's columns. key: names of the fields that messages show."""
        fields = [f.name for f in dataclasses.fields(cast(Any, row))]
        self.name: Final = name
        self._key: Final = key.split()
        self._row: Final = row
        self._fields: Final = fields
        quoted = ", ".join(f'"{field}"' for field in fields)
        self._select: Final = f"SELECT {quoted}, row_xxh FROM {name}"
        marks = ", ".join("?" * (len(fields) + 1))
        self._insert: Final = f"({quoted}, row_xxh) VALUES ({marks})"

    def rows(self, db: Db, where: str = "1", args: Sequence[object] = (), tail: str = "") -> Iterator[R]:
        """Raises BadRow for the first one that is not as it was written."""
        for values in db.execute(f"{self._select} WHERE {where} {tail}", args):
            yield self.checked(values)

    def sound_rows(
        self, db: Db, where: str = "1", args: Sequence[object] = (), tail: str = ""
    ) -> Iterator[R]:
        """As `rows`, without those that are not as they were written: of what can be made again."""
        for values in db.execute(f"{self._select} WHERE {where} {tail}", args):
            with contextlib.suppress(BadRow):
                yield self.checked(values)

    def raw(self, db: Db) -> Iterator[tuple[object, ...]]:
        """All rows unchecked, each with its checksum last: for `verify`."""
        yield from db.execute(self._select)

    def checked(self, values: tuple[Any, ...]) -> R:
        """Row of the values of one line of the table. Raises BadRow."""
        if seal(self.name, values[:-1]) != values[-1]:
            raise BadRow(f"the row {self.describe(values)} is not as it was written")
        return self._row(*values[:-1])

    def describe(self, values: Sequence[object]) -> str:
        """The row as messages name it."""
        named = dict(zip(self._fields, values, strict=False))
        return f"{self.name}({', '.join(f'{key} {named[key]!r:.40}' for key in self._key)})"

    def one(self, db: Db, where: str, args: Sequence[object]) -> R | None:
        return next(self.rows(db, where, args, "LIMIT 1"), None)

    def insert(self, db: Db, rows: Iterable[R], *, replace: bool = False) -> None:
        """replace: take the place of rows with the same key."""
        verb = "REPLACE" if replace else "INSERT"
        db.executemany(f"{verb} INTO {self.name}{self._insert}", map(self._values, rows))

    def insert_numbered(self, db: Db, row: R) -> int:
        """Inserts a row whose first field is an INTEGER PRIMARY KEY still to be given -> the number given."""
        cursor = db.execute(f"INSERT INTO {self.name}{self._insert}", (None, *self._values(row)[1:]))
        number = cursor.lastrowid
        assert number is not None
        fresh = dataclasses.replace(cast(Any, row), **{self._fields[0]: number})
        self.insert(db, [fresh], replace=True)
        return number

    def delete(self, db: Db, where: str, args: Sequence[object]) -> int:
        """-> number of rows deleted."""
        return db.execute(f"DELETE FROM {self.name} WHERE {where}", args).rowcount

    def _values(self, row: R) -> tuple[object, ...]:
        values = tuple(getattr(row, field) for field in self._fields)
        return (*values, seal(self.name, values))


META: Final = Table("meta", MetaRow, "key")
WORKSPACES: Final = Table("workspaces", WorkspaceRow, "id name")
LINEAGES: Final = Table("lineages", LineageRow, "id")
TOKENS: Final = Table("tokens", TokensRow, "lineage chunk")
BLOCKS: Final = Table("blocks", BlockRow, "lineage number")
TEXTS: Final = Table("texts", TextRow, "lineage number")
WORDS: Final = Table("words", WordsRow, "lineage number")
HEAT: Final = Table("heat", HeatRow, "lineage number")
STEPS: Final = Table("steps", StepRow, "lineage number")
PINS: Final = Table("pins", PinRow, "workspace number")
AHEAD: Final = Table("ahead", AheadRow, "workspace number")
SEGMENTS: Final = Table("segments", OwnedSegment, "number")
SLOTS: Final = Table("slots", SlotRow, "segment slot")

ALL_TABLES: Final[tuple[Table[Any], ...]] = (
    META, WORKSPACES, LINEAGES, TOKENS, BLOCKS, TEXTS, WORDS, HEAT, STEPS, PINS, AHEAD, SEGMENTS, SLOTS,
)  # fmt: skip
