"""Segments: GGUF files made for a number of records, each a pair of tensors at fixed places.

    header     magic "GGUF", version 3, counts, metadata, one entry per tensor     (ggml/docs/gguf.md)
    r00000.k   raw K of all layers of the record in slot 0, in its storage type
    r00000.v   V of all layers, in the cells' type
    r00001.k   ...

Every tensor begins at a multiple of 4096 bytes. A segment gets its whole length and its header before it
gets its name; after that only bytes inside tensors change, so it is a valid GGUF file at every moment. It is
sparse: a slot that was never written takes no space and reads as zeros. Little-endian.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from kvmem_llama.errors import RecordDamaged, StoreError, StoreFailed
from kvmem_llama.gguf_header import GGML_TYPES

from .files import Files

FORMAT: Final = 1  # of what the header means here; a reader of an older one must refuse a newer one
ALIGNMENT: Final = 4096  # bytes: a page, and the largest common sector of a drive
MAX_SLOTS: Final = 100_000  # the slot is five digits of a tensor's name

_U32, _STRING = 4, 8  # types of metadata values


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """What the catalog keeps of a segment. A number is used once in a family, by one file."""

    number: int
    n_slots: int

    @property
    def file(self) -> str:
        """Name of the file in the folder of segments."""
        return f"{self.number:06}.gguf"


@dataclass(frozen=True)
class SegmentFormat:
    """What all segments of a family have in common. Raises ValueError for sizes that no type has."""

    family: str
    layout: str  # fingerprint of the record layout
    k_type: int  # enum ggml_type of raw K
    k_nbytes: int  # bytes of the raw K of one record
    v_type: int
    v_nbytes: int

    def __post_init__(self) -> None:
        self._n_elements(self.k_type, self.k_nbytes)
        self._n_elements(self.v_type, self.v_nbytes)

    @property
    def record_nbytes(self) -> int:
        """Bytes of a record in RAM: K, then V, without a gap."""
        return self.k_nbytes + self.v_nbytes

    @property
    def v_shift(self) -> int:
        """Bytes from the start of a slot to its V."""
        return _aligned(self.k_nbytes)

    @property
    def slot_nbytes(self) -> int:
        """Bytes from one slot to the next."""
        return self.v_shift + _aligned(self.v_nbytes)

    def data_start(self, row: SegmentRow) -> int:
        """Bytes before slot 0."""
        return len(_header(self, SegmentRow(0, row.n_slots)))  # the number does not change its length

    def offset(self, row: SegmentRow, slot: int) -> int:
        """Where the record in a slot begins, in bytes from the start of the file."""
        return self.data_start(row) + slot * self.slot_nbytes

    def file_nbytes(self, row: SegmentRow) -> int:
        """Length of the file."""
        return self.offset(row, row.n_slots)

    def header(self, row: SegmentRow) -> bytes:
        """The bytes before the first tensor, a multiple of the alignment."""
        return _header(self, row)

    def _n_elements(self, type_id: int, nbytes: int) -> int:
        if type_id not in GGML_TYPES:
            raise ValueError(f"no storage type has number {type_id}")
        name, block, size = GGML_TYPES[type_id]
        if nbytes <= 0 or nbytes % size:
            raise ValueError(f"{nbytes} bytes are not whole blocks of {name} ({size} bytes)")
        return nbytes // size * block

    def entries(self, n_slots: int) -> list[tuple[str, int, int, int]]:
        """The tensor table: (name, number of elements, type, offset from the end of the header)."""
        n_k = self._n_elements(self.k_type, self.k_nbytes)
        n_v = self._n_elements(self.v_type, self.v_nbytes)
        table = []
        for slot in range(n_slots):
            at = slot * self.slot_nbytes
            table.append((f"r{slot:05}.k", n_k, self.k_type, at))
            table.append((f"r{slot:05}.v", n_v, self.v_type, at + self.v_shift))
        return table


def segment_path(folder: Path, number: int) -> Path:
    """Path of a segment in the folder of segments."""
    return folder / SegmentRow(number, 0).file


def create_segment(
    files: Files, folder: Path, number: int, n_slots: int, format: SegmentFormat
) -> SegmentRow:
    """Makes an empty segment; when this returns, the file and its name are durable.

    A crash before that leaves at most a file whose name ends in ".tmp". Raises StoreFull, StoreFailed (also
    if the file is there already).
    """
    row = SegmentRow(number, n_slots)
    path = folder / row.file
    temporary = folder / (row.file + ".tmp")
    if files.exists(path):
        raise StoreFailed(path, "a new segment would replace this file")
    files.at("segment.before")
    fd = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        files.pwrite(fd, format.header(row), 0)
        files.truncate(fd, format.file_nbytes(row))
        files.fsync(fd)
    except StoreError:
        files.close(fd)
        with suppress(StoreError):
            files.unlink(temporary)
        raise
    files.close(fd)
    files.at("segment.named")
    files.rename(temporary, path)
    files.sync_dir(folder)
    files.at("segment.after")
    return row


def row_of(files: Files, fd: int, number: int) -> SegmentRow:
    """The row of a segment another workspace made, from its own header. Raises RecordDamaged."""
    start = np.zeros(24, np.uint8)
    files.read_into(fd, [start], 0)
    magic, _, n_tensors = struct.unpack_from("<4sIQ", start.tobytes())
    if magic != b"GGUF" or n_tensors % 2 or not 0 < n_tensors <= 2 * MAX_SLOTS:
        raise RecordDamaged(f"segment {number}", "its header is not that of a segment")
    return SegmentRow(number, n_tensors // 2)


def check_segment(files: Files, fd: int, row: SegmentRow, format: SegmentFormat) -> None:
    """Raises RecordDamaged if the header or the length of an open segment is not what was made."""
    header = format.header(row)
    found = np.empty(len(header), np.uint8)
    n = files.read_into(fd, [found], 0)
    if n < len(header):
        raise RecordDamaged(f"segment {row.file}", f"its header ends after {n} of {len(header)} bytes")
    differs = np.flatnonzero(found != np.frombuffer(header, np.uint8))
    if len(differs):
        raise RecordDamaged(f"segment {row.file}", f"its header differs at byte {differs[0]}")
    expected, length = format.file_nbytes(row), files.length(fd)
    if length != expected:
        raise RecordDamaged(f"segment {row.file}", f"it has {length} bytes instead of {expected}")


def repair_segment(files: Files, folder: Path, row: SegmentRow, format: SegmentFormat) -> None:
    """Writes header and length again; records are not touched. Raises StoreFull, StoreFailed."""
    fd = files.open(folder / row.file, os.O_RDWR)
    try:
        files.pwrite(fd, format.header(row), 0)
        files.truncate(fd, format.file_nbytes(row))
        files.fsync(fd)
    finally:
        files.close(fd)


@lru_cache(maxsize=64)
def _header(format: SegmentFormat, row: SegmentRow) -> bytes:
    if not 0 < row.n_slots <= MAX_SLOTS:
        raise ValueError(f"a segment has 1 to {MAX_SLOTS} slots, not {row.n_slots}")
    metadata: dict[str, int | str] = {
        "general.architecture": "kvmem",
        "general.alignment": ALIGNMENT,
        "kvmem.format": FORMAT,
        "kvmem.family": format.family,
        "kvmem.layout": format.layout,
        "kvmem.segment": row.number,
        "kvmem.records": row.n_slots,
    }
    entries = format.entries(row.n_slots)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, value in metadata.items():
        if isinstance(value, str):
            parts += [_text(key), struct.pack("<I", _STRING), _text(value)]
        else:
            parts += [_text(key), struct.pack("<II", _U32, value)]
    for name, n_elements, type_id, offset in entries:
        parts += [_text(name), struct.pack("<IQIQ", 1, n_elements, type_id, offset)]
    data = b"".join(parts)
    return data.ljust(_aligned(len(data)), b"\0")


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
