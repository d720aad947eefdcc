"""Which of the histories that no client has named are deleted, so that they do not fill the disk.

A family, a history and its forks, share their KV on disk, so it goes as a whole.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..store.root import Listed, Root
from .stored_histories import is_auto


@dataclass(frozen=True, slots=True)
class AutoFamily:
    """A family in which no client has named a workspace, as it was when it was looked at."""

    id: str
    names: frozenset[str]  # in the store
    used: float  # when, last; seconds since 1970

    def is_unchanged(self, root: Root) -> bool:
        """Nobody has used it since, or made a fork. Raises StoreError."""
        return _auto_families(root.list(self.id)).get(self.id) == self


def families_to_delete(root: Root, budget: int) -> list[AutoFamily]:
    """Those used longest ago, beyond `budget` bytes on disk.

    A family in which a client has named a workspace is neither deleted nor counted. The one used last stays,
    whatever its size. Raises StoreError if the folder cannot be read.
    """
    newest = sorted(_auto_families(root.list()).values(), key=lambda family: family.used, reverse=True)
    found, nbytes = [], 0
    for number, family in enumerate(newest):
        nbytes += _on_disk(root.folder / family.id)
        if nbytes > budget and number > 0:
            found.append(family)
    return found


def _auto_families(listed: Iterable[Listed]) -> dict[str, AutoFamily]:
    families: dict[str, list[Listed]] = defaultdict(list)
    for item in listed:
        families[item.place.family].append(item)
    found = {}
    for id, items in families.items():
        rows = [item.row for item in items if item.row is not None and is_auto(item.row.name)]
        if len(rows) == len(items):  # all of them can be read
            names = frozenset(row.name for row in rows)
            found[id] = AutoFamily(id, names, max(row.used for row in rows))
    return found


def _on_disk(folder: Path) -> int:
    """Bytes; what goes away meanwhile counts nothing."""
    nbytes = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                facts = os.stat(os.path.join(path, name))
            except OSError:
                continue
            blocks = getattr(facts, "st_blocks", None)  # not on Windows
            nbytes += facts.st_size if blocks is None else blocks * 512
    return nbytes
