"""Records to and from the files of segments: one transfer for slots that lie next to each other."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from kvmem_llama.errors import RecordDamaged, StoreError, StoreFailed

from .descriptors import Descriptors
from .files import Buffer, Files, errno_of
from .location import Location, checksum_of
from .records import Record
from .segment import ALIGNMENT, SegmentFormat, SegmentRow, check_segment, row_of, segment_path
from .slots import Taken

Errors: TypeAlias = list[StoreError | None]
"""One for each record: RecordDamaged where it is lost, StoreFailed where it may be read another time."""


class SegmentFiles:
    """The segment files of one folder. Knows no free slots. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        format: SegmentFormat,
        files: Files,
        rows: Iterable[SegmentRow],
        *,
        read_only: bool,
    ) -> None:
        """rows: of the segments that are known; those of other workspaces are found when they are read."""
        self.folder: Final = folder
        self.failures: Final[dict[int, StoreError]] = {}
        """Segments that could not be synced: what was written since their last sync may be lost."""
        self._format: Final = format
        self._files: Final = files
        self._read_only: Final = read_only
        self._rows: Final = {row.number: row for row in rows}
        self._unsynced: Final[set[int]] = set()
        self._syncing: Final = threading.Lock()
        self._descriptors: Final = Descriptors(files, self._check)
        self._gap: Final = np.zeros(ALIGNMENT, np.uint8)  # is written between tensors
        self._waste: Final = np.zeros(ALIGNMENT, np.uint8)  # what is read there goes here

    def add(self, row: SegmentRow) -> None:
        """A segment that was just made."""
        self._rows[row.number] = row

    def write(self, taken: Sequence[Taken], records: Sequence[Record]) -> list[Location]:
        """Writes records to neighbouring slots of one segment. Raises StoreFull, StoreFailed, RecordDamaged
        (the segment is not what it was)."""
        if self._read_only:
            raise StoreFailed(self.folder, "it was opened read-only")
        first = taken[0]
        self._files.at("data_write.before")
        with self._descriptors.use(first.segment, self._path(first.segment), write=True) as fd:
            self._unsynced.add(first.segment)
            vector = [part for record in records for part in self._vector(record, self._gap)]
            self._files.write_from(fd, vector, self._format.offset(self._rows[first.segment], first.slot))
        self._files.at("data_write.after")
        return [
            Location(t.segment, t.slot, t.generation, checksum_of(record, t.generation))
            for t, record in zip(taken, records, strict=True)
        ]

    def sync(self) -> None:
        """Makes durable what was written before, except in segments that are in `failures` afterwards."""
        with self._syncing:  # who finds nothing to sync must not return while another thread still syncs it
            for number in tuple(self._unsynced):
                self._unsynced.discard(number)  # before: what is written from now on may come too late
                try:
                    self._files.at("sync.before")
                    with self._descriptors.use(number, self._path(number), write=True) as fd:
                        self._files.fsync(fd)
                except StoreError as error:
                    self.failures[number] = error
                except BaseException:
                    self._unsynced.add(number)
                    raise
                self._files.at("sync.after")

    def read(self, locations: Sequence[Location], buffers: Sequence[Record]) -> Errors:
        """Reads and checks records of neighbouring slots of one segment into `buffers`."""
        first = locations[0]
        vector = [part for buffer in buffers for part in self._vector(buffer, self._waste)]
        try:
            with self._descriptors.use(first.segment, self._path(first.segment), write=False) as fd:
                offset = self._format.offset(self._rows[first.segment], first.slot)
                n_read = self._files.read_into(fd, vector, offset)
        except StoreError as error:
            if len(locations) > 1:  # one bad record must not take its neighbours along
                return [self.read([loc], [buf])[0] for loc, buf in zip(locations, buffers, strict=True)]
            return [_as_damage(first, error)]
        errors: Errors = []
        for i, (location, buffer) in enumerate(zip(locations, buffers, strict=True)):
            end = i * self._format.slot_nbytes + self._format.v_shift + self._format.v_nbytes
            if n_read < end:
                errors.append(RecordDamaged(str(location), "the file ends before it"))
            elif checksum_of(buffer, location.generation) != location.checksum:
                errors.append(RecordDamaged(str(location), "its checksum differs"))
            else:
                errors.append(None)
        return errors

    def erase(self, number: int, slot: int) -> None:
        """Makes a slot read as zeros; see `sync`. Raises StoreFull, StoreFailed."""
        with self._descriptors.use(number, self._path(number), write=True) as fd:
            self._unsynced.add(number)
            offset = self._format.offset(self._rows[number], slot)
            self._files.erase(fd, offset, self._format.slot_nbytes)

    def unlink(self, number: int) -> None:
        """Deletes a segment; it may be gone already. Raises StoreFailed."""
        self._descriptors.forget(number)
        self._rows.pop(number, None)
        self._unsynced.discard(number)
        try:
            self._files.unlink(self._path(number))
        except StoreFailed as error:
            if errno_of(error) != errno.ENOENT:
                raise
        self._files.sync_dir(self.folder)

    def close(self) -> None:
        """Closes the files."""
        self._descriptors.close()

    @property
    def n_open(self) -> int:
        """Descriptors open now."""
        return len(self._descriptors)

    def _path(self, number: int) -> Path:
        return segment_path(self.folder, number)

    def _check(self, number: int, fd: int) -> None:
        try:
            row = self._rows.get(number) or row_of(self._files, fd, number)
            check_segment(self._files, fd, row, self._format)
        except StoreFailed as error:
            if errno_of(error) == errno.EIO:
                raise RecordDamaged(f"segment {number}", "its header cannot be read") from error
            raise
        self._rows[number] = row

    def _vector(self, record: Record, gap: Buffer) -> list[Buffer]:
        """A record as its tensors and the gaps after them."""
        k, v = record[: self._format.k_nbytes], record[self._format.k_nbytes :]
        return [k, gap[: -k.nbytes % ALIGNMENT], v, gap[: -v.nbytes % ALIGNMENT]]


def _as_damage(location: Location, error: StoreError) -> StoreError:
    """A missing file and a read error of the drive lose a record; other errors may pass."""
    if isinstance(error, StoreFailed) and errno_of(error) in (errno.ENOENT, errno.EIO):
        damaged = RecordDamaged(str(location), error.why)
        damaged.__cause__ = error
        return damaged
    return error
