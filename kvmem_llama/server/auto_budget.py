"""Which of the histories that no client has named are deleted, so that they do not fill the disk.

A family, a history and its forks, share their KV on disk, so it goes as a whole.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from ..store.root import Listed, Root
from .stored_histories import is_auto


def families_to_delete(root: Root, budget: int) -> list[frozenset[str]]:
    """Names in the store, of each family that goes: those used longest ago, beyond `budget` bytes on disk.

    A family in which a client has named a workspace is neither deleted nor counted. The one used last stays,
    whatever its size. Raises StoreError if the folder cannot be read.
    """
    families: dict[str, list[Listed]] = defaultdict(list)
    for item in root.list():
        families[item.place.family].append(item)
    used = {
        id: max(item.row.used for item in items if item.row is not None)
        for id, items in families.items()
        if all(item.row is not None and is_auto(item.row.name) for item in items)
    }
    found, nbytes = [], 0
    for number, id in enumerate(sorted(used, key=lambda id: used[id], reverse=True)):
        nbytes += _on_disk(root.folder / id)
        if nbytes > budget and number > 0:
            found.append(frozenset(item.row.name for item in families[id] if item.row is not None))
    return found


def _on_disk(folder: Path) -> int:
    """Bytes; what goes away meanwhile counts nothing."""
    nbytes = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                nbytes += os.stat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue
    return nbytes
