"""Small segments and records for tests of the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.files import Files
from kvmem_llama.store.readers import Readers
from kvmem_llama.store.records import Record
from kvmem_llama.store.segment import SegmentFormat, SegmentRow, create_segment

F32, F16, Q8_0, BF16 = 0, 1, 8, 30  # enum ggml_type

FORMAT = SegmentFormat("family", "layout", F16, 6144, F16, 1000)  # neither is a multiple of 4096
NBYTES = FORMAT.record_nbytes
SLOTS = 4  # records of a segment


def record(seed: int, nbytes: int = NBYTES) -> Record:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def growing(files: Files, folder: Path, n_slots: int = SLOTS) -> Callable[[], SegmentRow]:
    """What a catalog does when a store wants a segment, without the catalog."""

    def grow() -> SegmentRow:
        number = 1 + max((int(path.name[:6]) for path in folder.glob("*.gguf")), default=0)
        return create_segment(files, folder, number, n_slots, FORMAT)

    return grow


def disk_store(
    folder: Path,
    files: Files | None = None,
    *,
    readers: Readers | None = None,
    budget: int = 0,
    coalesce: bool = True,
    n_slots: int = SLOTS,
) -> DiskStore:
    """An empty store."""
    folder.mkdir(exist_ok=True)
    files = files or Files()
    return DiskStore(
        folder,
        FORMAT,
        grow=growing(files, folder, n_slots),
        files=files,
        readers=readers,
        budget=budget,
        coalesce=coalesce,
    )


def assert_gguf(path: Path) -> gguf.GGUFReader:
    """The gguf package reads the file to its last tensor."""
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == 2 * int(reader.fields["kvmem.records"].contents())
    last = reader.tensors[-1]
    assert last.data_offset + last.n_bytes <= path.stat().st_size
    return reader
