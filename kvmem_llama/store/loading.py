"""Opening a history: catalog and indexes are read; records only where a row of an index is made again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, TypeAlias

import numpy as np

from kvmem_llama.errors import RecordDamaged, StoreError
from kvmem_llama.native.layout import U8

from .ahead import rows_ahead
from .append import Heat, read_heat, set_means, workspace_row
from .content import (
    Span,
    check_blocks,
    check_steps,
    iter_blocks,
    iter_steps,
    read_pins,
    read_tokens,
    spans,
)
from .heat import Uses
from .holding import Holding
from .index_file import F16, IndexChunks, mean_xxh
from .location import DurableRecords, Origin
from .records import Record
from .row_chunks import RowChunks
from .rows import AheadRow, BlockRow, WorkspaceRow
from .steps import MeanOf, NewBlock, ReadBlock, Restored
from .tables import Db
from .token_file import TokenChunks, TokenSource

_HALF_LIFE: Final = Uses().half_life  # commits
_GROUP: Final = 256  # blocks whose rows are made, and then written

Told: TypeAlias = Callable[[int, int], None]
"""(blocks done, all of them)"""


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Within: no search for garbage. Objects that stay are made by the million; to look through them
    again and again takes as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def restore(
    holding: Holding,
    store: DurableRecords,
    mean_of: MeanOf,
    *,
    scored: Sequence[int] | None,
    chunk_blocks: int,
    means: bool = True,
    token_source: TokenSource | None = None,
    told: Told | None = None,
) -> Restored:
    """The committed history of a workspace.

    scored, chunk_blocks: of the indexes, see MeanKIndex. mean_of: makes a row of all full-attention layers.
    means: the Mean-K index is wanted. token_source: of the token index; None: it is not wanted. told: is
    called now and then while rows are made again from records, which takes as long as to read these.
    Raises CatalogDamaged or StoreFailed.
    """
    with holding.family.catalog.snapshot() as db:
        row = workspace_row(db, holding.place.workspace)
        tokens = read_tokens(db, row.lineage, 0, row.n_tokens)
        rows = list(iter_blocks(db, row.lineage))
        check_blocks(rows, row)
        parts = spans(db, row.lineage)
        steps = list(iter_steps(db, row.lineage))
        check_steps(steps, row)
        pins = read_pins(db, row)
        ahead = _ahead_run(db, row, rows, holding.family.binding.block_size)
        heat = {item.number: item for item in read_heat(db, row.lineage)}
    maker = _Maker(holding, store, parts, rows)
    index = IndexChunks(holding.family.binding.index_shape, scored, len(rows) if means else 0, chunk_blocks)
    if means:
        maker.wants_means(index, mean_of)
    token_chunks: Sequence[U8] = ()
    if token_source is not None:
        into = TokenChunks(token_source.shape, len(rows), chunk_blocks)
        maker.wants_tokens(into, token_source)
        token_chunks = into.chunks
    maker.run(told)
    blocks = [
        NewBlock(
            block.number, block.start, block.count,
            store.attach(block.location, *_cooled(heat.get(block.number), row.commits)),
            Origin(block.origin),
        )
        for block in rows
    ]  # fmt: skip
    return Restored(
        tokens=tokens,
        blocks=blocks,
        chunks=index.chunks,
        token_chunks=token_chunks,
        tokens_missing=maker.tokens_lost,
        n_made=maker.n_made,
        counts=np.array([block.count for block in rows], np.int32),
        unscored=maker.means_lost,
        pins=pins,
        ahead=[
            ReadBlock(a.number, a.start, store.attach(a.location), np.frombuffer(a.ids, "<i4").astype("i4"))
            for a in ahead
        ],
        steps=steps,
        system=row.system,
        policy=row.policy,
    )  # fmt: skip


def _ahead_run(db: Db, row: WorkspaceRow, blocks: Sequence[BlockRow], block_size: int) -> list[AheadRow]:
    """The blocks that continue the complete ones without a gap."""
    number = len(blocks) - (1 if blocks and blocks[-1].count < block_size else 0)
    run: list[AheadRow] = []
    for ahead in rows_ahead(db, row.id):
        if ahead.number != number + len(run):
            break
        run.append(ahead)
    return run


def _cooled(heat: Heat | None, now: int) -> tuple[float, int]:
    """(recent, total) of a block as they are after the commits since they were written."""
    if heat is None:
        return 0.0, 0
    age = max(now - heat.tick, 0)
    return heat.recent * 0.5 ** (age / _HALF_LIFE), heat.total


class _Maker:
    """Makes rows of the indexes from records where they are not as they should be."""

    def __init__(
        self, holding: Holding, store: DurableRecords, parts: Sequence[Span], rows: Sequence[BlockRow]
    ) -> None:
        self._holding: Final = holding
        self._store: Final = store
        self._parts: Final = parts
        self._rows: Final = list(rows)
        self._means: tuple[IndexChunks, MeanOf, set[int]] | None = None
        self._tokens: tuple[RowChunks, TokenSource, set[int]] | None = None
        self.n_made = 0  # blocks
        # Blocks whose records are lost, too.
        self.means_lost: list[int] = []
        self.tokens_lost: list[int] = []

    def wants_means(self, into: IndexChunks, mean_of: MeanOf) -> None:
        missing = self._holding.family.index.load(self._parts, self._rows, into)
        self._means = (into, mean_of, set(missing))

    def wants_tokens(self, into: RowChunks, source: TokenSource) -> None:
        missing = self._holding.family.tokens.load(source.shape, self._parts, self._rows, into)
        self._tokens = (into, source, set(missing))

    def run(self, told: Told | None) -> None:
        wanted = sorted(
            (self._means[2] if self._means else set()) | (self._tokens[2] if self._tokens else set())
        )
        for first in range(0, len(wanted), _GROUP):
            if told is not None:
                told(first, len(wanted))
            means: dict[int, F16] = {}
            tokens: dict[int, U8] = {}
            for number in wanted[first : first + _GROUP]:
                self._make(number, means, tokens)
            self.n_made += len(means.keys() | tokens.keys())
            if not self._holding.read_only:
                with contextlib.suppress(StoreError):  # they are made again the next time
                    self._keep(means, tokens)
        if told is not None and wanted:
            told(len(wanted), len(wanted))

    def _make(self, number: int, means: dict[int, F16], tokens: dict[int, U8]) -> None:
        """The rows of one block, into the indexes and the two dictionaries."""
        block = self._rows[number]
        record: Record | None = None
        with contextlib.suppress(RecordDamaged):
            record = None if block.location is None else self._store.read(block.location)
        if self._means is not None and number in self._means[2]:
            into, mean_of, _ = self._means
            if record is None:
                into.put(
                    number, np.zeros((1, self._holding.family.binding.index_shape.n_elements), np.float16)
                )
                self.means_lost.append(number)
            else:
                means[number] = mean_of(record, block.count)
                into.put(number, means[number][np.newaxis])
        if self._tokens is not None and number in self._tokens[2]:
            chunks, source, _ = self._tokens
            if record is None:
                self.tokens_lost.append(number)
            else:
                tokens[number] = source.row_of(record, block.count)
                chunks.put(number, tokens[number][np.newaxis])

    def _keep(self, means: dict[int, F16], tokens: dict[int, U8]) -> None:
        """Writes rows that were made again, each where its block belongs."""
        family = self._holding.family
        others = {self._rows[number]: mean_xxh(mean) for number, mean in means.items()}
        others = {row: xxh for row, xxh in others.items() if row.mean_xxh != xxh}  # of another record
        changed = family.catalog.write(lambda db: set_means(db, others), "means") if others else {}
        for was in others:
            if was in changed:
                self._rows[was.number] = changed[was]
            else:  # somebody else has changed the block since it was read
                del means[was.number]
                tokens.pop(was.number, None)
        own = self._holding.row().lineage
        for part in self._parts:
            lineage, first = part.lineage, part.blocks[0]
            for run in _runs(means, part):
                family.index.put(lineage, first, run[0], np.stack([means[number] for number in run]))
            for was, now in changed.items():
                if now.lineage == lineage:
                    family.tokens.restamp(first, was, now.mean_xxh)
            if self._tokens is None or (
                lineage != own and family.tokens.holds_others(self._tokens[1].shape, lineage)
            ):
                continue  # whoever owns these blocks has more of them there, with heads of its own
            for run in _runs(tokens, part):
                rows = np.stack([tokens[number] for number in run])
                facts = [(self._rows[number].count, self._rows[number].mean_xxh) for number in run]
                family.tokens.put(self._tokens[1].shape, lineage, first, run[0], rows, facts)


def _runs(numbers: Iterable[int], part: Span) -> Iterator[list[int]]:
    """Numbers of blocks of one part that come one after the other. numbers: ascending."""
    own = [number for number in numbers if part.blocks[0] <= number < part.blocks[1]]
    for _, run in groupby(enumerate(own), key=lambda item: item[1] - item[0]):
        yield [number for _, number in run]
