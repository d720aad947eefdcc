"""The disk tier: records in slots of segments, checked whenever they are read."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

from kvmem_llama.errors import RecordDamaged, StoreError, StoreFailed, StoreFull

from . import files as files_module
from .files import Files, errno_of
from .location import Location
from .readers import Readers
from .records import Record
from .segment import SegmentFormat, SegmentRow, create_segment
from .segment_files import Errors, SegmentFiles
from .slots import Slots, Taken

RUN_NBYTES: Final = 8 << 20  # of one transfer: long enough for any drive, short enough to share among threads
RUN_RECORDS: Final = 128  # of one transfer: four buffers each, so that they stay below IOV_MAX
SEGMENT_RECORDS: Final = 64


@dataclass(slots=True)
class Written:
    """What became of records: the first ones have locations; `error` says why the rest have none."""

    locations: list[Location] = field(default_factory=list)
    error: StoreError | None = None
    lost: int | None = None  # the segment they were for, if it is missing or damaged; it is sealed now


class DiskStore:
    """Records in the segments of one family. Data only: what a record is for stands in the catalog.

    Writes go to segments of its own, reads to all of the family. Safe to call from several threads.
    """

    def __init__(
        self,
        folder: Path,
        format: SegmentFormat,
        *,
        segments: Iterable[SegmentRow] = (),
        slots: Iterable[tuple[int, int, int, bool]] = (),
        grow: Callable[[], SegmentRow] | None = None,
        files: Files | None = None,
        readers: Readers | None = None,
        budget: int = 0,
        coalesce: bool = True,
        read_only: bool = False,
    ) -> None:
        """Opens and reads nothing.

        folder: that of the segments; there already.
        segments, slots: own segments, and (segment, slot, generation, used) of their slots ever used.
        grow: makes an empty segment for this store (see create_segment); None: numbered by the folder.
        readers: None: threads of its own.
        budget: bytes of disk for the records in own segments; 0: no limit.
        coalesce: read and write neighbours on disk in one transfer.
        """
        self.format: Final = format
        self.files: Final = files or files_module.current()
        self.budget: Final = budget
        self._slots: Final = Slots()
        self._grow: Final = grow or self._grow_by_folder
        self._growing: Final = threading.Lock()
        self._readers: Final = readers or Readers()
        self._owns_readers: Final = readers is None
        self._run_records: Final = (
            min(max(RUN_NBYTES // format.slot_nbytes, 1), RUN_RECORDS) if coalesce else 1
        )
        rows = list(segments)
        self._segments: Final = SegmentFiles(folder, format, self.files, rows, read_only=read_only)
        by_segment: dict[int, list[tuple[int, int, bool]]] = {}
        for number, slot, generation, used in slots:
            by_segment.setdefault(number, []).append((slot, generation, used))
        for row in rows:
            self._slots.add(row, by_segment.get(row.number, ()))

    @property
    def folder(self) -> Path:
        """That of the segments."""
        return self._segments.folder

    # -- space

    @property
    def n_bytes(self) -> int:
        """Bytes of the slots in use, in own segments."""
        return self._slots.n_used * self.format.slot_nbytes

    @property
    def n_files_open(self) -> int:
        return self._segments.n_open

    def n_over(self, n_more: int) -> int:
        """How many slots must become free before `n_more` records fit the budget."""
        if not self.budget:
            return 0
        return max(self._slots.n_used + n_more - self.budget // self.format.slot_nbytes, 0)

    def owns(self, location: Location) -> bool:
        """The record lies in a segment of this store."""
        return location.segment in self._slots

    def keep(self, location: Location) -> None:
        """The catalog names this record from now on."""
        self._slots.keep(location.segment, location.slot, location.generation)

    def give_back(self, location: Location) -> bool:
        """The record is gone -> whether its slot is free now: it is not if the catalog names it."""
        return self._slots.give_back(location.segment, location.slot, location.generation)

    def release(self, location: Location) -> None:
        """The catalog names this record no more, or never did."""
        self._slots.release(location.segment, location.slot, location.generation)

    def erase(self, location: Location) -> None:
        """Overwrites a record with zeros, before its slot is released. Raises StoreFull, StoreFailed."""
        if self._slots.holds(location.segment, location.slot, location.generation):
            self._segments.erase(location.segment, location.slot)

    def segments(self) -> dict[SegmentRow, int]:
        """Own segments, and how many of their slots are in use."""
        return {row: self._slots.n_used_in(row.number) for row in self._slots.rows()}

    def seal(self, number: int) -> None:
        """No more records go to this segment."""
        self._slots.close(number)

    def drop_segment(self, number: int) -> None:
        """Deletes the file of a segment; it may be gone already. Raises StoreFailed."""
        self._slots.drop(number)
        self._segments.unlink(number)

    # -- writing

    def write(self, records: Sequence[Record], avoid: Iterable[int] = ()) -> Written:
        """Writes records to free slots, none of them in the segments `avoid`; see `sync`."""
        done = Written()
        avoided = frozenset(avoid)
        taken: list[Taken] = []
        try:
            for _ in records:
                taken.append(self._take(avoided))
        except StoreError as error:
            done.error = error
        taken.sort(key=lambda t: (t.segment, t.slot))  # neighbours in history become neighbours on disk
        for _, group in groupby(enumerate(taken), key=lambda item: (item[1].segment, item[1].slot - item[0])):
            for part in self._parts([i for i, _ in group]):
                try:
                    done.locations += self._segments.write(
                        [taken[i] for i in part], [records[i] for i in part]
                    )
                except StoreError as error:
                    done.error = error
                    done.lost = taken[part[0]].segment if _is_lost(error) else None
                    self._put_aside(taken[part[0] :], len(part), error)
                    return done
        return done

    def place(self, records: Sequence[Record], avoid: Iterable[int] = ()) -> Written:
        """As `write`; but where a segment turns out to be lost, others take the records. If two new ones are
        lost as well, or none can be made, it is not the segments that are at fault."""
        known = {row.number for row in self._slots.rows()}
        done, n_new = self.write(records, avoid), 0
        while done.lost is not None:
            n_new += done.lost not in known
            if n_new == 2:
                break
            more = self.write(records[len(done.locations) :], avoid)
            done = Written(done.locations + more.locations, more.error, more.lost)
        return done

    def sync(self) -> dict[int, StoreError]:
        """Makes durable what was written before -> the segments for which that failed, ever. What was
        written to these since their last sync may be lost; no more is written to them."""
        self._segments.sync()
        for number in tuple(self._segments.failures):
            self.seal(number)
        return self._segments.failures

    # -- reading

    def start(
        self,
        locations: Sequence[Location],
        buffers: Sequence[Record],
        done: Callable[[Sequence[int], Errors], None] | None = None,
    ) -> list[Future[tuple[list[int], Errors]]]:
        """Begins to read records into `buffers` [record_nbytes] each, neighbours together -> one future per
        transfer, of (indices, errors).

        done(indices, errors) is called on the reading thread for the records of each transfer.
        """

        def work(run: list[int]) -> tuple[list[int], Errors]:
            errors = self._read_run([locations[i] for i in run], [buffers[i] for i in run])
            if done is not None:
                done(run, errors)
            return run, errors

        return [self._readers.submit(partial(work, run)) for run in self._runs(locations)]

    def read(self, locations: Sequence[Location], buffers: Sequence[Record]) -> Errors:
        """As `start`, and waits -> one error or None for each record."""
        if len(locations) == 1:
            return self._read_run(locations, buffers)
        errors: Errors = [None] * len(locations)
        for future in self.start(locations, buffers):
            for i, error in zip(*future.result(), strict=True):
                errors[i] = error
        return errors

    def close(self) -> None:
        """Closes the files."""
        if self._owns_readers:
            self._readers.close()
        self._segments.close()

    # -- private

    def _read_run(self, locations: Sequence[Location], buffers: Sequence[Record]) -> Errors:
        try:
            return self._segments.read(locations, buffers)
        except Exception as error:  # whatever it was: who waits for the records must learn of it
            failed = StoreFailed(self.folder, f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            return [failed] * len(locations)

    def _take(self, avoid: frozenset[int]) -> Taken:
        taken = self._slots.take(avoid)
        while taken is None:
            with self._growing:
                taken = self._slots.take(avoid)  # another thread may have made a segment
                if taken is None:
                    row = self._grow()
                    self._segments.add(row)
                    self._slots.add(row)
        return taken

    def _grow_by_folder(self) -> SegmentRow:
        folder = self._segments.folder
        names = [name.split(".")[0] for name in self.files.listdir(folder)]
        number = 1 + max((int(name) for name in names if name.isdigit()), default=0)
        return create_segment(self.files, folder, number, SEGMENT_RECORDS, self.format)

    def _parts(self, run: list[int]) -> list[list[int]]:
        """A run cut into transfers."""
        return [run[i : i + self._run_records] for i in range(0, len(run), self._run_records)]

    def _runs(self, locations: Sequence[Location]) -> list[list[int]]:
        """Indices of the locations by transfer, in the order of the disk."""
        order = sorted(range(len(locations)), key=lambda i: (locations[i].segment, locations[i].slot))
        runs: list[list[int]] = []
        for i in order:
            here, last = locations[i], locations[runs[-1][-1]] if runs else None
            if last is not None and (last.segment, last.slot + 1) == (here.segment, here.slot):
                runs[-1].append(i)
            else:
                runs.append([i])
        return [part for run in runs for part in self._parts(run)]

    def _put_aside(self, taken: list[Taken], n_refused: int, error: StoreError) -> None:
        """Slots that hold nothing. Those of the transfer that failed are used last, unless the disk was
        merely full; a segment that is missing or damaged is not used at all."""
        if _is_lost(error):
            self.seal(taken[0].segment)
        for i, t in enumerate(taken):
            is_last = i < n_refused and not isinstance(error, StoreFull)
            self._slots.give_back(t.segment, t.slot, t.generation, last=is_last)


def _is_lost(error: BaseException | None) -> bool:
    """Whether a segment is missing or damaged."""
    return isinstance(error, RecordDamaged) or (
        isinstance(error, StoreFailed) and errno_of(error) == errno.ENOENT
    )
