"""The histories of requests that an earlier server has left on disk."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..errors import StoreError
from ..native.layout import I32
from ..store.ahead import rows_ahead
from ..store.content import iter_steps, read_tokens
from ..store.names import Place
from ..store.root import Root
from .auth import split_name, stored_name

_AUTO: Final = re.compile(r"auto-\d{8}-\d{6}-[0-9a-f]{6}")  # what `new_name` gives; others are clients'
_N_NEWEST: Final = 256  # older ones are not looked at


def new_name(owner: str) -> str:
    """A name in the store for a history that no client has named."""
    return stored_name(owner, f"auto-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")


def is_auto(name: str) -> bool:
    """Whether a name in the store is of a history that no client has named."""
    return _AUTO.fullmatch(split_name(name)[1]) is not None


@dataclass(frozen=True, slots=True)
class Stored:
    """A history on disk that a request without a name may belong to."""

    name: str  # in the store
    owner: str
    place: Place


def find_stored(root: Root) -> list[Stored]:
    """The newest ones, oldest first. What cannot be read is left out."""
    rows = []
    with contextlib.suppress(StoreError):
        rows = [(item.row, item.place) for item in root.list() if item.row is not None]
    rows.sort(key=lambda item: item[0].used)
    found = []
    for row, place in rows[-_N_NEWEST:]:
        if is_auto(row.name):
            found.append(Stored(row.name, split_name(row.name)[0], place))
    return found


@dataclass(frozen=True, slots=True)
class Read:
    """What is stored of a history."""

    tokens: I32  # [n] ids
    prompt_end: int  # tokens before its last answer
    is_unfinished: bool = False  # a read was interrupted; no step over these tokens has ended


def read_stored(root: Root, place: Place) -> Read:
    """Nothing is opened for it. Raises StoreError."""
    with root.family(place.family, read_only=True) as family, family.catalog.snapshot() as db:
        row = next((row for row in family.present() if row.id == place.workspace), None)
        if row is None:
            return Read(np.empty(0, np.int32), 0)
        if not row.n_tokens:
            ids = b"".join(ahead.ids for ahead in rows_ahead(db, row.id))
            return Read(np.frombuffer(ids, "<i4").astype(np.int32), len(ids) // 4, is_unfinished=bool(ids))
        tokens = read_tokens(db, row.lineage, 0, row.n_tokens)
        end = row.n_tokens
        for step in iter_steps(db, row.lineage):
            end = int(json.loads(step.options or "{}").get("answer_start", step.end))
        return Read(tokens, min(end, row.n_tokens))
