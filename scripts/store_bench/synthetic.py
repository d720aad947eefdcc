"""Long workspaces of SmolLM2-135M's shape that nobody has read: a whole catalog and index, few records.

A record that was never written is a hole in its segment. It reads as zeros, and zeros have a checksum like
any other bytes, so every block can be read and checked. `n_real` blocks, spread over the history, hold random
bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from kvmem_llama.native.layout import LayerInfo, RecordLayout
from kvmem_llama.store.append import AddedBlock, Addition, append
from kvmem_llama.store.binding import Binding
from kvmem_llama.store.family import Family
from kvmem_llama.store.files import Files
from kvmem_llama.store.index_file import mean_xxh
from kvmem_llama.store.location import Location, checksum_of
from kvmem_llama.store.root import Root
from kvmem_llama.store.rows import StepRow
from kvmem_llama.store.segment import SegmentRow, create_segment
from kvmem_llama.store.slot_rows import new_segment

from .shapes import BLOCK, N_LAYERS, shape

N_HEAD, N_HEAD_KV, D = 9, 3, 64
SEGMENT = 64  # records, as Settings.segment_records
ROWS = 4096  # blocks of one transaction
LAYERS = tuple(
    LayerInfo(
        il=il, cache=0, rope=True, n_head=N_HEAD, n_head_kv=N_HEAD_KV, d_k=D, d_v=D, raw_k_row=384, k_row=384,
        v_row=384, scale=D**-0.5, type_k=1, type_v=1, k_rotated=False, rope_params=(0,) * 16,
        rope_factors=False, k_base=0, v_base=0,
    )
    for il in range(N_LAYERS)
)  # fmt: skip
LAYOUT = RecordLayout.of(LAYERS, BLOCK, "f16")


def binding() -> Binding:
    """What such a workspace is bound to."""
    format = shape("f16")
    return Binding(
        model="00" * 16, model_name="made up", arch="llama", block_size=BLOCK, raw_k_type="f16",
        cache_type_k="f16", cache_type_v="f16", rope="the model's", layout="synthetic", k_type=format.k_type,
        k_nbytes=format.k_nbytes, v_type=format.v_type, v_nbytes=format.v_nbytes,
        index_layers=tuple((layer.il, layer.n_head_kv, layer.d_k) for layer in LAYERS),
    )  # fmt: skip


class UnsyncedFiles(Files):
    """Thousands of files are made: the operating system may write them when it likes."""

    def fsync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


def make_workspace(folder: Path, name: str, n_tokens: int, n_real: int, seed: int = 0) -> list[int]:
    """Makes the workspace in the root folder `folder` -> numbers of the blocks whose records are on disk.

    n_tokens: a multiple of the block size.
    """
    rng = np.random.default_rng(seed)
    root = Root(folder, UnsyncedFiles(), durability="relaxed")
    place = root.create(name, binding())
    n_blocks = n_tokens // BLOCK
    real = sorted(rng.choice(n_blocks, min(n_real, n_blocks), replace=False).tolist())
    records = {number: rng.integers(0, 256, LAYOUT.nbytes, np.uint8) for number in real}
    with root.family(place.family) as family:
        segments = [_segment(family, place.workspace) for _ in range(-(-n_blocks // SEGMENT))]
        means = _Means(family, rng)
        hole = checksum_of(np.zeros(LAYOUT.nbytes, np.uint8), 1)
        for first in range(0, n_blocks, ROWS):
            numbers = range(first, min(first + ROWS, n_blocks))
            rows = means.rows(len(numbers))
            family.index.put(1, 0, first, rows)
            added = []
            for number, row in zip(numbers, rows, strict=True):
                segment, slot = segments[number // SEGMENT], number % SEGMENT
                checksum = hole
                if number in records:
                    checksum = checksum_of(records[number], 1)
                    _write(family, segment, slot, records[number])
                at = Location(segment.number, slot, 1, checksum)
                start = number * BLOCK
                added.append(
                    AddedBlock(number, start, BLOCK, at, mean_xxh(row), text=f"block {number} " * 12)
                )
            ids = rng.integers(0, 49152, len(numbers) * BLOCK, np.int32)
            start = first * BLOCK
            step = StepRow(0, 0, "read", start, start + len(ids), start, "", 0, "", "{}", 0.0)
            addition = Addition(start, ids, added, step, time.time())
            family.catalog.write(lambda db, a=addition: append(db, place.workspace, a))
        family.catalog.checkpoint()
    return real


class _Means:
    """Random rows of the index, windows of one long run of noise: a normal number each would take minutes."""

    def __init__(self, family: Family, rng: np.random.Generator) -> None:
        self._n = family.binding.index_shape.n_elements
        self._rng = rng
        self._noise = rng.standard_normal(1 << 24, dtype=np.float32).astype(np.float16)

    def rows(self, n: int) -> np.ndarray:
        """[n, elements of a row] float16."""
        starts = self._rng.integers(0, len(self._noise) - self._n, n)
        return np.stack([self._noise[start : start + self._n] for start in starts])


def _segment(family: Family, owner: str) -> SegmentRow:
    def make(number: int) -> int:
        create_segment(family.files, family.paths.segments, number, SEGMENT, family.segment_format)
        return SEGMENT

    row = family.catalog.write(lambda db: new_segment(db, owner, make), "segment")
    return SegmentRow(row.number, row.n_slots)


def _write(family: Family, segment: SegmentRow, slot: int, record: np.ndarray) -> None:
    format = family.segment_format
    with (family.paths.segments / segment.file).open("r+b") as file:
        at = format.offset(segment, slot)
        file.seek(at)
        file.write(record[: format.k_nbytes].tobytes())
        file.seek(at + format.v_shift)
        file.write(record[format.k_nbytes :].tobytes())
