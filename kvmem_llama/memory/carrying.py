"""Spans of another history that are taken over instead of being read again.

Raw K has no position and V none either, so rows can be copied to where the same tokens stand in a new
history. They are copied into new records on the grid of blocks, row by row: a block at the edge of a span has
carried rows beside evaluated ones. What a carried row had attended to is what stood before it in the other
history; it is not a reconstruction of what reading would give (docs/memory.md has what this costs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

from kvmem_llama.errors import Cancelled, RecordDamaged
from kvmem_llama.matching import Span
from kvmem_llama.native.layout import RecordLayout
from kvmem_llama.store.records import NotStored, Record

from .canonical import floor_to, parts_of
from .history import History
from .link import TaskLink

_AHEAD: Final = 32  # blocks that are on their way to the host


class Rows:
    """Where the rows of tokens lie in a record: runs of layers whose rows are of one size."""

    def __init__(self, layout: RecordLayout) -> None:
        self._block: Final = layout.block_size
        edges = [*layout.k_offsets, *layout.v_offsets, layout.nbytes]
        self._runs: Final[list[tuple[int, int, int]]] = []  # (first byte, layers, bytes of a row)
        for first, end in pairwise(edges):
            row = (end - first) // self._block
            if self._runs and self._runs[-1][2] == row:
                at, n, _ = self._runs[-1]
                self._runs[-1] = (at, n + 1, row)
            else:
                self._runs.append((first, 1, row))

    def copy(self, source: Record, slot: int, into: Record, at: int, n: int) -> None:
        """Rows slot .. slot+n-1 of a record become rows at .. at+n-1 of another."""
        for first, n_layers, row in self._runs:
            end, shape = first + n_layers * self._block * row, (n_layers, self._block, row)
            into[first:end].reshape(shape)[:, at : at + n] = source[first:end].reshape(shape)[
                :, slot : slot + n
            ]


@dataclass(frozen=True, slots=True)
class Carried:
    """What a new history may take over."""

    source: History  # not to be changed meanwhile
    spans: Sequence[Span]  # ascending in the new history
    rows: Rows

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The spans as far as they lie in the tokens start .. end-1 of the new history: (first token in the
        source, first token, end)."""
        for span in self.spans:
            first, last = max(span.new, start), min(span.new_end, end)
            if first < last:
                yield span.old + first - span.new, first, last

    def take(
        self, history: History, link: TaskLink, old: int, start: int, end: int
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Takes over the tokens start .. end-1 of the history, which stand in the source from token `old` on,
        as far as their rows are there -> (tokens taken over, tokens [start, end) after them whose rows are
        lost), again and again. The caller has these evaluated before it goes on.

        Raises Cancelled if the task is asked to stop; StoreFull, StoreFailed.
        """
        block, shift = history.block, old - start
        record: Record | None = None
        in_record, n_done = -1, 0
        for part in parts_of(block, old, old + end - start):
            first = floor_to(block, part.start)
            if first != in_record:
                if link.stop_requested:
                    raise Cancelled()
                record, in_record = self._record(first), first
            here, stop = part.start - shift, part.end - shift
            if record is None:
                yield n_done, (here, stop)
                n_done = 0
                continue
            for piece in parts_of(block, here, stop):
                slot, at = piece.start + shift - first, piece.start % block
                fill = partial(self.rows.copy, record, slot, at=at, n=piece.count)
                history.carry(piece.start, piece.count, fill)
                n_done += piece.count
        yield n_done, (end, end)

    def _record(self, start: int) -> Record | None:
        """The record of a block of the source; None if it is lost. Those that follow are asked for early."""
        source = self.source
        number = start // source.block
        if number % _AHEAD == 0:
            last = min(number + 2 * _AHEAD, len(source.table))
            source.store.prefetch([source.table[i].ref for i in range(number, last)])
        try:
            return source.rows(start)
        except (NotStored, RecordDamaged):
            return None
