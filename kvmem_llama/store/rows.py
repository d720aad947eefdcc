"""Rows of the catalog as values; schema.py has their tables."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from .location import Location, Tier

CHUNK: Final = 4096
"""Token ids per row of `tokens`, on a grid of the history."""


@dataclass(frozen=True, slots=True)
class MetaRow:
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class WorkspaceRow:
    """A name and the head of its history."""

    id: str
    name: str
    lineage: int
    n_tokens: int
    commits: int  # transactions that changed it, ever
    policy: str
    system: str | None
    created: float  # seconds since the epoch; only shown
    used: float
    n_steps: int = 0  # of its whole history; with these two, rows that are missing at the end are noticed
    n_pins: int = 0


@dataclass(frozen=True, slots=True)
class LineageRow:
    """A run of tokens, blocks and steps. What comes before its own lies in the parent, up to the given ends.

    Only complete blocks are shared, so `own_start` is the end of the last shared block. The parent may drop
    what comes after `parent_end`: the end of that block or of the last shared step, whichever is later.
    """

    id: int
    parent: int | None
    parent_end: int  # tokens
    parent_blocks: int  # number of the first own block
    own_start: int  # token position of the first own token
    parent_steps: int  # number of the first own step
    created: float


@dataclass(frozen=True, slots=True)
class TokensRow:
    """Token ids of one chunk of a lineage; the first chunk begins at `own_start`, the last may be short."""

    lineage: int
    chunk: int
    ids: bytes  # int32, little-endian


@dataclass(frozen=True, slots=True)
class BlockRow:
    lineage: int
    number: int
    start: int
    count: int
    tier: int
    segment: int | None  # None: the record is gone, only tokens and index row are left
    slot: int | None
    generation: int | None
    checksum: bytes  # of the record, the last one if it is gone
    mean_xxh: bytes  # [16] xxh3-128 of its row in the index file
    origin: int

    @property
    def location(self) -> Location | None:
        if self.segment is None or self.slot is None or self.generation is None:
            return None
        return Location(self.segment, self.slot, self.generation, self.checksum)

    @property
    def end(self) -> int:
        return self.start + self.count

    def moved_to(self, at: Location | None) -> BlockRow:
        """The same block with its record elsewhere; None: in the tokens tier."""
        if at is None:
            return dataclasses.replace(self, tier=int(Tier.TOKENS), segment=None, slot=None, generation=None)
        return dataclasses.replace(
            self, tier=int(Tier.DISK), segment=at.segment, slot=at.slot, generation=at.generation,
            checksum=at.checksum,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextRow:
    lineage: int
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class WordsRow:
    """The words of a complete block."""

    lineage: int
    number: int
    source: bytes  # [8] of the token ids they were made from
    terms: bytes  # uint64 per word, little-endian


@dataclass(frozen=True, slots=True)
class HeatRow:
    """How often a block was recalled: lately (halved every so many recalls), and ever."""

    lineage: int
    number: int
    recent: float  # as it was at the recall `tick`
    total: int
    tick: int  # counts the commits of the workspace that wrote it: no clock is involved


@dataclass(frozen=True, slots=True)
class StepRow:
    """A finished step. Token positions are absolute."""

    lineage: int
    number: int
    kind: str  # read | ask | step
    start: int
    end: int
    query_start: int
    answer: str
    closed: int  # 1: the answer's last token ended it
    scorer: str
    options: str  # JSON of the options that the answer depends on
    time: float  # seconds since the epoch; only shown


@dataclass(frozen=True, slots=True)
class PinRow:
    workspace: str
    number: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AheadRow:
    """A complete block after the head that an unfinished read has evaluated, with its token ids."""

    workspace: str
    number: int
    start: int
    count: int
    segment: int
    slot: int
    generation: int
    checksum: bytes
    ids: bytes  # int32, little-endian

    @property
    def location(self) -> Location:
        return Location(self.segment, self.slot, self.generation, self.checksum)


@dataclass(frozen=True, slots=True)
class OwnedSegment:
    number: int
    owner: str | None  # workspace whose writer may allocate in it; None: nobody's, the next writer takes it
    n_slots: int


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot that was used at least once."""

    segment: int
    slot: int
    generation: int
    used: int  # 0: free, 1: named by a block, 2: to be erased before it is free


def new_block(
    lineage: int, number: int, start: int, count: int, at: Location | None, mean_xxh: bytes, origin: int = 0
) -> BlockRow:
    """Row of a block whose record lies at `at`; None: it is in the tokens tier."""
    bare = BlockRow(
        lineage, number, start, count, int(Tier.TOKENS), None, None, None, bytes(16), mean_xxh, int(origin)
    )
    return bare if at is None else bare.moved_to(at)
