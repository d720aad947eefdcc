"""One history: token ids, blocks, Mean-K index and the rows being written. What a step adds stays provisional
until `commit`; `rollback` restores the last commit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvmem_llama.engine.cells import Cells
from kvmem_llama.native.layout import I32
from kvmem_llama.store.records import BlockStore, Record, RecordRef

from .blocks import Block, BlockTable
from .canonical import floor_to, parts_of
from .index import MeanKIndex
from .orphans import Orphans
from .ports import RowSource
from .positions import TokenPos
from .tail import OpenTail


class History:
    """Tokens 0 .. n_tokens-1; the first `n_committed` are those of finished steps.

    The table and the index hold complete blocks as soon as their rows are final, and a partial last block
    after a commit. The record of a partial block is immutable: it is copied when tokens are added.
    """

    def __init__(self, store: BlockStore, index: MeanKIndex, block: int, record_nbytes: int) -> None:
        self.store = store
        self.index = index
        self.block = block
        self.table = BlockTable(block)
        self.orphans = Orphans(store)
        self.pins: list[tuple[int, int]] = []
        self.n_committed = 0
        self._record_nbytes = record_nbytes
        self._tokens = array("i")
        self._tail = OpenTail(block, record_nbytes)
        self._replaced: Block | None = None  # the committed partial block, once a longer one took its place

    # -- tokens

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

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

    def rows(self, start: int) -> Record:
        """The record, working or stored, of the block that starts at token `start`."""
        if start in self._tail:
            return self._tail.rows(start)
        block = self.table.at(start)
        assert block is not None, f"no rows of the block at token {start}"
        return self.store.get(block.ref)

    def ref(self, start: int) -> RecordRef | None:
        """The stored record of the complete block at token `start`; None while its rows may change."""
        block = self.table.at(start)
        return block.ref if block is not None and block.count == self.block else None

    # -- the life of a step

    def adopt(self, end: int) -> int:
        """Takes blocks that a cancelled step had read, as far as they hold the tokens before `end`
        -> number of tokens, from `n_committed` on, that need not be read."""
        first = self.table.n_complete * self.block
        for block in self.orphans.match(self.tokens(first, end), first, end):
            self._list(block, self.store.get(block.ref))
        return max(self.table.n_complete * self.block - self.n_committed, 0)

    def commit(self) -> None:
        """Everything read becomes the history; a partial last block gets a record of its own."""
        self.complete(self.n_tokens)
        start = self.table.n_complete * self.block
        if start in self._tail:
            self._put(start, self.n_tokens - start)
        if self._replaced is not None:
            self.store.free(self._replaced.ref)
            self._replaced = None
        if self.n_tokens != self.n_committed:
            self.orphans.clear()
        self.n_committed = self.n_tokens

    def rollback(self, keep_until: int) -> None:
        """Back to the last commit; complete blocks that end by token `keep_until` become orphans."""
        aligned = self.n_committed % self.block == 0
        kept = self.n_committed // self.block + (0 if aligned or self._replaced is not None else 1)
        run: list[tuple[Block, I32]] = []
        for block in self.table.truncate(kept):
            if block.count == self.block and block.end <= keep_until:
                run.append((block, self.tokens(block.start, block.end)))
            else:
                self.store.free(block.ref)
        self.index.truncate(kept)
        if self._replaced is not None:
            self._list(self._replaced, self.store.get(self._replaced.ref))
            self._replaced = None
        self.orphans.put(run)
        self._tail.drop_from(0)
        del self._tokens[self.n_committed :]

    def cut(self, n_tokens: int) -> None:
        """Drops the tokens from position `n_tokens` on. The rows left of a cut block are opened again, and
        its mean is computed from them when it is put back: nothing is ever subtracted."""
        start = floor_to(self.block, n_tokens)
        block = self.table.at(start)
        if start < n_tokens and start not in self._tail and block is not None:
            self._tail.open(start, copy_of=self.store.get(block.ref))
        for gone in self.table.truncate(start // self.block):
            self.store.free(gone.ref)
        self.index.truncate(len(self.table))
        self._tail.drop_from(n_tokens)
        del self._tokens[n_tokens:]

    def truncate(self, n_tokens: int) -> None:
        """Drops committed tokens. No step may be running."""
        self.cut(n_tokens)
        self.pins = [(start, min(end, n_tokens)) for start, end in self.pins if start < n_tokens]
        self.orphans.clear()
        self.commit()

    def fork(self) -> History:
        """A history with the same committed tokens: full blocks are shared, the partial one is copied."""
        other = History(self.store, self.index.fork(), self.block, self._record_nbytes)
        other._tokens = self._tokens[:]
        other.n_committed = self.n_committed
        other.pins = list(self.pins)
        other.table = self.table.fork()
        for block in other.table:
            if block.count == self.block:
                self.store.share(block.ref)
            else:
                ref = self.store.put(self.store.get(block.ref).copy())
                other.table.replace_last(Block(block.start, block.count, ref))
        return other

    def close(self) -> None:
        """Frees every record."""
        self.orphans.clear()
        for block in self.table.truncate(0):
            self.store.free(block.ref)
        self.index.truncate(0)
        self._tail.drop_from(0)

    # -- private

    def _open(self, start: int) -> None:
        if start in self._tail:
            return
        block = self.table.at(start)
        assert block is None or block.count < self.block, f"rows of the complete block at {start} are final"
        self._tail.open(start, copy_of=None if block is None else self.store.get(block.ref))

    def _put(self, start: int, count: int) -> None:
        record = self._tail.take(start)
        self._list(Block(TokenPos(start), count, self.store.put(record)), record)

    def _list(self, block: Block, record: Record) -> None:
        """The one place where a block enters the table and its mean enters the index."""
        last = self.table.at(block.start)
        if last is None:
            self.table.append(block)
            self.index.append(record, block.count)
        else:
            self._replaced = last
            self.table.replace_last(block)
            self.index.replace_last(record, block.count)
