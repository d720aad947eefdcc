"""The interface of a tier that keeps block records.

A record is a fixed-size row of bytes (`RecordLayout`): raw K of all layers, then V of all layers, of up to
`block_size` tokens. A block's table row names its record by a `RecordRef`; the generation in the reference
must equal the store's, so that a slot used again can never be read through an old reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Record: TypeAlias = NDArray[np.uint8]
"""Bytes of one record, [RecordLayout.nbytes] uint8."""


class StaleRecord(RuntimeError):
    """A reference names a record that was freed, or a slot that now holds another record."""


@dataclass(frozen=True, slots=True)
class RecordRef:
    """Names one record of one store: its slot, and how often the slot had been used when it was put there."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    n_records: int
    n_bytes: int  # bytes held now
    peak_bytes: int  # most bytes ever held


class BlockStore(Protocol):
    """Keeps immutable, reference-counted records. Safe to call from several threads."""

    def put(self, record: Record) -> RecordRef:
        """Takes ownership of `record` with one reference; the caller must not write to it any more."""
        ...

    def get(self, ref: RecordRef) -> Record:
        """The record, read-only and valid until its last reference is freed. Raises StaleRecord."""
        ...

    def share(self, ref: RecordRef) -> None:
        """Adds a reference (a fork). Raises StaleRecord."""
        ...

    def free(self, ref: RecordRef) -> None:
        """Drops a reference; the last one frees the record. Raises StaleRecord."""
        ...

    def refcount(self, ref: RecordRef) -> int:
        """References held on the record; 0 for a reference that is stale. Never raises."""
        ...

    def stats(self) -> StoreStats: ...
