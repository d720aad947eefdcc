"""Blocks from disk and from the host, against plain reads and copies of the same number of bytes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from engine_bench.pairs import paired_ratio

from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.pool import HostPool
from kvmem_llama.store.readers import N_THREADS, Readers
from kvmem_llama.store.records import Record, RecordRef
from kvmem_llama.store.tiered import TieredStore

from . import shapes
from .rounds import drop_page_cache, rounds

CHUNK = 4 << 20  # bytes of one sequential read


class StageIn:
    """A store of many records on disk, and one plain file of the same size: a small one might stay in a cache
    below the page cache that the store's segments do not fit."""

    def __init__(self, folder: Path, raw_k_type: str, n_records: int, n_recalled: int, seed: int) -> None:
        format, raw_k = shapes.shape(raw_k_type), shapes.raw_k(raw_k_type)
        self.raw_k_type, self.n_recalled = raw_k_type, n_recalled
        self.stored_nbytes, self.record_nbytes = format.record_nbytes, raw_k.record_nbytes
        self.rng = np.random.default_rng(seed)
        (folder / "segments").mkdir(parents=True)
        (folder / "plain").mkdir()
        self.segments, self.plain = folder / "segments", folder / "plain" / "file"
        self.readers = Readers()
        nbytes = self.record_nbytes
        self.disk = DiskStore(self.segments, format, readers=self.readers)
        self.store = TieredStore(HostPool(2 * nbytes), self.disk, raw_k=raw_k)
        self.refs = [self.store.put(shapes.random_record(self.rng, raw_k_type)) for _ in range(n_records)]
        self.store.flush()
        # One process, two hosts: this one keeps everything.
        self.locations = [at for at in map(self.store.locate, self.refs) if at is not None]
        self.warm = TieredStore(
            HostPool((n_records + 1) * nbytes), DiskStore(self.segments, format), raw_k=raw_k
        )
        self.warm_refs = [self.warm.attach(location) for location in self.locations]
        self.buffer = np.zeros(n_recalled * nbytes, np.uint8)  # records
        self.stored = self.buffer[: n_recalled * self.stored_nbytes]  # their bytes on disk
        with self.plain.open("wb") as file:
            for _ in range(n_records):
                file.write(self.rng.bytes(self.stored_nbytes))
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self.store.close()
        self.warm.close()
        self.readers.close()

    # -- what is timed

    def pick(self, refs: list[RecordRef]) -> list[RecordRef]:
        """Scattered blocks in the order of history, as a recall selects them."""
        return [refs[i] for i in np.sort(self.rng.choice(len(refs), self.n_recalled, replace=False))]

    def from_disk(self) -> None:
        assert sum(len(batch) for batch in self.store.fetch(self.pick(self.refs))) == self.n_recalled

    def all_at_once(self) -> None:
        assert len(self.store.get_many(self.pick(self.refs))) == self.n_recalled

    def from_host(self) -> None:
        nbytes = self.record_nbytes
        for i, record in enumerate(self.warm.get_many(self.pick(self.warm_refs))):
            self.buffer[i * nbytes : (i + 1) * nbytes] = record

    def sequential(self) -> None:
        self._read(range(0, self.stored.nbytes, CHUNK), None)

    def sequential_threads(self) -> None:
        with ThreadPoolExecutor(N_THREADS) as pool:
            self._read(range(0, self.stored.nbytes, CHUNK), pool)

    def memcpy(self, source: Record) -> None:
        np.copyto(self.buffer, source)

    def _read(self, offsets: range, pool: ThreadPoolExecutor | None) -> None:
        """One stretch of the plain file, anywhere in it, to the buffer."""
        fd = os.open(self.plain, os.O_RDONLY)
        view = memoryview(self.stored)
        run = map if pool is None else pool.map
        start = int(self.rng.integers(0, len(self.refs) - self.n_recalled + 1)) * self.stored_nbytes
        n = sum(run(lambda at: os.preadv(fd, [view[at : at + CHUNK]], start + at), offsets))
        os.close(fd)
        assert n == self.stored.nbytes

    def _drop(self) -> None:
        drop_page_cache(self.segments)
        drop_page_cache(self.plain.parent)


def bench(
    folder: Path, raw_k_type: str, n_records: int, n_recalled: int, n_rounds: int, seed: int
) -> list[str]:
    """Lines of the report for one type of raw K; GB/s are bytes on disk, and of records in RAM."""
    at = StageIn(folder, raw_k_type, n_records, n_recalled, seed)
    try:
        cold = rounds(
            {
                "sequential read": at.sequential,
                f"  with {N_THREADS} threads": at.sequential_threads,
                "fetch (pipelined)": at.from_disk,
                "get_many (at once)": at.all_at_once,
            },
            n_rounds,
            at._drop,
            f"{raw_k_type} disk",
        )
        at.warm.get_many(at.warm_refs)
        source = at.buffer.copy()
        warm = rounds(
            {"memcpy": lambda: at.memcpy(source), "host, gathered": at.from_host},
            n_rounds,
            lambda: None,
            f"{raw_k_type} host",
        )
    finally:
        at.close()
    lines = []
    for times, baseline, n_bytes in (
        (cold, "sequential read", at.stored.nbytes),
        (warm, "memcpy", at.buffer.nbytes),
    ):
        for name, seconds in times.items():
            ratio = "" if name == baseline else f"   {paired_ratio(times[baseline], seconds)} x {baseline}"
            lines.append(f"  {name:22} {n_bytes / np.median(seconds) / 1e9:6.2f} GB/s{ratio}")
    return lines
