"""What a tiered store knows of each of its records, and the lock that guards it.

    queued -> writing -> written -> durable      put, or restored: on its way to disk
    queued, writing, written -> failed           it could not be written; flush tries again
    durable -> tokens                            the disk budget: its rows are gone
    held                                         put into a store that is only read: in RAM until it closes

A record is in the host pool in every state but durable and tokens, where it may be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from .location import Location
from .records import RecordRef, StaleRecord


class Stage(Enum):
    """How far a record is on its way to disk."""

    QUEUED = 0
    WRITING = 1
    WRITTEN = 2
    DURABLE = 3
    FAILED = 4
    TOKENS = 5
    HELD = 6


PENDING: Final = frozenset({Stage.QUEUED, Stage.WRITING, Stage.WRITTEN})
"""On its way to disk."""


@dataclass(slots=True)
class Entry:
    """One record. `location` is where its newest rows are on disk; None while they are nowhere there."""

    generation: int
    stage: Stage
    location: Location | None = None
    refs: int = 1
    is_pinned: bool = False


class Entries:
    """Entries by slot of their reference. Every method but `changed` itself wants the lock held:

        with entries.changed: ...

    `changed` is also notified whenever a stage changes. The lock comes before that of the host pool.
    """

    def __init__(self) -> None:
        self.changed: Final = threading.Condition(threading.Lock())
        self._entries: Final[dict[int, Entry]] = {}

    def add(self, ref: RecordRef, entry: Entry) -> None:
        """A record with a new name."""
        self._entries[ref.slot] = entry

    def remove(self, ref: RecordRef) -> None:
        """A record is gone."""
        del self._entries[ref.slot]
        self.changed.notify_all()

    def find(self, ref: RecordRef) -> Entry | None:
        """The entry; None if the reference is stale."""
        entry = self._entries.get(ref.slot)
        return entry if entry is not None and entry.generation == ref.generation else None

    def live(self, ref: RecordRef) -> Entry:
        """The entry. Raises StaleRecord."""
        entry = self.find(ref)
        if entry is None:
            raise StaleRecord(f"record {ref.slot} of generation {ref.generation} was freed")
        return entry

    def set_stage(self, refs: Sequence[RecordRef], stage: Stage) -> list[RecordRef]:
        """Sets the stage of those that are not freed -> these."""
        live = [ref for ref in refs if self.find(ref) is not None]
        for ref in live:
            self.live(ref).stage = stage
        self.changed.notify_all()
        return live

    def __iter__(self) -> Iterator[tuple[RecordRef, Entry]]:
        for slot, entry in self._entries.items():
            yield RecordRef(slot, entry.generation), entry

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, stage: Stage) -> int:
        """Records in a stage."""
        return sum(entry.stage is stage for entry in self._entries.values())
