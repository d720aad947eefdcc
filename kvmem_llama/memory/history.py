"""One history: token ids, blocks, Mean-K index and the rows being written. What a step adds stays provisional
until `commit`; `rollback` restores the last commit."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvmem_llama.engine.cells import Cells
from kvmem_llama.errors import RecordDamaged, WorkspaceError
from kvmem_llama.native.layout import I32
from kvmem_llama.store.records import BlockStore, NotStored, Record, RecordRef
from kvmem_llama.store.steps import Restored, StepFacts

from .blocks import Block, BlockTable
from .canonical import floor_to, parts_of
from .index import MeanKIndex
from .ledger import Ledger
from .orphans import Orphans
from .ports import RowSource
from .positions import TokenPos
from .tail import OpenTail
from .texts import BlockTexts


class History:
    """Tokens 0 .. n_tokens-1; the first `n_committed` are those of finished steps.

    The table and the index hold complete blocks as soon as their rows are final, and a partial last block
    after a commit. The record of a partial block is immutable: it is copied when tokens are added.
    """

    def __init__(
        self,
        store: BlockStore,
        index: MeanKIndex,
        texts: BlockTexts,
        block: int,
        record_nbytes: int,
        ledger: Ledger | None = None,
        *,
        n_sink: int = 0,
        no_rows: Callable[[], RecordRef] | None = None,
    ) -> None:
        """ledger: of a durable history; whoever makes it closes its journal. n_sink: tokens of the sink.
        no_rows: names a new record of the store in the tokens tier; None: the store has none."""
        self.store = store
        self.ledger = ledger
        self.index = index
        self.texts = texts
        self.block = block
        self.table = BlockTable(block)
        self.orphans = Orphans(store)
        self.pins: list[tuple[int, int]] = []
        self.n_committed = 0
        self._record_nbytes = record_nbytes
        self._n_sink = n_sink
        self._no_rows = no_rows
        self._tokens = array("i")
        self._tail = OpenTail(block, record_nbytes)
        # The committed partial block and its record, once a longer one took its place.
        self._replaced: tuple[Block, Record] | None = None
        self._last: Record | None = None  # of the committed partial block, once it was opened
        self.recomputed: dict[int, Record] = {}  # by first token; of blocks that are about to be used
        self.unscored: list[int] = []  # blocks without a row of the index, until they are computed again

    def restore(self, restored: Restored) -> None:
        """An empty history becomes the one that was stored. No record is read."""
        self.extend(restored.tokens)
        for block in restored.blocks:
            self.table.append(Block(TokenPos(block.start), block.count, block.ref))
        self.index.restore(restored.chunks, restored.counts)
        self.unscored = list(restored.unscored)
        self.n_committed = self.n_tokens
        self.pins = list(restored.pins)
        self.store.pin(list(self._wanted()))
        ahead = [
            (Block(TokenPos(block.start), len(block.ids), block.ref), block.ids) for block in restored.ahead
        ]
        self.orphans.put(ahead)
        if self.ledger is not None:
            self.ledger.restored(restored.ahead)

    # -- tokens

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

    @property
    def n_complete(self) -> int:
        """Complete blocks."""
        return self.table.n_complete

    def extend(self, tokens: I32 | Sequence[int]) -> None:
        """Appends token ids; their rows come later."""
        self._tokens.frombytes(np.asarray(tokens, dtype=np.int32).tobytes())

    def tokens(self, start: int = 0, end: int | None = None) -> I32:
        """Token ids of positions start .. end-1, a copy."""
        return np.array(self._tokens[start:end], dtype=np.int32)

    # -- rows and blocks

    def stage(self, hooks: RowSource, start: int, rows: I32, cells: Cells) -> None:
        """Keeps the rows just captured for the tokens from `start` on; final or provisional."""
        for part in parts_of(self.block, start, start + len(rows)):
            self._open(floor_to(self.block, part.start))
        self._tail.stage(hooks, start, rows, cells)

    def complete(self, end: int) -> None:
        """The rows of all tokens before `end` are final: complete blocks go to the store and the index."""
        for start in range(self.table.n_complete * self.block, floor_to(self.block, end), self.block):
            self._put(start, self.block)

    def read(self, end: int) -> None:
        """The tokens before `end` are read: as `complete`; a long read is made durable on the way."""
        self.complete(end)
        if self.ledger is not None:
            first = self.n_committed // self.block
            self.ledger.read(self.table.n_complete - first, lambda n: self._since(first + n, complete=True))

    def rows(self, start: int) -> Record:
        """The record, working or stored, of the block that starts at token `start`."""
        if start in self._tail:
            return self._tail.rows(start)
        if start in self.recomputed:
            return self.recomputed[start]
        block = self.table.at(start)
        assert block is not None, f"no rows of the block at token {start}"
        return self.store.get(block.ref)

    def fetch(self, starts: Sequence[int]) -> Iterator[list[tuple[int, Record]]]:
        """The records of blocks, named by their first token, as batches of (index in `starts`, record). A
        batch is valid until the next one is asked for. Raises what BlockStore.fetch raises."""
        here = [(i, self.rows(start)) for i, start in enumerate(starts) if self._has_rows(start)]
        others = [i for i, start in enumerate(starts) if not self._has_rows(start)]
        blocks = [self.table.at(starts[i]) for i in others]
        for batch in self.store.fetch([block.ref for block in blocks if block is not None]):
            yield [*here, *((others[i], record) for i, record in batch)]
            here = []
        if here:
            yield here

    def ref(self, start: int) -> RecordRef | None:
        """The stored record of the complete block at token `start`; None while its rows may change."""
        block = self.table.at(start)
        return block.ref if block is not None and block.count == self.block else None

    # -- the life of a step

    def adopt(self, end: int) -> int:
        """Takes blocks that a cancelled step had read, as far as they hold the tokens before `end`
        -> number of tokens, from `n_committed` on, that need not be read."""
        first = self.table.n_complete * self.block
        found = self.orphans.match(self.tokens(first, end), first, end)
        while found:
            try:
                self._list(found[0], self.store.get(found[0].ref))
            except (NotStored, RecordDamaged):  # they are read again
                break
            del found[0]
        for block in found:
            self.store.free(block.ref)
        return max(self.table.n_complete * self.block - self.n_committed, 0)

    def commit(self, step: StepFacts | None = None) -> None:
        """Everything read becomes the history; a partial last block gets a record of its own.

        step: what is remembered of it. Raises StoreError if a durable history cannot be written; the step
        must be rolled back then.
        """
        self.complete(self.n_tokens)
        start = self.table.n_complete * self.block
        if start in self._tail:
            self._put(start, self.n_tokens - start)
        if self.ledger is not None:
            first = self._n_kept
            self.ledger.commit(self.tokens(self.n_committed), self._since(first), step)
        if self._replaced is not None:
            self.store.free(self._replaced[0].ref)
            self._replaced = None
        self.recomputed.clear()
        if self.n_tokens != self.n_committed:
            self.orphans.clear()
        self.n_committed = self.n_tokens

    def rollback(self, keep_until: int) -> None:
        """Back to the last commit; complete blocks that end by token `keep_until` become orphans, and durable
        where the history is."""
        kept = self._n_kept
        run: list[tuple[Block, I32]] = []
        for block in self.table.truncate(kept):
            if block.count == self.block and block.end <= keep_until:
                run.append((block, self.tokens(block.start, block.end)))
            else:
                self.store.free(block.ref)
        self.index.truncate(kept)
        self.texts.drop_from(self.n_committed // self.block)
        if self._replaced is not None:
            self._list(*self._replaced)
            self._replaced = None
        self.orphans.put(run)
        self.recomputed.clear()
        self._tail.drop_from(0)
        self._last = None
        del self._tokens[self.n_committed :]
        if self.ledger is not None:
            try:
                with contextlib.suppress(WorkspaceError):  # then they are read again after a restart
                    self.ledger.read(len(run), lambda n: iter(run[n:]), is_end=True)
            finally:
                self.ledger.forget()
                self.orphans.drop_stuck()

    def cut(self, n_tokens: int) -> None:
        """Drops the tokens from position `n_tokens` on, of a step that goes on. The rows left of a cut block
        are opened again, and its mean is computed from them when it is put back: nothing is ever subtracted.

        Raises RecordDamaged if they are lost.
        """
        start = floor_to(self.block, n_tokens)
        block = self.table.at(start)
        if start < n_tokens and start not in self._tail and block is not None:
            try:
                self._tail.open(start, copy_of=self.store.get(block.ref))
            except (NotStored, RecordDamaged) as error:
                hint = "The step was undone. Ask again, with a larger --disk-budget."
                raise RecordDamaged(
                    f"the tokens {start}..{block.end}", "its rows are lost", hint=hint
                ) from error
        for gone in self.table.truncate(start // self.block):
            if self.ledger is not None:
                self.ledger.unlisted(gone)
            self.store.free(gone.ref)
        self.index.truncate(len(self.table))
        self.texts.drop_from(n_tokens // self.block)
        self._tail.drop_from(n_tokens)
        del self._tokens[n_tokens:]

    def truncate(self, n_tokens: int) -> None:
        """Drops committed tokens. No step may be running. Where the rows of the block that is cut are lost,
        those of its remaining tokens are computed again by the next step.

        Raises StoreError if a durable history cannot be written; then nothing has changed.
        """
        if n_tokens < self.n_committed:
            start = floor_to(self.block, n_tokens)
            tail, record = self._cut_block(start, n_tokens - start) if start < n_tokens else (None, None)
            if self.ledger is not None:
                try:
                    self.ledger.truncate(n_tokens, tail, record)
                except BaseException:
                    if tail is not None:
                        self.store.free(tail.ref)
                    raise
            for gone in self.table.truncate(start // self.block):
                self.store.free(gone.ref)
            self.index.truncate(len(self.table))
            self.texts.drop_from(n_tokens // self.block)
            self.unscored = [number for number in self.unscored if number < len(self.table)]
            if tail is not None and record is not None:
                self.table.append(tail)
                self.store.pin([tail.ref])
                self.index.append(record, tail.count)
            del self._tokens[n_tokens:]
            self.n_committed = n_tokens
        self.pins = [(start, min(end, n_tokens)) for start, end in self.pins if start < n_tokens]
        self.orphans.clear()

    def pin(self, pins: list[tuple[int, int]]) -> None:
        """The pins are these token ranges [start, end) from now on. Raises StoreError; then nothing has
        changed."""
        if self.ledger is not None:
            self.ledger.journal.pin(pins)
        before = set(self._refs_of(self.pins))
        self.pins = pins
        after = self._wanted()
        self.store.pin(list(before - after), False)
        self.store.pin(list(after))

    # -- records that are used

    def lost(self, starts: Iterable[int]) -> list[int]:
        """Those of the blocks, named by their first token, whose rows can only be computed again."""
        blocks = [self.table.at(start) for start in starts if not self._has_rows(start)]
        return [block.start for block in blocks if block and self.store.where(block.ref) == "tokens"]

    def starts_of(self, refs: Iterable[object]) -> list[int]:
        """First tokens of the blocks with these records."""
        wanted = set(refs)
        return [block.start for block in self.table if block.ref in wanted]

    def recalled(self, numbers: Iterable[int]) -> None:
        """A recall has selected these blocks: they are about to be used."""
        refs = {number: self.table[number].ref for number in numbers}
        self.store.retrieved(list(refs.values()))
        self.store.prefetch(list(refs.values()))
        if self.ledger is not None:
            self.ledger.recalled(refs.items())

    def fork(self) -> History:
        """A history with the same committed tokens: full blocks are shared, the partial one is copied. It
        ends with the process."""
        other = History(
            self.store,
            self.index.fork(),
            self.texts.fork(),
            self.block,
            self._record_nbytes,
            n_sink=self._n_sink,
            no_rows=self._no_rows,
        )
        other._tokens = self._tokens[:]
        other.n_committed = self.n_committed
        other.pins = list(self.pins)
        other.table = self.table.fork()
        for block in other.table:
            if block.count == self.block:
                self.store.share(block.ref)
            else:
                ref = self.store.put(self.store.get(block.ref).copy())
                self.store.pin([ref])
                other.table.replace_last(Block(block.start, block.count, ref))
        return other

    def close(self) -> None:
        """Frees every record."""
        self.orphans.clear()
        for block in self.table.truncate(0):
            self.store.free(block.ref)
        self.index.truncate(0)
        self.texts.close()
        self._tail.drop_from(0)

    # -- private

    @property
    def _n_kept(self) -> int:
        """Blocks of the last commit that are still in the table."""
        aligned = self.n_committed % self.block == 0
        return self.n_committed // self.block + (0 if aligned or self._replaced is not None else 1)

    def _since(self, first: int, *, complete: bool = False) -> Iterator[tuple[Block, I32]]:
        """Blocks from number `first` on, with their token ids."""
        for number in range(first, self.table.n_complete if complete else len(self.table)):
            block = self.table[number]
            yield block, self.tokens(block.start, block.end)

    def _refs_of(self, ranges: Iterable[tuple[int, int]]) -> list[RecordRef]:
        """Records of the blocks that hold tokens of the ranges."""
        return [
            block.ref
            for start, end in ranges
            for at in range(floor_to(self.block, start), end, self.block)
            if (block := self.table.at(at)) is not None
        ]

    def _wanted(self) -> set[RecordRef]:
        """Records of the blocks that every step needs: they must not fall to the tokens tier."""
        last = (self.table.n_complete * self.block, self.table.n_tokens)
        return set(self._refs_of([(0, self._n_sink), *self.pins, last]))

    def _is_wanted(self, block: Block) -> bool:
        is_fixed = any(
            start < block.end and block.start < end for start, end in [(0, self._n_sink), *self.pins]
        )
        return is_fixed or block.count < self.block

    def _has_rows(self, start: int) -> bool:
        return start in self._tail or start in self.recomputed

    def _cut_block(self, start: int, count: int) -> tuple[Block, Record]:
        """A block of the first `count` rows of the one at token `start`, and its record."""
        old = self.table.at(start)
        assert old is not None
        try:
            record = self.store.get(old.ref).copy()
        except (NotStored, RecordDamaged):
            if self._no_rows is None:
                raise
            # Its mean is not right, either; but a partial block is never a candidate.
            no_rows = np.zeros(self._record_nbytes, np.uint8)
            return Block(TokenPos(start), count, self._no_rows()), no_rows
        return Block(TokenPos(start), count, self.store.put(record)), record

    def _open(self, start: int) -> None:
        if start in self._tail:
            return
        block = self.table.at(start)
        assert block is None or block.count < self.block, f"rows of the complete block at {start} are final"
        if block is not None:
            self._last = self.rows(start)
        self._tail.open(start, copy_of=None if block is None else self._last)

    def _put(self, start: int, count: int) -> None:
        record = self._tail.take(start)
        ref = self.store.put(record)
        try:
            self._list(Block(TokenPos(start), count, ref), record)
        except BaseException:
            self.store.free(ref)
            raise

    def _list(self, block: Block, record: Record) -> None:
        """The one place where a new block enters the table and its mean enters the index."""
        if self._is_wanted(block):
            self.store.pin([block.ref])
        last = self.table.at(block.start)
        if last is None:
            self.table.append(block)
            self.index.append(record, block.count)
        else:
            self._replaced = (last, self.rows(last.start) if self._last is None else self._last)
            self._last = None
            self.table.replace_last(block)
            self.index.replace_last(record, block.count)
            self.recomputed.pop(block.start, None)  # those of the block that was there
        if self.ledger is not None:
            self.ledger.listed(block, record)
