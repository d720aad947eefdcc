"""What `verify` can mend: damaged records fall to their tokens, rows are made again from what is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from kvmem_llama.errors import KvmemError, RecordDamaged

from .append import drop_records, set_means
from .content import END, lineage_row, n_blocks_before, spans
from .deleting import finish_erasing
from .disk_records import DiskRecords
from .family import Family
from .family_disk import open_disk
from .index_file import NO_ROW
from .location import Location
from .lock import CLOSE_FIRST, lock_workspace
from .recounting import mend_count, mend_workspaces, recounted
from .root import Root
from .rows import (
    AheadRow,
    BlockRow,
    OwnedSegment,
    SlotRow,
    StepRow,
    WordsRow,
    WorkspaceRow,
    new_block,
)
from .segment import SegmentRow, repair_segment, row_of
from .slot_rows import drop_empty_segments, free_slots
from .tables import (
    AHEAD,
    BLOCKS,
    HEAT,
    SEGMENTS,
    SLOTS,
    STEPS,
    TEXTS,
    WORDS,
    WORKSPACES,
    BadRow,
    Db,
    Table,
)
from .verify import Finding, Report, Verifier

_HINTS = (HEAT, TEXTS, WORDS, AHEAD)  # tables whose rows can be done without


def verify_family(root: Root, family_id: str, *, repair: bool = False) -> Report:
    """Checks one family, and mends what can be mended.

    repair: nobody may have a workspace of it open. What is found is what was found before the repair; call
    again to see what is left. Raises StoreLocked, FormatTooNew, FormatTooOld, StoreDamaged (nothing can be
    looked at), StoreFull or StoreFailed.
    """
    # What cannot be written to, a copy on a medium that is read-only, can still be checked.
    read_only = not repair and not os.access(root.folder / family_id, os.W_OK)
    with root.family(family_id, read_only=read_only) as family, _records_of(family) as records:
        report = Report()
        if not repair:
            return Verifier(root, family, records, report).run()
        with _all_locked(root, family):
            Verifier(root, family, records, report, is_alone=True).run()
            if any(finding.kind == "workspaces" for finding in report.findings):
                root.forget_names()
            for finding in _in_order(report.findings):
                mend = _MENDERS.get(finding.kind)
                if mend is not None and mend(family, finding):
                    report.n_repaired += 1
            finish_erasing(family)
            dropped = family.catalog.write(lambda db: drop_empty_segments(db, None), "repair")
            family.drop_files(segments=dropped)
        return report


@contextmanager
def _records_of(family: Family) -> Iterator[DiskRecords]:
    records = DiskRecords(open_disk(family, None))
    try:
        yield records
    finally:
        records.close()


@contextmanager
def _all_locked(root: Root, family: Family) -> Iterator[None]:
    """Within: nobody has a workspace of the family open. Raises StoreLocked."""
    with ExitStack() as stack:
        with family.catalog.snapshot() as db:
            names = [(str(values[0]), str(values[1])) for values in WORKSPACES.raw(db)]
        for id, name in names:
            locks = family.paths.locks
            stack.enter_context(lock_workspace(root.files, locks, id, name, hint=CLOSE_FIRST))
        yield


def _in_order(findings: list[Finding]) -> list[Finding]:
    """Rows before what is derived from them."""
    order = ["row", "workspaces", "count", "segment", "record", "slot", "index", "tokens", "words", "file"]
    known = [finding for finding in findings if finding.kind in order]
    return sorted(known, key=lambda finding: order.index(finding.kind))


# -- one thing each: -> whether it is mended


def _mend_row(family: Family, finding: Finding) -> bool:
    assert isinstance(finding.row, tuple)
    table, values = finding.row
    mend = _ROW_MENDERS.get(table.name, _drop_row if table in _HINTS else None)
    if mend is None:
        return False
    try:
        return bool(family.catalog.write(lambda db: mend(db, table, values), "repair"))
    except KvmemError:
        return False


def _drop_row(db: Db, table: Table[Any], values: tuple[Any, ...]) -> bool:
    table.delete(db, "row_xxh=?", (values[-1],))
    return True


def _drop_pin(db: Db, table: Table[Any], values: tuple[Any, ...]) -> bool:
    _drop_row(db, table, values)
    row = WORKSPACES.one(db, "id=?", (values[0],))
    if row is not None and row.n_pins:
        WORKSPACES.insert(db, [replace(row, n_pins=row.n_pins - 1)], replace=True)
    return True


def _mend_block(db: Db, table: Table[Any], values: tuple[Any, ...]) -> bool:
    """The block's place follows from its neighbours; its record is not trusted any more."""
    lineage, number = values[0], values[1]
    before = BLOCKS.one(db, "lineage=? AND number=?", (lineage, number - 1))
    after = BLOCKS.one(db, "lineage=? AND number=?", (lineage, number + 1))
    row = lineage_row(db, lineage)
    start = before.end if before is not None else row.own_start if number == row.parent_blocks else None
    end = after.start if after is not None else _end_of(db, lineage)
    if start is None or end is None or end <= start:
        return False
    BLOCKS.delete(db, "lineage=? AND number=?", (lineage, number))
    BLOCKS.insert(db, [new_block(lineage, number, start, end - start, None, NO_ROW)])
    return True


def _end_of(db: Db, lineage: int) -> int | None:
    """The token position where the own blocks of a lineage end."""
    head = WORKSPACES.one(db, "lineage=?", (lineage,))
    if head is not None:
        return head.n_tokens
    ends = db.execute("SELECT max(own_start) FROM lineages WHERE parent=?", (lineage,)).fetchone()
    return None if ends[0] is None else int(ends[0])


def _mend_step(db: Db, table: Table[Any], values: tuple[Any, ...]) -> bool:
    """A step without its answer: where it began and ended follows from its neighbours."""
    lineage, number = values[0], values[1]
    before = STEPS.one(db, "lineage=? AND number=?", (lineage, number - 1))
    after = STEPS.one(db, "lineage=? AND number=?", (lineage, number + 1))
    start = 0 if number == 0 else before.end if before is not None else None
    end = after.start if after is not None else _end_of(db, lineage)
    if start is None or end is None or end <= start:
        return False
    STEPS.delete(db, "lineage=? AND number=?", (lineage, number))
    STEPS.insert(db, [StepRow(lineage, number, "step", start, end, end, "", 0, "", "{}", 0.0)])
    return True


def _mend_slot_row(db: Db, table: Table[Any], values: tuple[Any, ...]) -> bool:
    """Used or free as the blocks say. What counts is that its generation was not used before."""
    segment, slot, generation = values[0], values[1], values[2]
    where, args = "segment=? AND slot=?", (segment, slot)
    row: BlockRow | AheadRow | None = BLOCKS.one(db, where, args) or AHEAD.one(db, where, args)
    named = None if row is None else row.location
    highest = db.execute("SELECT max(generation) FROM slots WHERE segment=?", (segment,)).fetchone()[0]
    known = [g for g in (generation, highest) if isinstance(g, int) and 0 <= g < 1 << 48]
    SLOTS.delete(db, where, args)
    fresh = named.generation if named is not None else max(known, default=0) + 1
    SLOTS.insert(db, [SlotRow(segment, slot, fresh, int(named is not None))])
    return True


def _mend_segment_row(db: Db, table: Table[Any], values: tuple[Any, ...]) -> bool:
    """Nobody's from now on. Its size is tested when its file is."""
    SEGMENTS.delete(db, "number=?", (values[0],))
    SEGMENTS.insert(db, [OwnedSegment(values[0], None, values[2])])
    return True


def _mend_workspace(db: Db, table: Table[Any], values: tuple[Any, ...]) -> bool:
    """If its history is whole, it is as long as its blocks say."""
    row = WorkspaceRow(*values[:-1])
    last = spans(db, row.lineage)[-1]
    found = next(BLOCKS.rows(db, "lineage=?", (last.lineage,), "ORDER BY number DESC LIMIT 1"), None)
    n_tokens = found.end if found is not None else last.tokens[0]
    if last.blocks[1] != END or n_blocks_before(db, row.lineage, n_tokens) == 0 < n_tokens:
        return False
    WORKSPACES.delete(db, "id=?", (row.id,))
    WORKSPACES.insert(db, [recounted(db, replace(row, n_tokens=n_tokens))])
    return True


def _mend_segment(family: Family, finding: Finding) -> bool:
    owned = finding.row
    assert isinstance(owned, OwnedSegment)
    row = SegmentRow(owned.number, owned.n_slots)
    if not family.files.exists(family.paths.segments / row.file):
        return _forget_segment(family, owned)
    if not owned.n_slots:
        return _adopt_file(family, owned)
    repair_segment(family.files, family.paths.segments, row, family.segment_format)
    return True


def _adopt_file(family: Family, owned: OwnedSegment) -> bool:
    """A segment whose row is missing gets one that is nobody's."""
    fd = family.files.open(family.paths.segments / SegmentRow(owned.number, 0).file, os.O_RDONLY)
    try:
        n_slots = row_of(family.files, fd, owned.number).n_slots
    except RecordDamaged:
        return False
    finally:
        family.files.close(fd)
    fresh = replace(owned, n_slots=n_slots)
    family.catalog.write(lambda db: SEGMENTS.insert(db, [fresh], replace=True), "repair")
    return True


def _forget_segment(family: Family, owned: OwnedSegment) -> bool:
    """A file that is gone: its blocks fall to their tokens."""

    def run(db: Db) -> None:
        rows: list[BlockRow | AheadRow] = [*BLOCKS.rows(db, "segment=?", (owned.number,))]
        rows += AHEAD.rows(db, "segment=?", (owned.number,))
        drop_records(db, [at for row in rows if (at := row.location) is not None])
        SLOTS.delete(db, "segment=?", (owned.number,))
        SEGMENTS.delete(db, "number=?", (owned.number,))

    family.catalog.write(run, "repair")
    return True


def _mend_record(family: Family, finding: Finding) -> bool:
    at = getattr(finding.row, "location", None)
    if at is not None:
        family.catalog.write(lambda db: drop_records(db, [at]), "repair")
    return True


def _mend_slot(family: Family, finding: Finding) -> bool:
    found = finding.row

    def run(db: Db) -> bool:
        if isinstance(found, SlotRow):  # in use for nobody
            where, args = "segment=? AND slot=?", (found.segment, found.slot)
            if BLOCKS.one(db, where, args) is None and AHEAD.one(db, where, args) is None:
                free_slots(db, [Location(found.segment, found.slot, found.generation, bytes(16))])
            return True
        if isinstance(found, Location):  # in use, but not marked
            row = SLOTS.one(db, "segment=? AND slot=?", (found.segment, found.slot))
            if row is None or row.generation <= found.generation:
                SLOTS.insert(db, [SlotRow(found.segment, found.slot, found.generation, 1)], replace=True)
                return True
            drop_records(db, [found])  # the slot was used again since
            SLOTS.insert(db, [row], replace=True)
            return True
        if isinstance(found, BlockRow):  # named twice: neither can be trusted
            BLOCKS.insert(db, [found.moved_to(None)], replace=True)
            return True
        return False

    try:
        return family.catalog.write(run, "repair")
    except BadRow:
        return False


def _mend_index(family: Family, finding: Finding) -> bool:
    """The row is lost from now on, and is made again when the workspace is opened: that needs its model."""
    assert isinstance(finding.row, BlockRow)
    lost = finding.row
    if family.catalog.write(lambda db: set_means(db, {lost: NO_ROW}), "repair"):
        with family.catalog.snapshot() as db:
            first = lineage_row(db, lost.lineage).parent_blocks
        family.tokens.restamp(first, lost, NO_ROW)
    return True


def _mend_words(family: Family, finding: Finding) -> bool:
    """They are made again by the next search: that needs the model."""
    words = finding.row
    assert isinstance(words, WordsRow)
    where, args = "lineage=? AND number=?", (words.lineage, words.number)
    family.catalog.write(lambda db: WORDS.delete(db, where, args), "repair")
    return True


def _mend_tokens(family: Family, finding: Finding) -> bool:
    """Where the row is wanted and the record is there, it is made again when the workspace is opened."""
    assert isinstance(finding.row, BlockRow)
    with family.catalog.snapshot() as db:
        first = lineage_row(db, finding.row.lineage).parent_blocks
    family.tokens.erase(finding.row.lineage, first, finding.row.number)
    return True


def _mend_file(family: Family, finding: Finding) -> bool:
    family.sweep(everything=True)
    return True


_MENDERS: dict[str, Callable[[Family, Finding], bool]] = {
    "row": _mend_row,
    "workspaces": mend_workspaces,
    "count": mend_count,
    "segment": _mend_segment,
    "record": _mend_record,
    "slot": _mend_slot,
    "index": _mend_index,
    "tokens": _mend_tokens,
    "words": _mend_words,
    "file": _mend_file,
}
_ROW_MENDERS: dict[str, Callable[[Db, Table[Any], tuple[Any, ...]], bool]] = {
    "blocks": _mend_block,
    "steps": _mend_step,
    "slots": _mend_slot_row,
    "segments": _mend_segment_row,
    "workspaces": _mend_workspace,
    "pins": _drop_pin,
}
