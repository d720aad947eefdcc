"""Where a history writes down what it must not forget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmem_llama.native.layout import I32, U8
from kvmem_llama.store.index_file import F16
from kvmem_llama.store.records import RecordRef
from kvmem_llama.store.steps import NewBlock, ReadBlock, StepFacts


class Journal(Protocol):
    """One history's. Owner thread only.

    Every call returns when what it was told is durable, and raises StoreFull, StoreFailed or CatalogDamaged
    if that cannot be; then the history on disk is as it was, and the caller must leave its own so, too.
    References stay the caller's: it frees those of replaced and dropped blocks after the call.
    """

    def read_ahead(self, blocks: Sequence[ReadBlock]) -> None:
        """A step that is not finished has read these complete blocks. They continue those told before, or
        take their place."""
        ...

    def commit(
        self,
        ids: I32,
        blocks: Sequence[NewBlock],
        means: F16,
        step: StepFacts | None,
        recalled: Sequence[tuple[int, RecordRef]] = (),
        token_rows: U8 | None = None,
        *,
        rewrites: int | None = None,
    ) -> None:
        """A step is finished: the head moves by the token ids `ids`. rewrites: it moves back to this many
        tokens before, in the same transaction; a partial last block of theirs is the first of `blocks`.

        blocks: added since the last commit, in order; the first may take the place of a partial last block.
        means: their rows of the index, [n_blocks, elements of all full-attention layers]. recalled: (number,
        record) of the blocks that the step's recalls selected, each once. token_rows: rows of the blocks in
        the token index, [n_blocks, bytes of a row], if there is one. Blocks read ahead that are not among
        `blocks` are forgotten.
        """
        ...

    def truncate(
        self,
        n_tokens: int,
        tail: NewBlock | None = None,
        mean: F16 | None = None,
        token_row: U8 | None = None,
    ) -> None:
        """Only the first `n_tokens` tokens stay. tail: the partial last block with a record of its own, if
        there is one; mean, token_row: its rows of the indexes. Blocks read ahead are forgotten."""
        ...

    def pin(self, pins: Sequence[tuple[int, int]]) -> None:
        """The pins are these token ranges [start, end) from now on."""
        ...

    def recomputed(
        self, number: int, ref: RecordRef, mean: F16 | None = None, token_row: U8 | None = None
    ) -> bool:
        """The record of a block was lost, and has been computed again under the same reference. mean,
        token_row: its rows of the indexes, where these were lost, too.

        -> False if a fork that shares the block was faster: the reference names the record that it has
        computed, and there are index rows of that one."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class NoJournal:
    """Of a history that ends with the process."""

    def read_ahead(self, blocks: Sequence[ReadBlock]) -> None:
        pass

    def commit(
        self,
        ids: I32,
        blocks: Sequence[NewBlock],
        means: F16,
        step: StepFacts | None,
        recalled: Sequence[tuple[int, RecordRef]] = (),
        token_rows: U8 | None = None,
        *,
        rewrites: int | None = None,
    ) -> None:
        pass

    def truncate(
        self,
        n_tokens: int,
        tail: NewBlock | None = None,
        mean: F16 | None = None,
        token_row: U8 | None = None,
    ) -> None:
        pass

    def pin(self, pins: Sequence[tuple[int, int]]) -> None:
        pass

    def recomputed(
        self, number: int, ref: RecordRef, mean: F16 | None = None, token_row: U8 | None = None
    ) -> bool:
        return True

    def close(self) -> None:
        pass
