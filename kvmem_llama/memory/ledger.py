"""What a history has to tell its journal: blocks since the last commit, their Mean-K, their text, recalls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from kvmem_llama.native.layout import I32, U8
from kvmem_llama.store.records import Record, RecordRef
from kvmem_llama.store.steps import MeanOf, NewBlock, ReadBlock, RowOf, StepFacts
from kvmem_llama.store.words import BlockWords

from .blocks import Block
from .index import F16
from .journal import Journal

TextOf = Callable[[I32], str]


class Ledger:
    """Of one durable history. Owner thread only. What it raises, the journal raised."""

    def __init__(
        self,
        journal: Journal,
        mean_of: MeanOf,
        text_of: TextOf,
        *,
        block: int,
        read_blocks: int,
        token_row_of: RowOf | None = None,
    ) -> None:
        """block: its size in tokens. read_blocks: complete blocks after which an unfinished read is told.
        token_row_of: makes rows of the token index; None: there is none."""
        self.journal: Final = journal
        self._mean_of: Final = mean_of
        self._text_of: Final = text_of
        self._token_row_of: Final = token_row_of
        self._block: Final = block
        self._read_blocks: Final = read_blocks
        self._means: dict[RecordRef, F16] = {}  # of blocks that are not committed
        self._recalled: dict[int, RecordRef] = {}
        self._ahead: list[RecordRef] = []  # what the journal knows of an unfinished read
        self._n_agreed = 0  # the first of these that are known to be blocks of this step

    def restored(self, ahead: Iterable[ReadBlock]) -> None:
        """The journal knows these blocks after the head."""
        self._ahead = [block.ref for block in ahead]

    def listed(self, block: Block, record: Record) -> None:
        """A block has entered the table."""
        self._means[block.ref] = self._mean_of(record, block.count)

    def recalled(self, blocks: Iterable[tuple[int, RecordRef]]) -> None:
        """A recall has selected these blocks (number, record)."""
        self._recalled.update(blocks)

    def unlisted(self, block: Block) -> None:
        """A block has left the table again."""
        self._means.pop(block.ref, None)
        self._recalled.pop(block.start // self._block, None)

    def read(
        self, n: int, blocks: Callable[[int], Iterable[tuple[Block, I32]]], *, is_end: bool = False
    ) -> None:
        """A step that is not finished has read `n` complete blocks after the head.

        blocks: makes those from the given one on, with their token ids; called if there are enough new ones.
        is_end: nothing follows, one new block is enough.
        """
        if n - self._n_agreed < (1 if is_end else self._read_blocks):
            return
        run = self._read(blocks(self._n_agreed))
        refs, known = [block.ref for block in run], self._ahead[self._n_agreed :]
        n_same = min(len(refs), len(known))
        if refs[:n_same] != known[:n_same]:  # blocks that take the place of others are told from the first on
            run, self._ahead = self._read(blocks(0)), []
            n_same = 0
        if n_same < len(run):
            self.journal.read_ahead(run[n_same:])
            self._ahead += [block.ref for block in run[n_same:]]
        self._n_agreed = n

    def commit(
        self,
        ids: I32,
        blocks: Iterable[tuple[Block, I32]],
        step: StepFacts | None,
        token_rows: U8 | None = None,
        words: Sequence[BlockWords] = (),
        *,
        rewrites: int | None = None,
    ) -> None:
        """A step is finished. ids: its tokens. blocks: those since the last commit, with their token ids.
        token_rows: their rows of the token index, if there is one. words: of the complete ones among them.
        rewrites: all of it takes the place of what came after this many tokens."""
        words_of_next = iter(words)
        added = [
            NewBlock(
                block.start // self._block, block.start, block.count, block.ref, block.origin,
                text=self._text_of(tokens) if block.count == self._block else None,
                words=next(words_of_next, None) if block.count == self._block else None,
            )
            for block, tokens in blocks
        ]  # fmt: skip
        means = [self._means[block.ref] for block in added]
        rows = np.stack(means) if means else np.zeros((0, 0), np.float16)
        recalled = list(self._recalled.items())
        self.journal.commit(ids, added, rows, step, recalled, token_rows, rewrites=rewrites)
        self.forget()
        self._ahead = []

    def truncate(self, n_tokens: int, tail: Block | None, record: Record | None) -> None:
        """Only the first `n_tokens` tokens stay. tail, record: the partial last block with its new record."""
        if tail is None or record is None:
            self.journal.truncate(n_tokens)
        else:
            block = NewBlock(tail.start // self._block, tail.start, tail.count, tail.ref)
            mean = self._mean_of(record, tail.count)
            self.journal.truncate(n_tokens, block, mean, self._token_row(record, tail.count))
        self.forget()
        self._ahead = []

    def recomputed(self, block: Block, record: Record, *, mean_k: bool, tokens: bool) -> bool:
        """The record of a committed block was lost, and has been computed again under the same reference.
        mean_k, tokens: its row of that index was lost, too. -> see Journal.recomputed"""
        mean = self._mean_of(record, block.count) if mean_k else None
        row = self._token_row(record, block.count) if tokens else None
        return self.journal.recomputed(block.start // self._block, block.ref, mean, row)

    def forget(self) -> None:
        """What came after the last commit is part of it, or gone."""
        self._means.clear()
        self._recalled.clear()
        self._n_agreed = 0

    def _token_row(self, record: Record, count: int) -> U8 | None:
        return None if self._token_row_of is None else self._token_row_of(record, count)

    def _read(self, blocks: Iterable[tuple[Block, I32]]) -> list[ReadBlock]:
        return [ReadBlock(block.start // self._block, block.start, block.ref, ids) for block, ids in blocks]
