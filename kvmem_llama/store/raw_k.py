"""Raw K of records on disk: as its rows are in RAM, or in a smaller type.

A smaller type is f16 or f32 in RAM: what restores blocks and computes means takes these. A record is rounded
once, when it is stored, to what its bytes on disk will read as; encoding such rows again gives bytes that
read the same. So it makes no difference whether a record comes from RAM or from disk, and a mean that is
computed again is the same.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.native.layout import Q8_0_BLOCK, RecordLayout

from .records import Record

_Q8_0: Final = np.dtype([("scale", "<f2"), ("values", "i1", Q8_0_BLOCK)])  # ggml's block_q8_0
_PART: Final = (
    512 * Q8_0_BLOCK
)  # elements converted at once: they stay in the cache, and in small allocations
_LARGEST_SCALE: Final = np.float32(515.5)  # times 127 it is still a float16
# The largest bf16 that rows of a size in bytes can hold. Rounded to the nearest, what is larger would be inf.
_LARGEST_BF16: Final = {2: np.float32(65280), 4: np.float32((2 - 2**-7) * 2.0**127)}

_Rows = NDArray[np.floating]


class RawK:
    """Between records in RAM and on disk. Any thread."""

    def __init__(self, row_type: str, stored_type: str, k_nbytes: int, v_nbytes: int) -> None:
        """row_type: f16 or f32, of the rows in RAM; stored_type: that, bf16 or q8_0. k_nbytes, v_nbytes: of
        one record in RAM."""
        self.is_plain: Final = stored_type == row_type
        """Records are the same in RAM and on disk."""
        self.record_nbytes: Final = k_nbytes + v_nbytes
        self._dtype: Final[np.dtype[np.floating]] = np.dtype("<f2" if row_type == "f16" else "<f4")
        self._is_q8: Final = stored_type == "q8_0"
        self._k_nbytes: Final = k_nbytes
        n = k_nbytes // self._dtype.itemsize
        self._stored_k_nbytes: Final = (
            k_nbytes if self.is_plain else n // Q8_0_BLOCK * _Q8_0.itemsize if self._is_q8 else n * 2
        )
        self.stored_nbytes: Final = self._stored_k_nbytes + v_nbytes

    @classmethod
    def of(cls, layout: RecordLayout) -> RawK:
        k_nbytes = layout.k_nbytes
        return cls(layout.raw_k_type, layout.stored_k_type, k_nbytes, layout.nbytes - k_nbytes)

    @classmethod
    def plain(cls, record_nbytes: int) -> RawK:
        """Of records that are the same in RAM and on disk."""
        return cls("f16", "f16", record_nbytes, 0)

    def round(self, record: Record) -> None:
        """Gives a record, in place, the rows that it will have when it is read from disk."""
        if not self.is_plain:
            rows = record[: self._k_nbytes].view(self._dtype)
            self._decode(self._encode(rows), rows)

    def encode(self, record: Record) -> Record:
        """The bytes of a record on disk: [stored_nbytes]; itself where there is no difference."""
        if self.is_plain:
            return record
        stored = np.empty(self.stored_nbytes, np.uint8)
        stored[: self._stored_k_nbytes] = self._encode(record[: self._k_nbytes].view(self._dtype))
        stored[self._stored_k_nbytes :] = record[self._k_nbytes :]
        return stored

    def decode(self, stored: Record, record: Record | None = None) -> Record:
        """The record of bytes that were read from disk, in `record` [record_nbytes] if it is given."""
        if self.is_plain:
            return stored
        if record is None:
            record = np.empty(self.record_nbytes, np.uint8)
        self._decode(stored[: self._stored_k_nbytes], record[: self._k_nbytes].view(self._dtype))
        record[self._k_nbytes :] = stored[self._stored_k_nbytes :]
        return record

    def _encode(self, rows: _Rows) -> Record:
        out = np.empty(self._stored_k_nbytes, np.uint8)
        stored = out.view(_Q8_0 if self._is_q8 else "<u2")
        for at in range(0, len(rows), _PART):
            part = rows[at : at + _PART].astype(np.float32)
            if self._is_q8:
                _to_q8_0(part, stored[at // Q8_0_BLOCK : (at + _PART) // Q8_0_BLOCK], self._dtype)
            else:
                stored[at : at + _PART] = _to_bf16(part, _LARGEST_BF16[self._dtype.itemsize])
        return out

    def _decode(self, stored: Record, out: _Rows) -> None:
        source = stored.view(_Q8_0 if self._is_q8 else "<u2")
        for at in range(0, len(out), _PART):
            if self._is_q8:
                blocks = source[at // Q8_0_BLOCK : (at + _PART) // Q8_0_BLOCK]
                values = blocks["values"].astype(np.float32)
                values *= blocks["scale"].astype(np.float32)[:, np.newaxis]
                out[at : at + _PART] = values.reshape(-1)
            else:
                bits = source[at : at + _PART].astype("<u4") << np.uint32(16)
                out[at : at + _PART] = bits.view("<f4")


def _to_bf16(values: NDArray[np.float32], largest: np.float32) -> NDArray[np.uint32]:
    """Rounded to the nearest, of two the even one, and to no more than `largest`. Changes `values`."""
    bits = np.clip(values, -largest, largest, out=values).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _to_q8_0(values: NDArray[np.float32], blocks: NDArray[np.void], row_type: np.dtype[np.floating]) -> None:
    values = values.reshape(-1, Q8_0_BLOCK)
    largest = np.ascontiguousarray(np.abs(values).T).max(axis=0)  # along short rows NumPy is slow
    scale = _scale(largest)
    if row_type.itemsize == 2:  # 127 x scale is rounded there; this scale is found again, whatever came of it
        scale = _scale((scale * np.float32(127)).astype(np.float16).astype(np.float32))
    # By the largest value and not by the scale, which is rounded: so the largest one is 127 in any case.
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(scale), where=scale > 0)
    values *= inverse[:, np.newaxis]
    blocks["scale"], blocks["values"] = scale, np.rint(values, out=values)


def _scale(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales, exact in float16, of blocks with these largest values."""
    scale: NDArray[np.float32] = np.minimum(largest / np.float32(127), _LARGEST_SCALE)
    return scale.astype(np.float16).astype(np.float32)
