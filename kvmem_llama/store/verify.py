"""Checks everything a family keeps: every row, every record, every index row, every file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from kvmem_llama.errors import CatalogDamaged, RecordDamaged, StoreFailed
from kvmem_llama.native.layout import I32

from .content import (
    check_blocks,
    check_steps,
    check_workspaces,
    iter_blocks,
    iter_steps,
    last_step,
    lineage_row,
    read_pins,
    read_tokens,
    spans,
)
from .family import Family
from .head import Head
from .index_file import NO_ROW
from .location import Location, Origin, RecordFiles
from .lock import is_locked
from .root import Root
from .rows import AheadRow, BlockRow, OwnedSegment, SlotRow, WorkspaceRow
from .segment import SegmentRow, check_segment
from .tables import (
    AHEAD,
    ALL_TABLES,
    BLOCKS,
    SEGMENTS,
    SLOTS,
    SQLITE_ERRORS,
    WORDS,
    WORKSPACES,
    BadRow,
    Db,
    MissingRow,
    Table,
)
from .words import source_of, words_of

_MADE_AGAIN: Final = "opening the workspace makes it again"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    # family | catalog | row | workspaces | count | history | slot | segment | record | index | tokens | words
    # | file
    kind: str
    where: str
    what: str
    row: object = field(default=None, compare=False)  # what the repair needs


@dataclass(slots=True)
class Report:
    """What was looked at, and what was found."""

    n_workspaces: int = 0
    n_rows: int = 0
    n_records: int = 0
    n_index_rows: int = 0
    n_segments: int = 0
    findings: list[Finding] = field(default_factory=list)
    n_repaired: int = 0

    @property
    def is_sound(self) -> bool:
        return not self.findings

    def add(self, kind: str, where: str, what: object, row: object = None) -> None:
        self.findings.append(Finding(kind, where, str(what), row))


class Verifier:
    """Looks at one family. What others write meanwhile is no finding."""

    def __init__(
        self, root: Root, family: Family, records: RecordFiles, report: Report, *, is_alone: bool = False
    ) -> None:
        """is_alone: the locks of all workspaces are the caller's own."""
        self._is_alone: Final = is_alone
        self._root: Final = root
        self._family: Final = family
        self._records: Final = records
        self.report: Final = report
        self._words: Final = set[tuple[int, int]]()  # (lineage, number) of blocks whose words were looked at

    def run(self) -> Report:
        """Raises FormatTooNew or StoreFailed only where nothing can be looked at."""
        try:
            with self._family.catalog.snapshot() as db:
                self._check_pages(db)
                self._check_rows(db)
                self._check_histories(db)
                self._check_stray_words(db)
                self._check_slots(db)
                named = list(self._named(db))
                segments = list(self._sound(db, SEGMENTS))
                self._check_segment_rows(db)
        except CatalogDamaged as error:
            self.report.add("catalog", self._family.catalog.path.name, error.why)
            return self.report
        self._check_segments(segments)
        self._check_records(named)
        self._check_files()
        return self.report

    # -- the catalog

    def _check_pages(self, db: Db) -> None:
        for (line,) in db.execute("PRAGMA integrity_check").fetchall():
            if line != "ok":
                self.report.add("catalog", self._family.catalog.path.name, line)

    def _check_rows(self, db: Db) -> None:
        for table in ALL_TABLES:
            try:
                for values in table.raw(db):
                    self.report.n_rows += 1
                    try:
                        table.checked(values)
                    except BadRow as error:
                        self.report.add("row", table.describe(values), error, (table, values))
            except SQLITE_ERRORS as error:
                self.report.add("catalog", table.name, error)

    def _check_histories(self, db: Db) -> None:
        try:
            check_workspaces(db)
        except BadRow as error:
            what = f"{error}; a repair names what is left of it 'recovered ...'"
            self.report.add("workspaces", self._family.catalog.path.name, what)
        rows = list(self._sound(db, WORKSPACES))
        acknowledged = {
            row.id: Head(self._family.files, self._family.paths.locks, row.id).read() for row in rows
        }
        unwritten = self._unwritten(db, rows, acknowledged)
        for row in rows:
            self.report.n_workspaces += 1
            try:
                ids = read_tokens(db, row.lineage, 0, row.n_tokens)
                blocks = list(iter_blocks(db, row.lineage))
                check_blocks(blocks, row)
                self._check_index(db, row, blocks, unwritten)
                self._check_words(db, row, ids)
                for check in (self._check_steps, self._check_pins):
                    try:
                        check(db, row)
                    except MissingRow as error:
                        what = f"{error}; a repair goes on without what is missing"
                        self.report.add("count", f"workspace {row.name!r:.80}", what, row)
            except BadRow as error:
                self.report.add("history", f"workspace {row.name!r:.80}", error, row)
            with self._family.catalog.snapshot() as newer:
                now = WORKSPACES.one(newer, "id=?", (row.id,))
            if now is not None and now.commits < acknowledged[row.id]:
                what = f"{acknowledged[row.id]} commits were acknowledged, the catalog has {now.commits}"
                self.report.add("history", f"workspace {row.name!r:.80}", what, row)

    def _check_steps(self, db: Db, row: WorkspaceRow) -> None:
        steps = list(iter_steps(db, row.lineage))
        check_steps(steps, row)
        if steps and steps[-1].end != row.n_tokens:
            raise BadRow(f"the steps end at token {steps[-1].end} of {row.n_tokens}")

    def _check_pins(self, db: Db, row: WorkspaceRow) -> None:
        read_pins(db, row)

    def _unwritten(self, db: Db, rows: list[WorkspaceRow], acknowledged: dict[str, int]) -> dict[int, int]:
        """By lineage: the first block whose index row may not be written yet. An edit of a history writes
        rows between its transaction and its acknowledgement; whoever was to do so may have been killed."""
        found: dict[int, int] = {}
        for row in rows:
            if row.commits > acknowledged[row.id]:
                with contextlib.suppress(BadRow):  # it is found where the history is checked
                    step = last_step(db, row.lineage)
                    if step is not None:
                        found[row.lineage] = step.start // self._family.binding.block_size
        return found

    def _check_index(
        self, db: Db, row: WorkspaceRow, blocks: list[BlockRow], unwritten: dict[int, int]
    ) -> None:
        parts = spans(db, row.lineage)
        for part in parts:
            lineage_row(db, part.lineage)
        missing = self._family.index.load(parts, blocks, None)
        self.report.n_index_rows += len(blocks)
        for number in missing:
            block = blocks[number]
            # The row of a partial block is written over before, or after, the transaction of its writer, who
            # may have been killed in between. It is made from the record when the workspace is opened.
            is_partial = block.count < self._family.binding.block_size
            is_expected = is_partial and (block.location is not None or self._is_in_use(row))
            # So is that of a block that was computed again, and those of an edit.
            is_expected |= block.origin == Origin.RECOMPUTED and block.location is not None
            is_expected |= number >= unwritten.get(block.lineage, number + 1)
            if self._is_current(block) and block.mean_xxh != NO_ROW and not is_expected:
                where = f"workspace {row.name!r:.80}, block {number}"
                what = f"its index row is not as it was written; {_MADE_AGAIN}"
                self.report.add("index", where, what, block)
        for number in self._family.tokens.check(parts, blocks):
            is_partial = blocks[number].count < self._family.binding.block_size
            if self._is_current(blocks[number]) and not (is_partial and self._is_in_use(row)):
                where = f"workspace {row.name!r:.80}, block {number}"
                what = f"its row of the token index is damaged; {_MADE_AGAIN}"
                self.report.add("tokens", where, what, blocks[number])

    def _check_words(self, db: Db, row: WorkspaceRow, ids: I32) -> None:
        """The words of a block were made from its tokens."""
        block = self._family.binding.block_size
        for words in words_of(db, row.lineage):
            self._words.add((words.lineage, words.number))
            is_whole = (words.number + 1) * block <= len(ids)
            if not is_whole or words.source != source_of(ids, words.number, block):
                where = f"workspace {row.name!r:.80}, block {words.number}"
                self.report.add("words", where, "its words are not those of its tokens", words)

    def _check_stray_words(self, db: Db) -> None:
        """Where all histories are known, there are no words of others."""
        if not self.report.is_sound:
            return
        for words in WORDS.rows(db):
            if (words.lineage, words.number) not in self._words:
                where = f"lineage {words.lineage}, block {words.number}"
                self.report.add("words", where, "words without a block", words)

    def _check_slots(self, db: Db) -> None:
        """Every used slot is named by one block, and the other way round."""
        named: dict[tuple[int, int], Location] = {}
        for row in [*self._sound(db, BLOCKS), *self._sound(db, AHEAD)]:
            at = row.location
            if at is None:
                continue
            if (at.segment, at.slot) in named:
                self.report.add("slot", str(at), "two blocks name it", row)
            named[at.segment, at.slot] = at
        used: dict[tuple[int, int], SlotRow] = {
            (slot.segment, slot.slot): slot for slot in self._sound(db, SLOTS) if slot.used == 1
        }
        for key, slot in used.items():
            if key not in named:
                where = f"segment {slot.segment}, slot {slot.slot}"
                self.report.add("slot", where, "it is in use, but no block names it", slot)
        for key, at in named.items():
            if key not in used or used[key].generation != at.generation:
                self.report.add("slot", str(at), "a block names it, but it is not in use", at)

    # -- files

    def _check_segment_rows(self, db: Db) -> None:
        """A segment with slots in use has a row."""
        try:
            known = {values[0] for values in SEGMENTS.raw(db)}
        except SQLITE_ERRORS:  # found before
            return
        for number in sorted({slot.segment for slot in self._sound(db, SLOTS) if slot.used} - known):
            lost = OwnedSegment(number, None, 0)
            self.report.add("segment", SegmentRow(number, 0).file, "its row is missing", lost)

    def _check_segments(self, segments: list[OwnedSegment]) -> None:
        files, folder = self._family.files, self._family.paths.segments
        for owned in segments:
            self.report.n_segments += 1
            row = SegmentRow(owned.number, owned.n_slots)
            try:
                fd = files.open(folder / row.file, os.O_RDONLY)
                try:
                    check_segment(files, fd, row, self._family.segment_format)
                finally:
                    files.close(fd)
            except (RecordDamaged, StoreFailed) as error:
                with self._family.catalog.snapshot() as db:
                    if SEGMENTS.one(db, "number=?", (owned.number,)) is not None:
                        self.report.add("segment", row.file, error.why, owned)

    def _check_records(self, named: list[BlockRow | AheadRow]) -> None:
        for row in named:
            at = row.location
            assert at is not None
            self.report.n_records += 1
            try:
                self._records.read(at)
            except (RecordDamaged, StoreFailed) as error:
                if self._is_current(row):
                    self.report.add("record", f"block {row.number} ({at})", error.why, row)

    def _check_files(self) -> None:
        found = self._family.garbage()
        if found and not self._family.catalog.read_only:
            with self._root.quiet():  # else it may be a file that is just being deleted
                found = self._family.garbage()
        for path in found:
            self.report.add("file", f"{path.parent.name}/{path.name}", "no row stands for it", path)

    # -- private

    def _named(self, db: Db) -> Iterator[BlockRow | AheadRow]:
        for row in self._sound(db, BLOCKS):
            if row.location is not None:
                yield row
        yield from self._sound(db, AHEAD)

    def _sound(self, db: Db, table: Table[Any]) -> Iterator[Any]:
        """Rows that are as they were written; the others were found before."""
        try:
            for values in table.raw(db):
                try:
                    yield table.checked(values)
                except BadRow:
                    continue
        except SQLITE_ERRORS:
            return

    def _is_in_use(self, row: WorkspaceRow) -> bool:
        """Somebody has the workspace open for writing."""
        lock = self._family.paths.locks / f"{row.id}.lock"
        return not self._is_alone and is_locked(self._family.files, lock)

    def _is_current(self, row: BlockRow | AheadRow) -> bool:
        """The row is still the same: nobody has moved or freed its record meanwhile."""
        with self._family.catalog.snapshot() as db:
            if isinstance(row, BlockRow):
                return BLOCKS.one(db, "lineage=? AND number=?", (row.lineage, row.number)) == row
            return AHEAD.one(db, "workspace=? AND number=?", (row.workspace, row.number)) == row
