"""The indexes of one history: those that its score asks, changed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvmem_llama.native.layout import U8, LayerInfo, RecordLayout
from kvmem_llama.settings import Settings

from .block_rows import BlockRows
from .channels import Channels
from .heads import indexed_heads
from .index import MeanKIndex
from .token_index import TokenIndex


class Indexes:
    """Row b of each belongs to block b. None stands for an index that nothing asks: it is not built."""

    def __init__(self, mean_k: MeanKIndex | None = None, tokens: TokenIndex | None = None) -> None:
        self.mean_k: Final = mean_k
        self.tokens: Final = tokens

    @classmethod
    def of(
        cls, channels: Channels, settings: Settings, layers: Sequence[LayerInfo], layout: RecordLayout
    ) -> Indexes:
        """Empty ones. layers, layout: as the hooks report them. Raises InvalidOption, KernelsMissing."""
        mean_k = MeanKIndex(layers, layout, settings.scored_layers()) if "mean_k" in channels else None
        if channels.calibration is None:
            return cls(mean_k)
        heads_kv, index_type = indexed_heads(channels.calibration, layers), channels.calibration.index_type
        return cls(mean_k, TokenIndex(layers, layout, heads_kv, index_type))

    def __iter__(self) -> Iterator[BlockRows]:
        """Those that are built."""
        return (index for index in (self.mean_k, self.tokens) if index is not None)

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self)

    def append(self, record: U8, count: int) -> None:
        """See BlockRows.append, as all of these."""
        for index in self:
            index.append(record, count)

    def replace_last(self, record: U8, count: int) -> None:
        for index in self:
            index.replace_last(record, count)

    def missing(self, number: int, *, unscored: bool) -> list[BlockRows]:
        """Those that have no row of block `number`; all of them if it is unscored."""
        return [index for index in self if unscored or not index.counts[number]]

    def truncate(self, n_blocks: int) -> None:
        for index in self:
            index.truncate(n_blocks)

    def fork(self) -> Indexes:
        mean_k = None if self.mean_k is None else self.mean_k.fork()
        return Indexes(mean_k, None if self.tokens is None else self.tokens.fork())
