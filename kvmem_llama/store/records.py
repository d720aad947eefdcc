"""The interface of a store that keeps block records, and the words its tiers share.

A record is a fixed-size row of bytes (`RecordLayout`): raw K of all layers, then V of all layers, of up to
`block_size` tokens. A block's table row names its record by a `RecordRef`; the generation in the reference
must equal the store's, so that a slot used again can never be read through an old reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Record: TypeAlias = NDArray[np.uint8]
"""Bytes of one record, [RecordLayout.nbytes] uint8."""

Where: TypeAlias = Literal["host", "disk", "tokens"]
"""The highest tier below the cells that holds a record; 'tokens': its rows can only be computed again."""


class StaleRecord(RuntimeError):
    """A reference names a record that was freed, or a slot that now holds another record."""


class NotStored(RuntimeError):
    """The rows of these records fell to the tokens tier: they must be computed again, then `restore`d."""

    def __init__(self, refs: Sequence[RecordRef]) -> None:
        super().__init__(f"the rows of {len(refs)} records are not stored any more")
        self.refs = tuple(refs)


@dataclass(frozen=True, slots=True)
class RecordRef:
    """Names one record for the life of the process: its slot, and how often the slot had been used."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    n_records: int
    n_bytes: int  # bytes held now
    peak_bytes: int  # most bytes ever held


class BlockStore(Protocol):
    """Keeps immutable, reference-counted records. Safe to call from several threads.

    Records that are handed out are read-only and stay valid as long as the caller holds them. Besides
    StaleRecord, reading raises NotStored, RecordDamaged (the record is lost, others are not; `refs` of both
    name all records concerned) and StoreFailed; writing raises StoreFull and StoreFailed.
    """

    def put(self, record: Record) -> RecordRef:
        """Takes ownership of `record` with one reference; the caller must not write to it any more."""
        ...

    def restore(self, ref: RecordRef, record: Record) -> None:
        """Gives a record that was lost, by damage or to the tokens tier, rows that were computed again."""
        ...

    def get(self, ref: RecordRef) -> Record:
        """The record."""
        ...

    def get_many(self, refs: Sequence[RecordRef]) -> list[Record]:
        """The records, read in as few operations as possible."""
        ...

    def fetch(self, refs: Sequence[RecordRef]) -> Iterator[list[tuple[int, Record]]]:
        """The records as batches of (index in `refs`, record), in any order; the next batch is read while
        the caller works on one. Records of a batch are valid until the next one is asked for. Raises
        NotStored before the first batch, RecordDamaged after the last."""
        ...

    def prefetch(self, refs: Sequence[RecordRef]) -> int:
        """Starts bringing records to the host -> how many. Never waits, never raises for a lost record."""
        ...

    def retrieved(self, refs: Sequence[RecordRef]) -> None:
        """A recall selected these records: they get warmer, all others cool down. Once per recall."""
        ...

    def where(self, ref: RecordRef) -> Where:
        """The tier the record would come from now. Raises StaleRecord."""
        ...

    def is_stuck(self, ref: RecordRef) -> bool:
        """The record could not be written to disk: it takes room in RAM until it is freed, or a later attempt
        succeeds. Raises StaleRecord."""
        ...

    def pin(self, refs: Sequence[RecordRef], pinned: bool = True) -> None:
        """Pinned records never fall to the tokens tier. Raises StaleRecord."""
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
