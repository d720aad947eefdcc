"""Deleting a durable workspace: its KV, its index rows, its tokens and its texts."""

from __future__ import annotations

import contextlib

from kvmem_llama.errors import StoreError, WorkspaceNotFound

from .disk import DiskStore
from .disk_records import DiskRecords
from .family import Family
from .head import Head
from .lineage import delete
from .location import Location
from .lock import CLOSE_FIRST, lock_workspace
from .names import Place
from .root import Root
from .segment import SegmentRow
from .slot_rows import condemn_slots, condemned_slots, drop_empty_segments, free_slots, slots_of
from .tables import SEGMENTS, WORKSPACES, Db


def delete_workspace(root: Root, place: Place) -> None:
    """Deletes a workspace that nobody has open. What forks of it share with it stays theirs.

    When this returns, no file of the store holds its tokens, texts, index rows or KV any more (what the file
    system or the drive keeps of deleted data is beyond it). Raises WorkspaceNotFound, StoreLocked,
    CatalogDamaged or StoreFailed; then the workspace is there, or it is gone and `compact` finishes the rest.
    """
    with root.renaming(None) as names:
        family = root.open_family(place.family)
        try:
            rows = {row.id: row for row in family.workspaces()}
            row = rows.get(place.workspace)
            if row is None:
                raise WorkspaceNotFound(place.workspace)
            lock = lock_workspace(root.files, family.paths.locks, row.id, row.name, hint=CLOSE_FIRST)
            try:
                if len(rows) > 1:
                    _delete_one(family, place.workspace)
                else:
                    root.remove_family(place.family)
                names.pop(row.name, None)
            finally:
                lock.remove()
        finally:
            root.close_family(family)


def finish_erasing(family: Family) -> int:
    """Overwrites the records that were deleted and frees their slots -> how many there were.

    Raises StoreFull, StoreFailed or CatalogDamaged.
    """
    with family.catalog.snapshot() as db:
        condemned = condemned_slots(db)
        if not condemned:
            return 0
        segments = list(SEGMENTS.rows(db))
        slots = slots_of(db, segments)
    records = DiskRecords(
        DiskStore(
            family.paths.segments,
            family.segment_format,
            segments=[SegmentRow(row.number, row.n_slots) for row in segments],
            slots=slots,
            files=family.files,
        )
    )
    try:
        for at in condemned:
            records.erase(at)
        records.sync()  # once they are free nobody would erase them again
    finally:
        records.close()
    family.catalog.write(lambda db: free_slots(db, _still_condemned(db, condemned)), "erase")
    return len(condemned)


# -- private


def _delete_one(family: Family, workspace: str) -> None:
    """Deletes a workspace that shares its family with others."""

    def run(db: Db) -> tuple[list[int], list[int]]:
        row = WORKSPACES.one(db, "id=?", (workspace,))
        if row is None:
            raise WorkspaceNotFound(workspace)
        freed = delete(db, row)
        dropped = drop_empty_segments(db, None)
        condemn_slots(db, [at for at in freed.records if at.segment not in dropped])
        return dropped, freed.lineages

    dropped, gone = family.catalog.write(run, "delete")
    # From here on it is gone. What fails now is done by the next `compact`.
    with contextlib.suppress(StoreError):
        family.files.at("delete.files")
        family.drop_files(segments=dropped, lineages=gone)
        Head(family.files, family.paths.locks, workspace).remove()
        finish_erasing(family)
        family.catalog.checkpoint()


def _still_condemned(db: Db, condemned: list[Location]) -> list[Location]:
    now = {(at.segment, at.slot, at.generation) for at in condemned_slots(db)}
    return [at for at in condemned if (at.segment, at.slot, at.generation) in now]
