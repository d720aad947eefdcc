"""Threads that read: as many reads under way as a drive likes, whoever asks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

N_THREADS: Final = 8  # reads that a drive works on at once; they wait, so it is not a number of cores
T = TypeVar("T")


class Readers:
    """A fixed number of threads, started when first needed. One for all stores of a process."""

    def __init__(self, n_threads: int = N_THREADS) -> None:
        self._pool: Final = ThreadPoolExecutor(n_threads, thread_name_prefix="kvmem-read")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` on one of the threads."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Waits for what was submitted and ends the threads."""
        self._pool.shutdown(wait=True)
