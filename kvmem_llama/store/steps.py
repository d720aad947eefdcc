"""What memory tells the durable side of a workspace, and what it gets back when the workspace is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.native.layout import I32, U8

from .index_file import F16
from .location import Origin
from .records import Record, RecordRef
from .rows import StepRow
from .words import BlockWords

MeanOf = Callable[[Record, int], F16]
"""(record, count) -> Mean-K of its first `count` rows, [elements of a row of the index] float16."""


RowOf = Callable[[Record, int], U8]
"""(record, count) -> the row of its first `count` tokens in the token index, [bytes of a row]."""


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block whose record is in the store and whose rows are final."""

    number: int
    start: int
    count: int
    ref: RecordRef
    origin: Origin = Origin.READ
    text: str | None = None  # of a complete block
    words: BlockWords | None = None  # of a complete block


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A complete block after the head, read by a step that is not finished."""

    number: int
    start: int
    ref: RecordRef
    ids: I32  # its token ids


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is remembered of a finished step beside its tokens and blocks."""

    kind: str  # read | ask | step
    query_start: int  # token position; where there is no query: the end
    answer: str = ""
    closed: bool = False  # the answer's last token ended it
    scorer: str = ""
    options: str = "{}"  # JSON of the options that the answer depends on


@dataclass(frozen=True, slots=True)
class Restored:
    """A history as it was committed. Nothing of its KV is in memory yet."""

    tokens: I32
    blocks: Sequence[NewBlock]
    chunks: Sequence[F16]  # of the Mean-K index, as MeanKIndex keeps them; none if it was not asked for
    token_chunks: Sequence[U8]  # of the token index, likewise
    tokens_missing: Sequence[int]  # blocks without a row of the token index, and without a record
    n_made: int  # blocks whose rows had to be made again from their records
    counts: NDArray[np.int32]  # tokens of each block
    unscored: Sequence[int]  # blocks whose Mean-K and record are both lost: to be computed before all else
    pins: Sequence[tuple[int, int]]
    ahead: Sequence[ReadBlock]
    steps: Sequence[StepRow]
    system: str | None
    policy: str
