"""Blocks of one history and the table that lists them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvmem_llama.store.location import Origin
from kvmem_llama.store.records import RecordRef

from .positions import TokenPos


@dataclass(frozen=True, slots=True)
class Block:
    """`count` consecutive tokens of one history from `start` on, and the record that holds their rows."""

    start: TokenPos
    count: int
    ref: RecordRef
    origin: Origin = Origin.READ  # how its rows came to be; CARRIED if only some of them were

    @property
    def end(self) -> TokenPos:
        return TokenPos(self.start + self.count)


class BlockTable:
    """The blocks of one history in order, without gaps; only the last may hold fewer than `block` tokens.

    Block number b of the table is row b of the Mean-K index.
    """

    def __init__(self, block: int, blocks: list[Block] | None = None) -> None:
        self.block = block
        self._blocks = blocks if blocks is not None else []

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> Block:
        if not 0 <= number < len(self._blocks):
            raise IndexError(f"no block {number} among {len(self._blocks)}")
        return self._blocks[number]

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    @property
    def n_tokens(self) -> int:
        return self._blocks[-1].end if self._blocks else 0

    @property
    def n_complete(self) -> int:
        """Blocks that hold `block` tokens; these are the first ones."""
        n = len(self._blocks)
        return n - 1 if n and self._blocks[-1].count < self.block else n

    def at(self, start: int) -> Block | None:
        """The block that starts at token `start`; None if there is none."""
        number, rest = divmod(start, self.block)
        return self._blocks[number] if not rest and number < len(self._blocks) else None

    def append(self, block: Block) -> None:
        """Raises ValueError if `block` does not continue the table."""
        if block.start != self.n_tokens or len(self) != self.n_complete:
            raise ValueError(
                f"block at token {block.start} does not continue a table of {self.n_tokens} tokens"
            )
        if not 0 < block.count <= self.block:
            raise ValueError(f"block of {block.count} tokens, the size is {self.block}")
        self._blocks.append(block)

    def replace_last(self, block: Block) -> None:
        """Puts a block with the same start in the place of the last one."""
        if not self._blocks or self._blocks[-1].start != block.start:
            raise ValueError(f"the last block does not start at token {block.start}")
        self._blocks[-1] = block

    def truncate(self, n_blocks: int) -> list[Block]:
        """Keeps the first `n_blocks` -> the blocks taken off."""
        gone = self._blocks[n_blocks:]
        del self._blocks[n_blocks:]
        return gone

    def fork(self) -> BlockTable:
        """A table of its own with the same blocks; the records are shared, not counted here."""
        return BlockTable(self.block, list(self._blocks))
