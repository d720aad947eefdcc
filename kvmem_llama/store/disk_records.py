"""The records of a family for work that needs no memory of them: fork, verify, compact, export, delete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from .disk import DiskStore
from .location import Location
from .records import Record


class DiskRecords:
    """See location.RecordFiles."""

    def __init__(self, disk: DiskStore, *, durable: bool = True) -> None:
        self._disk: Final = disk
        self._durable: Final = durable
        self._written: set[int] = set()  # segments written to since the last sync

    def read(self, location: Location) -> Record:
        record = np.empty(self._disk.format.record_nbytes, np.uint8)
        error = self._disk.read([location], [record])[0]
        if error is not None:
            raise error
        return record

    def write(self, record: Record, *, avoid: Iterable[int] = ()) -> Location:
        done = self._disk.place([record], avoid)
        if done.error is not None:
            raise done.error
        self._written.add(done.locations[0].segment)
        return done.locations[0]

    def sync(self) -> None:
        written, self._written = self._written, set()
        if self._durable:
            failures = self._disk.sync()
            for number in written & failures.keys():
                raise failures[number]

    def settle(self, kept: Sequence[Location], freed: Sequence[Location]) -> None:
        for location in kept:
            self._disk.keep(location)
        for location in freed:
            self._disk.release(location)

    def moved(self, places: Mapping[Location, Location]) -> None:
        pass  # nobody holds a reference

    def seal(self, number: int) -> None:
        self._disk.seal(number)

    def erase(self, location: Location) -> None:
        self._disk.erase(location)
        self._written.add(location.segment)

    def drop_segment(self, number: int) -> None:
        self._disk.drop_segment(number)

    def close(self) -> None:
        self._disk.close()
