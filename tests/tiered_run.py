"""A tiered store with what it stands on, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from store_data import FORMAT, NBYTES, disk_store, record

from kvmem_llama.store.files import Files
from kvmem_llama.store.location import Location
from kvmem_llama.store.pool import HostPool
from kvmem_llama.store.records import RecordRef
from kvmem_llama.store.system import System
from kvmem_llama.store.tiered import TieredStore


class Store:
    """A tiered store with what it stands on."""

    def __init__(
        self,
        folder: Path,
        *,
        host: int = 8,
        disk: int = 0,
        files: Files | None = None,
        system: System | None = None,
        pool: HostPool | None = None,
        stage_out: bool = True,
        durable: bool = True,
    ) -> None:
        """host, disk: budgets in records."""
        self.fallen: list[Location] = []
        self.pool = pool or HostPool(host * NBYTES)
        self.disk = disk_store(folder, files or Files(system), budget=disk * FORMAT.slot_nbytes)
        self.tiered = TieredStore(
            self.pool, self.disk, fall=self.fallen.extend, stage_out=stage_out, durable=durable
        )

    def put(self, *seeds: int) -> list[RecordRef]:
        return [self.tiered.put(record(seed)) for seed in seeds]

    def commit(self, refs: Sequence[RecordRef]) -> list[Location]:
        """Flushes and keeps, as a catalog does."""
        self.tiered.flush()
        locations = [at for at in map(self.tiered.locate, refs) if at is not None]
        self.tiered.settle(locations, [])
        return locations

    def is_sound(self, refs: Sequence[RecordRef], *seeds: int) -> bool:
        found = self.tiered.get_many(refs)
        return all(np.array_equal(a, record(seed)) for a, seed in zip(found, seeds, strict=True))


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


@contextmanager
def opened(folder: Path, **options: object) -> Iterator[Store]:
    store = Store(folder, **options)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.tiered.close()
