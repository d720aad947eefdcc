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
from kvmem_llama.store.tiered import TieredStore

from . import shapes
from .rounds import rounds


def bench(folder: Path, raw_k_type: str, n_records: int, n_rounds: int) -> list[str]:
    """Lines of the report for one type of raw K; GB/s are bytes on disk."""
    format, raw_k = shapes.shape(raw_k_type), shapes.raw_k(raw_k_type)
    rng = np.random.default_rng(0)
    records = [shapes.random_record(rng, raw_k_type) for _ in range(n_records)]
    stored = [raw_k.encode(record) for record in records]

    def clean() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def plain() -> None:
        fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
        for record in stored:
            os.pwrite(fd, record, os.lseek(fd, 0, os.SEEK_END))
        os.fsync(fd)
        os.close(fd)

    def store() -> None:
        own: list[Record] = [record.copy() if not raw_k.is_plain else record.view() for record in records]
        pool = HostPool(len(own) * raw_k.record_nbytes)
        tiered = TieredStore(pool, DiskStore(folder, format), raw_k=raw_k)
        for record in own:
            tiered.put(record)
        tiered.flush()
        tiered.close()

    times = rounds({"plain file": plain, "put, then flush": store}, n_rounds, clean, f"{raw_k_type} write")
    n_bytes = n_records * format.record_nbytes
    ratio = paired_ratio(times["plain file"], times["put, then flush"])
    return [
        f"  {name:22} {n_bytes / np.median(seconds) / 1e9:6.2f} GB/s"
        + ("" if i == 0 else f"   {ratio} x plain file")
        for i, (name, seconds) in enumerate(times.items())
    ]
