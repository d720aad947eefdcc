"""The journal of a durable workspace: what memory commits becomes rows, in the order that survives a crash.

records written and synced -> index rows -> one transaction -> acknowledged -> the slots of what was replaced
are free. Whatever fails before the end of the transaction leaves the workspace as it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from kvmem_llama.errors import StoreError
from kvmem_llama.native.layout import I32, U8

from . import lineage
from .ahead import put_ahead
from .append import (
    AddedBlock,
    Addition,
    Heat,
    append,
    drop_records,
    put_heat,
    put_pins,
    put_record,
    workspace_row,
)
from .content import find_block, lineage_row, n_blocks_before
from .forking import fork_workspace
from .holding import Holding
from .index_file import F16, mean_xxh
from .lineage import Tail
from .location import DurableRecords, Location
from .records import RecordRef
from .rows import AheadRow, StepRow, WorkspaceRow
from .steps import NewBlock, ReadBlock, StepFacts
from .tables import Db, storable
from .token_file import TokenShape


class Durable:
    """See memory.journal.Journal. Owner thread only, but for `fall`."""

    def __init__(
        self, holding: Holding, store: DurableRecords, token_shape: TokenShape | None = None
    ) -> None:
        """token_shape: of the token index that is kept; None: there is none."""
        self.holding: Final = holding
        self._store: Final = store
        self._token_shape: Final = token_shape
        self._family: Final = holding.family
        self._catalog: Final = holding.family.catalog
        with self._catalog.snapshot() as db:
            self._row = workspace_row(db, holding.place.workspace)
            self._first_own = lineage_row(db, self._row.lineage).parent_blocks

    @property
    def n_tokens(self) -> int:
        """The head, as it is on disk."""
        return self._row.n_tokens

    # -- the life of a step

    def read_ahead(self, blocks: Sequence[ReadBlock]) -> None:
        self._store.flush()
        rows = []
        for block in blocks:
            at = self._store.locate(block.ref)
            if at is None:  # the read is larger than the disk budget; what follows would leave a gap
                break
            rows.append(
                AheadRow(
                    self._row.id, block.number, block.start, len(block.ids),
                    at.segment, at.slot, at.generation, at.checksum, block.ids.astype("<i4").tobytes(),
                )
            )  # fmt: skip
        freed = self._catalog.write(lambda db: put_ahead(db, self._row.id, rows), "read_ahead")
        self._settle([row.location for row in rows], freed)

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
        self._store.flush()
        added = [
            AddedBlock(
                block.number, block.start, block.count, self._store.locate(block.ref), mean_xxh(mean),
                int(block.origin), None if block.text is None else storable(block.text), block.words,
            )
            for block, mean in zip(blocks, means, strict=True)
        ]  # fmt: skip
        start = self.n_tokens if rewrites is None else rewrites
        addition = Addition(start, ids, added, self._fact(step, start, len(ids)), time.time())
        heat = [Heat(number, *self._store.heat(ref), self._row.commits + 1) for number, ref in recalled]
        if rewrites is not None:
            self._rewrite(addition, heat)
            self._settle_rows(added, means, token_rows)
            self.holding.acknowledge(self._row)
            return
        if blocks:
            self._family.index.put(self._row.lineage, self._first_own, blocks[0].number, means)
            self._put_token_rows(blocks[0].number, token_rows, [(b.count, b.mean_xxh) for b in added])

        def run(db: Db) -> tuple[WorkspaceRow, list[Location]]:
            result = append(db, self._row.id, addition)
            put_heat(db, self._row.lineage, heat)
            return result

        self._row, freed = self._catalog.write(run, "row_commit")
        self._settle([block.at for block in added], freed)

    def truncate(
        self,
        n_tokens: int,
        tail: NewBlock | None = None,
        mean: F16 | None = None,
        token_row: U8 | None = None,
    ) -> None:
        cut: Tail | None = None
        if tail is not None and mean is not None:
            self._store.flush()
            cut = Tail(tail.start, tail.count, self._store.locate(tail.ref), mean_xxh(mean))

        def run(db: Db) -> tuple[WorkspaceRow, lineage.Freed, int, int]:
            before = workspace_row(db, self._row.id)
            before = replace(before, commits=before.commits + 1, used=time.time())
            row, freed = lineage.truncate(db, before, n_tokens, cut)
            first = lineage_row(db, row.lineage).parent_blocks
            n_blocks = n_blocks_before(db, row.lineage, n_tokens)
            return row, freed, first, n_blocks

        self._row, freed, self._first_own, n_blocks = self._catalog.write(run, "truncate")
        self._settle([] if cut is None else [cut.at], freed.records)
        # It is done; a row that is missing is made again, a file that is left is deleted by the next compact.
        with contextlib.suppress(StoreError):
            self._family.drop_files(lineages=freed.lineages)
            index = self._family.index
            index.cut(self._row.lineage, self._first_own, n_blocks)
            self._family.tokens.cut(self._row.lineage, self._first_own, n_blocks)
            if tail is not None and mean is not None:
                index.put(self._row.lineage, self._first_own, tail.number, mean[np.newaxis])
                row = None if token_row is None else token_row[np.newaxis]
                self._put_token_rows(tail.number, row, [(tail.count, mean_xxh(mean))])

    def fork(self, name: str) -> Holding:
        self._store.flush()
        forked = fork_workspace(self.holding, self._store, name)
        if self._token_shape is not None:
            with contextlib.suppress(StoreError):  # it is done; a row that is missing is made again
                self._copy_token_row(forked, self._token_shape)
        return forked

    # -- single facts

    def pin(self, pins: Sequence[tuple[int, int]]) -> None:
        self._catalog.write(lambda db: put_pins(db, self._row.id, pins), "pin")

    def recomputed(
        self, number: int, ref: RecordRef, mean: F16 | None = None, token_row: U8 | None = None
    ) -> bool:
        """See memory.journal.Journal.recomputed."""
        with self._catalog.snapshot() as db:
            row = find_block(db, self._row.lineage, number)
            first = 0 if row is None else lineage_row(db, row.lineage).parent_blocks
        try:
            self._store.flush()
        except StoreError:
            self._store.give_up(ref)  # else it would take room in RAM, of other workspaces, too
            raise
        new = self._store.locate(ref)
        if row is None or new is None or new == row.location:
            return True
        old = None if self._is_sound(row.location) else row.location  # a fork may have been faster
        xxh = row.mean_xxh if mean is None else mean_xxh(mean)
        kept, freed = self._catalog.write(
            lambda db: put_record(db, self._row.lineage, number, old=old, new=new, mean_xxh=xxh), "recomputed"
        )
        if kept != new:
            self._store.take(ref, kept)
        self._settle([kept], freed)
        if kept == new:
            with contextlib.suppress(StoreError):  # it is done; a row that is missing is made again
                if mean is not None:
                    self._family.index.put(row.lineage, first, number, mean[np.newaxis])
                if token_row is not None and self._token_shape is not None:
                    self._family.tokens.put(
                        self._token_shape,
                        row.lineage,
                        first,
                        number,
                        token_row[np.newaxis],
                        [(row.count, xxh)],
                    )
        return kept == new

    def fall(self, locations: Sequence[Location]) -> None:
        """The records at these places give way: only the tokens of their blocks are kept from now on. Any
        thread; the caller frees the slots afterwards."""
        self._catalog.write(lambda db: drop_records(db, locations), "fall")

    def close(self) -> None:
        self.holding.close()

    # -- private

    def _is_sound(self, at: Location | None) -> bool:
        """The record that the catalog names can be read."""
        if at is None:
            return False
        try:
            self._store.read(at)
        except StoreError:
            return False
        return True

    def _put_token_rows(self, number: int, rows: U8 | None, blocks: Sequence[tuple[int, bytes]]) -> None:
        """blocks: (tokens, checksum of Mean-K) of each, from block `number` on."""
        if rows is not None and self._token_shape is not None:
            shape, tokens = self._token_shape, self._family.tokens
            tokens.put(shape, self._row.lineage, self._first_own, number, rows, blocks)

    def _copy_token_row(self, forked: Holding, shape: TokenShape) -> None:
        """That of the partial last block, which a fork has a copy of."""
        with self._catalog.snapshot() as db:
            child = lineage_row(db, workspace_row(db, forked.place.workspace).lineage)
            old = find_block(db, self._row.lineage, child.parent_blocks)
            if old is None:
                return
            first = lineage_row(db, old.lineage).parent_blocks
        new = (child.id, child.parent_blocks)
        self._family.tokens.copy(shape, (old.lineage, first), new, child.parent_blocks)

    def _rewrite(self, addition: Addition, heat: Sequence[Heat]) -> None:
        """What came after the start of the addition gives way to it, in one transaction."""
        n, block = addition.start, self._family.binding.block_size
        # Its record is that of the first block added, which takes its place at once.
        cut = Tail(n - n % block, n % block, None, bytes(16)) if n % block else None

        def run(db: Db) -> tuple[WorkspaceRow, lineage.Freed, list[Location], int]:
            row, freed = lineage.truncate(db, workspace_row(db, self._row.id), n, cut)
            row, more = append(db, row.id, addition)
            put_heat(db, row.lineage, heat)
            first = lineage_row(db, row.lineage).parent_blocks
            return row, freed, more, first

        self._row, freed, more, self._first_own = self._catalog.write(run, "rewrite")
        kept = [block.at for block in addition.blocks if block.at is not None]
        self._store.settle(kept, freed.records + more)
        with contextlib.suppress(StoreError):  # what is left is deleted by the next compact
            self._family.drop_files(lineages=freed.lineages)

    def _settle_rows(self, added: Sequence[AddedBlock], means: F16, token_rows: U8 | None) -> None:
        """Rows of the indexes after a rewrite, before it is acknowledged: until then `verify` does not miss
        them. Not before it: those of the old history lie there."""
        with contextlib.suppress(StoreError):  # it is done; a row that is missing is made again
            index, tokens = self._family.index, self._family.tokens
            first = added[0].number if added else self._row.n_tokens // self._family.binding.block_size
            index.cut(self._row.lineage, self._first_own, first)
            tokens.cut(self._row.lineage, self._first_own, first)
            if added:
                index.put(self._row.lineage, self._first_own, first, means)
                self._put_token_rows(first, token_rows, [(b.count, b.mean_xxh) for b in added])

    def _fact(self, step: StepFacts | None, start: int, n_tokens: int) -> StepRow | None:
        if step is None or not n_tokens:
            return None
        return StepRow(
            0, 0, step.kind, start, start + n_tokens, step.query_start,
            storable(step.answer),
            int(step.closed), step.scorer, step.options, time.time(),
        )  # fmt: skip

    def _settle(self, kept: Sequence[Location | None], freed: Sequence[Location]) -> None:
        """A transaction is durable."""
        self._store.settle([at for at in kept if at is not None], freed)
        self.holding.acknowledge(self._row)
