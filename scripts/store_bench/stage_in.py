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
from kvmem_llama.store.segment import SegmentFormat
from kvmem_llama.store.tiered import TieredStore

from .rounds import drop_page_cache, rounds

CHUNK = 4 << 20  # bytes of one sequential read


class StageIn:
    """A store of many records on disk, and one plain file of the same size: a small one might stay in a cache
    below the page cache that the store's segments do not fit."""

    def __init__(
        self, folder: Path, format: SegmentFormat, n_records: int, n_recalled: int, seed: int
    ) -> None:
        self.format, self.n_recalled = format, n_recalled
        self.rng = np.random.default_rng(seed)
        (folder / "segments").mkdir(parents=True)
        (folder / "plain").mkdir()
        self.segments, self.plain = folder / "segments", folder / "plain" / "file"
        self.readers = Readers()
        nbytes = format.record_nbytes
        self.disk = DiskStore(self.segments, format, readers=self.readers)
        self.store = TieredStore(HostPool(2 * nbytes), self.disk)
        self.refs = [self.store.put(self.random()) for _ in range(n_records)]
        self.store.flush()
        # One process, two hosts: this one keeps everything.
        self.locations = [at for at in map(self.store.locate, self.refs) if at is not None]
        self.warm = TieredStore(HostPool((n_records + 1) * nbytes), DiskStore(self.segments, format))
        self.warm_refs = [self.warm.attach(location) for location in self.locations]
        self.buffer = np.zeros(n_recalled * nbytes, np.uint8)
        with self.plain.open("wb") as file:
            for _ in range(n_records):
                file.write(self.random().tobytes())
            file.flush()
            os.fsync(file.fileno())

    def random(self) -> Record:
        return self.rng.integers(0, 256, self.format.record_nbytes, np.uint8)

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
        nbytes = self.format.record_nbytes
        for i, record in enumerate(self.warm.get_many(self.pick(self.warm_refs))):
            self.buffer[i * nbytes : (i + 1) * nbytes] = record

    def sequential(self) -> None:
        self._read(range(0, self.buffer.nbytes, CHUNK), None)

    def sequential_threads(self) -> None:
        with ThreadPoolExecutor(N_THREADS) as pool:
            self._read(range(0, self.buffer.nbytes, CHUNK), pool)

    def memcpy(self, source: Record) -> None:
        np.copyto(self.buffer, source)

    def _read(self, offsets: range, pool: ThreadPoolExecutor | None) -> None:
        """One stretch of the plain file, anywhere in it, to the buffer."""
        fd = os.open(self.plain, os.O_RDONLY)
        view = memoryview(self.buffer)
        run = map if pool is None else pool.map
        start = int(self.rng.integers(0, len(self.refs) - self.n_recalled + 1)) * self.format.record_nbytes
        n = sum(run(lambda at: os.preadv(fd, [view[at : at + CHUNK]], start + at), offsets))
        os.close(fd)
        assert n == self.buffer.nbytes

    def _drop(self) -> None:
        drop_page_cache(self.segments)
        drop_page_cache(self.plain.parent)


def bench(
    folder: Path, format: SegmentFormat, n_records: int, n_recalled: int, n_rounds: int, seed: int, title: str
) -> list[str]:
    """Lines of the report for one type of raw K."""
    at = StageIn(folder, format, n_records, n_recalled, seed)
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
            f"{title} disk",
        )
        at.warm.get_many(at.warm_refs)
        source = at.buffer.copy()
        warm = rounds(
            {"memcpy": lambda: at.memcpy(source), "host, gathered": at.from_host},
            n_rounds,
            lambda: None,
            f"{title} host",
        )
    finally:
        at.close()
    lines = []
    for times, baseline in ((cold, "sequential read"), (warm, "memcpy")):
        for name, seconds in times.items():
            ratio = "" if name == baseline else f"   {paired_ratio(times[baseline], seconds)} x {baseline}"
            lines.append(f"  {name:22} {at.buffer.nbytes / np.median(seconds) / 1e9:6.2f} GB/s{ratio}")
    return lines
