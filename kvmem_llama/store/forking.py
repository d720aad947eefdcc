"""Forking a durable workspace: a few rows and a copy of the partial last block, whatever its length."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvmem_llama.errors import RecordDamaged, StoreError

from . import lineage
from .append import workspace_row
from .content import find_block, lineage_row, n_blocks_before
from .holding import Holding
from .index_file import mean_xxh
from .lineage import Tail
from .location import RecordFiles
from .lock import lock_workspace
from .names import Place, checked_name, new_id
from .rows import BlockRow, WorkspaceRow
from .tables import Db


def fork_workspace(holding: Holding, records: RecordFiles, name: str) -> Holding:
    """A workspace of its own with the committed history of another, which must be open for writing -> the new
    one, open for writing.

    The partial last block is copied into a segment of the old one, but is the new one's own. If its record is
    lost, the copy is in the tokens tier. Raises InvalidName, WorkspaceExists, StoreFull, StoreFailed or
    CatalogDamaged; then there is no new workspace.
    """
    name, root, family = checked_name(name), holding.root, holding.family
    place = Place(family.id, new_id())
    tail = _copy_tail(holding, records)
    try:
        with root.renaming(name) as names:
            lock = lock_workspace(root.files, family.paths.locks, place.workspace, name)
            try:

                def run(db: Db) -> WorkspaceRow:
                    row, now = workspace_row(db, holding.place.workspace), time.time()
                    child = replace(row, id=place.workspace, name=name, commits=1, created=now, used=now)
                    return lineage.fork(db, row, child, tail)

                child = family.catalog.write(run, "fork")
            except BaseException:
                lock.remove()
                raise
            names[name] = place
    except BaseException:
        records.settle([], [] if tail is None or tail.at is None else [tail.at])
        raise
    records.settle([] if tail is None or tail.at is None else [tail.at], [])
    if tail is not None:
        with suppress(StoreError):  # it is done; a row that is missing is made again
            _copy_row(holding, child, tail)
    forked = Holding.open(root, place, lock=lock)
    forked.acknowledge(child)
    return forked


def _copy_row(holding: Holding, child: WorkspaceRow, tail: Tail) -> None:
    """The index row of the partial block."""
    with holding.family.catalog.snapshot() as db:
        first = lineage_row(db, child.lineage).parent_blocks
        row = workspace_row(db, holding.place.workspace)
        old = find_block(db, row.lineage, first)
        if old is None:
            return
        old_first = lineage_row(db, old.lineage).parent_blocks
    mean = holding.family.index.row(old.lineage, old_first, first)
    if mean is not None and mean_xxh(mean) == tail.mean_xxh:  # a step cut short may have written over it
        holding.family.index.put(child.lineage, first, first, mean[np.newaxis])


def _copy_tail(holding: Holding, records: RecordFiles) -> Tail | None:
    """A copy of the partial last block; None if the last one is complete. Its Mean-K is the same."""
    with holding.family.catalog.snapshot() as db:
        row = workspace_row(db, holding.place.workspace)
        last: BlockRow | None = None
        if row.n_tokens:
            last = find_block(db, row.lineage, n_blocks_before(db, row.lineage, row.n_tokens) - 1)
    if last is None or last.count == holding.family.binding.block_size:
        return None
    at = None
    if last.location is not None:
        try:
            at = records.write(records.read(last.location))
            records.sync()
        except RecordDamaged:
            at = None
    return Tail(last.start, last.count, at, last.mean_xxh)
