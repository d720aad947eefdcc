"""One history: token ids, blocks, indexes and the rows being written. What a step adds stays provisional
until `commit`; `rollback` restores the last commit."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvmem_llama.engine.cells import Cells
from kvmem_llama.errors import RecordDamaged, StoreError, WorkspaceError
from kvmem_llama.native.layout import I32, U8
from kvmem_llama.store.location import Origin
from kvmem_llama.store.records import BlockStore, NotStored, Record, RecordRef
from kvmem_llama.store.steps import Restored, StepFacts

from .blocks import Block, BlockTable
from .canonical import floor_to, parts_of
from .indexes import Indexes
from .ledger import Ledger
from .orphans import Orphans
from .past_steps import PastSteps
from .ports import RowSource
from .positions import TokenPos
from .tail import OpenTail
from .texts import BlockTexts


class History:
    """Tokens 0 .. n_tokens-1; the first `n_committed` are those of finished steps.

    The table and the indexes hold complete blocks as soon as their rows are final, and a partial last block
    after a commit. The record of a partial block is immutable: it is copied when tokens are added.
    """

    def __init__(
        self,
        store: BlockStore,
        indexes: Indexes,
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
        self.indexes = indexes
        self.texts = texts
        self.block = block
        self.table = BlockTable(block)
        self.orphans = Orphans(store)
        self.pins: list[tuple[int, int]] = []
        self._orphans_pins: list[tuple[int, int]] = []  # the pins there were when the orphans were read
        self.steps = PastSteps()
        self.n_committed = 0
        self._record_nbytes = record_nbytes
        self._n_sink = n_sink
        self._no_rows = no_rows
        self._tokens = array("i")
        self._tail = OpenTail(block, record_nbytes)
        # The committed partial block and its record, once a longer one took its place.
        self._replaced: tuple[Block, Record] | None = None
        self._last: Record | None = None  # of the committed partial block, once it was opened
        self._carried: set[int] = set()  # first tokens of open blocks that hold rows of another history
        # The next commit takes the place of what the journal knows after this many tokens. See `draft`.
        self._rewrites: int | None = None
        self.recomputed: dict[int, Record] = {}  # by first token; of blocks that are about to be used
        self.unscored: list[int] = []  # blocks without a Mean-K, until they are computed again

    def restore(self, restored: Restored) -> None:
        """An empty history becomes the one that was stored. No record is read."""
        self.extend(restored.tokens)
        for block in restored.blocks:
            self.table.append(Block(TokenPos(block.start), block.count, block.ref, block.origin))
        self._restore_indexes(restored)
        self.n_committed = self.n_tokens
        self.steps = PastSteps.restored(restored.steps)
        self.pins = list(restored.pins)
        self.store.pin(list(self._wanted()))
        ahead = [
            (Block(TokenPos(block.start), len(block.ids), block.ref), block.ids) for block in restored.ahead
        ]
        self._orphans_pins = list(self.pins)
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

    def carry(self, start: int, count: int, fill: Callable[[Record], None]) -> None:
        """The tokens start .. start+count-1, all in one block, get rows that were computed elsewhere, final
        at once. fill: writes them into the block's working record."""
        first = floor_to(self.block, start)
        self._open(first)
        fill(self._tail.rows(first))
        self._carried.add(first)
        self.complete(start + count)

    def is_carried(self, start: int) -> bool:
        """Rows of the block at token `start` were taken over from another history."""
        block = self.table.at(start)
        return start in self._carried or (block is not None and block.origin == Origin.CARRIED)

    def complete(self, end: int) -> None:
        """The rows of all tokens before `end` are final: complete blocks go to the store and the indexes."""
        for start in range(self.table.n_complete * self.block, floor_to(self.block, end), self.block):
            self._put(start, self.block)

    def read(self, end: int) -> None:
        """The tokens before `end` are read: as `complete`; a long read is made durable on the way."""
        self.complete(end)
        if self.ledger is not None and self._rewrites is None:
            first = self.n_committed // self.block
            self.texts.prepare(self.tokens, first, self.table.n_complete)
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
        -> number of tokens, from `n_committed` on, that need not be read. None, if the pins have changed
        since: what was read attended to other blocks."""
        first = self.table.n_complete * self.block
        is_same = self.pins == self._orphans_pins
        found = self.orphans.match(self.tokens(first, end), first, end) if is_same else []
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
            if self._rewrites is not None and self._rewrites % self.block and self._replaced is None:
                first = self._n_kept - 1  # the journal knows it only as part of a longer one
                last = self.table[first]
                self.ledger.listed(last, self.rows(last.start))
            rows, words = self._token_rows(first), self.texts.make(self.tokens, first, self.n_complete)
            ids, added = self.tokens(self.n_committed), self._since(first)
            self.ledger.commit(ids, added, step, rows, words, rewrites=self._rewrites)
            self.texts.kept()
        self._rewrites = None
        if self._replaced is not None:
            self.store.free(self._replaced[0].ref)
            self._replaced = None
        self.recomputed.clear()
        self._carried.clear()
        if self.n_tokens != self.n_committed:
            self.orphans.clear()
            self.steps.add(self.n_tokens, "{}" if step is None else step.options)
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
        self.indexes.truncate(kept)
        self.texts.drop_from(self.n_committed // self.block)
        if self._replaced is not None:
            self._list(*self._replaced)
            self._replaced = None
        if run and self.pins != self._orphans_pins:
            self.orphans.clear()
            self._orphans_pins = list(self.pins)
        self.orphans.put(run)
        self.recomputed.clear()
        self._tail.drop_from(0)
        self._carried.clear()
        self._last = None
        del self._tokens[self.n_committed :]
        if self.ledger is not None:
            try:
                with contextlib.suppress(WorkspaceError):  # then they are read again after a restart
                    if self._rewrites is None:
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
        self.indexes.truncate(len(self.table))
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
            self.indexes.truncate(len(self.table))
            self.texts.drop_from(n_tokens // self.block)
            self.unscored = [number for number in self.unscored if number < len(self.table)]
            if tail is not None and record is not None:
                self.table.append(tail)
                self.store.pin([tail.ref])
                self.indexes.append(record, tail.count)
            del self._tokens[n_tokens:]
            self.steps.truncate(n_tokens)
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

    def recompute(self, start: int, record: Record) -> None:
        """The rows of the block at token `start` were lost, and are computed again: until they have been used
        they are in `recomputed`. Index rows that are still there stay: what is found must not depend on which
        blocks fell when. Those that are missing are made of the new rows."""
        block = self.table.at(start)
        assert block is not None
        number = start // self.block
        self.recomputed[start] = record
        missing = self.indexes.missing(number, unscored=number in self.unscored)
        is_stored = False
        with contextlib.suppress(StoreError):  # it is used now, and computed again when it is wanted again
            self.store.restore(block.ref, record)  # which rounds it: rows are made of what is kept
            is_stored = True
        for index in missing:
            index.replace(number, record, block.count)
        if number in self.unscored:
            self.unscored.remove(number)
        if not is_stored:
            return
        with contextlib.suppress(StoreError):
            # It knows of no others; of a draft, not the one that was cut.
            is_known = block.end <= self.n_committed and (self._rewrites is None or block.count == self.block)
            if self.ledger is not None and is_known:
                mean_k, tokens = self.indexes.mean_k in missing, self.indexes.tokens in missing
                if not self.ledger.recomputed(block, record, mean_k=mean_k, tokens=tokens):
                    record = self.recomputed[start] = self.store.get(block.ref)
                    for index in missing:
                        index.replace(number, record, block.count)

    def take_rows(self, other: History) -> None:
        """Index rows that this history lacks, of blocks that it shares with another one where they were
        computed again."""
        n = 0
        for mine, theirs in zip(self.table, other.table, strict=False):
            if mine.ref != theirs.ref:
                break
            n += 1
        for index, source in zip(self.indexes, other.indexes, strict=True):
            for number in np.flatnonzero((index.counts[:n] == 0) & (source.counts[:n] > 0)).tolist():
                index.take(source, number)
        if self.indexes.mean_k is not None and other.indexes.mean_k is not None:
            for number in [i for i in self.unscored if i < n and i not in other.unscored]:
                self.indexes.mean_k.take(other.indexes.mean_k, number)
                self.unscored.remove(number)

    @property
    def n_without_rows(self) -> int:
        """Blocks that the token index has no row of: their records were lost before it was made. They are not
        found by it until they are computed again."""
        index = self.indexes.tokens
        return 0 if index is None else int((index.counts == 0).sum())

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
        return self._copy(self.n_committed, None)

    def draft(self, n_tokens: int) -> History:
        """A history of the first `n_tokens` committed tokens, whose first commit takes the place of this
        history, in one transaction where it is durable. Until then nothing is written, and this one stays as
        it is; it must not be changed in between. Close the one that is not needed any more."""
        other = self._copy(n_tokens, self.ledger)
        other._rewrites = n_tokens
        return other

    def close(self) -> None:
        """Frees every record."""
        self.orphans.clear()
        for block in self.table.truncate(0):
            self.store.free(block.ref)
        self.indexes.truncate(0)
        self.texts.close()
        self._tail.drop_from(0)

    # -- private

    def _copy(self, n_tokens: int, ledger: Ledger | None) -> History:
        """The first `n_tokens` committed tokens, their complete blocks shared."""
        n_blocks, count = divmod(n_tokens, self.block)
        tail, record = self._cut_block(n_blocks * self.block, count) if count else (None, None)
        other = History(
            self.store,
            self.indexes.fork(),
            self.texts.fork(),
            self.block,
            self._record_nbytes,
            ledger,
            n_sink=self._n_sink,
            no_rows=self._no_rows,
        )
        other._tokens = self._tokens[:n_tokens]
        other.n_committed = n_tokens
        other.pins = [(start, min(end, n_tokens)) for start, end in self.pins if start < n_tokens]
        other.steps = self.steps.fork()
        other.steps.truncate(n_tokens)
        other.unscored = [number for number in self.unscored if number < n_blocks]
        other.table = self.table.fork()
        other.table.truncate(n_blocks)
        other.indexes.truncate(n_blocks)
        other.texts.drop_from(n_blocks)
        for block in other.table:
            self.store.share(block.ref)
        if tail is not None and record is not None:
            other.table.append(tail)
            self.store.pin([tail.ref])
            other.indexes.append(record, tail.count)
        return other

    def _restore_indexes(self, restored: Restored) -> None:
        if self.indexes.mean_k is not None:
            self.indexes.mean_k.restore(restored.chunks, restored.counts)
            self.unscored = list(restored.unscored)
        if self.indexes.tokens is not None:
            counts = restored.counts.copy()
            counts[restored.tokens_missing] = 0
            self.indexes.tokens.restore(restored.token_chunks, counts)

    def _token_rows(self, first: int) -> U8 | None:
        """Rows of the token index from block `first` on: [n, bytes of a row]; None without one."""
        index = self.indexes.tokens
        if index is None or first == len(index):
            return None
        return np.stack([index.row(number) for number in range(first, len(index))])

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
            return Block(TokenPos(start), count, self._no_rows(), old.origin), no_rows
        return Block(TokenPos(start), count, self.store.put(record), old.origin), record

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
        origin = Origin.CARRIED if self.is_carried(start) else Origin.READ
        self._carried.discard(start)
        try:
            self._list(Block(TokenPos(start), count, ref, origin), record)
        except BaseException:
            self.store.free(ref)
            raise

    def _list(self, block: Block, record: Record) -> None:
        """The one place where a new block enters the table, and its rows enter the indexes."""
        if self._is_wanted(block):
            self.store.pin([block.ref])
        last = self.table.at(block.start)
        if last is None:
            self.table.append(block)
            self.indexes.append(record, block.count)
        else:
            self._replaced = (last, self.rows(last.start) if self._last is None else self._last)
            self._last = None
            self.table.replace_last(block)
            self.indexes.replace_last(record, block.count)
            self.recomputed.pop(block.start, None)  # those of the block that was there
        if self.ledger is not None:
            self.ledger.listed(block, record)
