"""Records to disk, synced, against one plain file of the same bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from engine_bench.pairs import paired_ratio

from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.pool import HostPool
from kvmem_llama.store.records import Record
from kvmem_llama.store.segment import SegmentFormat
from kvmem_llama.store.tiered import TieredStore

from .rounds import rounds


def bench(folder: Path, format: SegmentFormat, n_records: int, n_rounds: int, title: str) -> list[str]:
    """Lines of the report for one type of raw K."""
    rng = np.random.default_rng(0)
    records = [rng.integers(0, 256, format.record_nbytes, np.uint8) for _ in range(n_records)]

    def clean() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def plain() -> None:
        fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
        for record in records:
            os.pwrite(fd, record, os.lseek(fd, 0, os.SEEK_END))
        os.fsync(fd)
        os.close(fd)

    def store() -> None:
        own: list[Record] = [record.view() for record in records]
        tiered = TieredStore(HostPool(len(own) * format.record_nbytes), DiskStore(folder, format))
        for record in own:
            tiered.put(record)
        tiered.flush()
        tiered.close()

    times = rounds({"plain file": plain, "put, then flush": store}, n_rounds, clean, title)
    n_bytes = n_records * format.record_nbytes
    ratio = paired_ratio(times["plain file"], times["put, then flush"])
    return [
        f"  {name:22} {n_bytes / np.median(seconds) / 1e9:6.2f} GB/s"
        + ("" if i == 0 else f"   {ratio} x plain file")
        for i, (name, seconds) in enumerate(times.items())
    ]
