"""The records of one family on disk, with the segments and slots that its catalog knows."""

from __future__ import annotations

from kvmem_llama.errors import StoreFailed

from .disk import DiskStore
from .family import Family
from .readers import Readers
from .rows import OwnedSegment
from .segment import SegmentRow, create_segment
from .slot_rows import check_slots, new_segment, slots_of
from .small_files import remove_if_there
from .tables import SEGMENTS


def open_disk(
    family: Family,
    owner: str | None,
    *,
    segment_records: int = 64,
    budget: int = 0,
    readers: Readers | None = None,
) -> DiskStore:
    """To be closed.

    owner: the workspace whose segments may be written to, which must be locked; None: nothing is written.
    segment_records: of the segments that are made. budget: bytes of disk for its records; 0: no limit.
    """
    own: list[OwnedSegment] = []
    slots: list[tuple[int, int, int, bool]] = []
    if owner is not None:
        with family.catalog.snapshot() as db:
            own = list(SEGMENTS.rows(db, "owner=?", (owner,), "ORDER BY number"))
            slots = slots_of(db, own)
            check_slots(db, owner)

    def make(number: int) -> int:
        # A file with this number is left of a transaction that did not come to its end.
        remove_if_there(family.files, family.paths.segments / SegmentRow(number, 0).file)
        create_segment(family.files, family.paths.segments, number, segment_records, family.segment_format)
        return segment_records

    def grow() -> SegmentRow:
        if owner is None:
            raise StoreFailed(family.paths.segments, "it was opened read-only")
        row = family.catalog.write(lambda db: new_segment(db, owner, make), "segment")
        return SegmentRow(row.number, row.n_slots)

    return DiskStore(
        family.paths.segments,
        family.segment_format,
        segments=[SegmentRow(row.number, row.n_slots) for row in own],
        slots=slots,
        grow=grow,
        files=family.files,
        readers=readers,
        budget=budget,
        read_only=owner is None,
    )
