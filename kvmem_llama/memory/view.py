"""The execution view of one sequence: which tokens lie in which cells, at which view positions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from kvmem_llama.engine.cells import Cell, CellPool, Cells, PoolExhausted
from kvmem_llama.errors import StoreError
from kvmem_llama.native.layout import I32, BlockWrite
from kvmem_llama.settings import Settings
from kvmem_llama.store.records import NotStored, Record, RecordRef

from .canonical import Part, floor_to, parts_of
from .planner import Hidden, Placed, Plan, Resident, Rules, Target, plan
from .ports import CellHooks
from .positions import TokenPos, ViewPos
from .slack import Slack


class BlockSource(Protocol):
    """Where the rows of blocks come from: a History."""

    @property
    def block(self) -> int: ...

    def fetch(self, starts: Sequence[int]) -> Iterator[list[tuple[int, Record]]]: ...

    def ref(self, start: int) -> RecordRef | None: ...

    def tokens(self, start: int = 0, end: int | None = None) -> I32: ...


class View:
    """Parts in history order, each in one block. Owner thread only."""

    def __init__(
        self, pool: CellPool, hooks: CellHooks, source: BlockSource, settings: Settings, n_slack: int
    ) -> None:
        """n_slack: most tokens of blocks that left the view and stay in cells."""
        self.seq = -1
        self.original = False  # view positions are token positions; else they are packed
        self.slack: Final = Slack(pool)
        self.n_slack: Final = n_slack
        self.rules: Final = Rules.of(settings)
        self._compact_ratio: Final = settings.compact_ratio
        self._packing: Final = settings.packing
        self._pool: Final = pool
        self._hooks: Final = hooks
        self._source: Final = source
        self._residents: dict[int, Resident] = {}  # by first token, in history order
        self.n_tokens = 0  # in the view

    # -- what is in it

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._residents.values())

    def __contains__(self, start: object) -> bool:
        """A part that starts at this token is in the view."""
        return start in self._residents

    @property
    def has_refreshed(self) -> bool:
        """Some rows are not those that are kept of their tokens."""
        return any(resident.refreshed for resident in self)

    @property
    def _last(self) -> Resident | None:
        return next(reversed(self._residents.values()), None)

    @property
    def end(self) -> TokenPos:
        """The token position after the newest token in the view; 0 if it is empty."""
        return TokenPos(self._last.part.end if self._last else 0)

    def position_of(self, start: int) -> ViewPos:
        """View position of the token at `start` if it is the next to come into the view."""
        last = self._last
        if last is None:
            return ViewPos(start if self.original else 0)
        n_missing = start - last.part.end if self.original else 0
        return ViewPos(last.position + last.part.count + n_missing)

    @property
    def highest_cell(self) -> Cell:
        """-1 if the view is empty."""
        return Cell(max((int(r.cells.max()) for r in self), default=-1))

    # -- tokens that are evaluated

    def take_cells(self, n: int) -> Cells:
        """Cells for the next `n` tokens, [n] ascending; in exact mode above all others of the view, which may
        have to be rebuilt in lower ones: raises as `apply`."""
        self.slack.make_room(n)
        if not self.rules.exact:
            return self._pool.alloc(n)
        try:
            return self._pool.alloc_above(n, self.highest_cell)
        except PoolExhausted:
            self._relocate(list(self))
            return self._pool.alloc_above(n, self.highest_cell)

    def give_back(self, cells: Cells) -> None:
        """Cells that were taken and hold nothing."""
        self._pool.free(cells)

    def extend(self, start: int, cells: Cells, *, refreshed: bool = False) -> None:
        """Tokens from `start` on were evaluated in `cells` at the next view positions. Tokens may be missing
        before them, but none of the block they begin in. refreshed: their rows are not those that are kept
        of them."""
        is_open = start % self._source.block > 0
        last = self._last
        if is_open and len(cells) == 1 and last is not None and last.part.end == start:  # of an answer
            last.part = Part(last.part.start, last.part.count + 1)
            last.cells = np.concatenate((last.cells, cells))
            self.n_tokens += 1
            return
        assert self.end == start if is_open else self.end <= start, f"{start} follows {self.end}"
        for part in parts_of(self._source.block, start, start + len(cells)):
            i = part.start - start
            own = cells[i : i + part.count]
            last = self._last
            if part.start % self._source.block and last is not None:
                last.part = Part(last.part.start, last.part.count + part.count)
                last.cells = np.concatenate([last.cells, own])
            else:
                at = self.position_of(part.start)
                self._residents[part.start] = Resident(part, at, own.copy(), refreshed=refreshed)
        self.n_tokens += len(cells)

    def drop_from(self, start: int) -> None:
        """Empties the cells of the tokens from position `start` on."""
        freed = []
        for resident in reversed(list(self)):
            part = resident.part
            if part.end <= start:
                break
            n_kept = max(start - part.start, 0)
            freed.append(resident.cells[n_kept:])
            if n_kept:
                resident.part = Part(part.start, n_kept)
                resident.cells = resident.cells[:n_kept]
            else:
                del self._residents[part.start]
        self.n_tokens -= sum(len(cells) for cells in freed)
        self._free(freed)

    # -- going to another view

    def plan(self, target: Target, *, rebuild: bool) -> Plan:
        """See planner.plan."""
        return plan(list(self), self.slack.get, target, self._source.ref, self.rules, rebuild=rebuild)

    def apply(self, target: Target, todo: Plan) -> None:
        """Carries out a plan made for `target`; afterwards the view is `target`. If a record cannot be had,
        the view is cleared, and what BlockStore.fetch raised is raised again."""
        self.original = target.original
        if todo.is_noop:
            return
        self._leave(todo)
        self._show(todo.show)
        self._move(todo.move)
        self._write(todo.write)
        self._residents = {p.part.start: self._residents[p.part.start] for p in target.placed}
        self.n_tokens = sum(p.part.count for p in target.placed)
        self._compact()

    def grow(self, placed: Sequence[Placed]) -> None:
        """Rebuilds parts after all others of the view, from their records. Raises as `apply`."""
        self._write(placed)
        self.n_tokens = sum(resident.part.count for resident in self)

    def tidy(self) -> None:
        """Compacts the cells if it is time to. If a record that this takes cannot be had, nothing stays in
        the view, and the next step rebuilds it."""
        with contextlib.suppress(NotStored, StoreError):
            self._compact()

    def clear(self) -> None:
        """Gives up every cell. What llama.cpp still shows of the sequence is emptied first: after a failed
        decode that may be less than the view holds."""
        if self.seq >= 0:
            _, seqs = self._hooks.cells()
            self._hooks.free(np.flatnonzero(seqs == self.seq).astype(np.int32))
        self.slack.forget()
        for resident in self:
            self._pool.free(resident.cells)
        self._residents = {}
        self.n_tokens = 0

    # -- private

    def _compact(self) -> None:
        """Rebuilds blocks in lower cells if the highest one exceeds `compact_ratio` x the number of used
        ones: the price of a decode follows the highest used cell, whoever it belongs to. Raises as
        `apply`."""
        if self.highest_cell + 1 <= self._compact_ratio * self._pool.n_used:
            return
        self.slack.forget()
        beyond = [r for r in self if int(r.cells.max()) >= self._pool.n_used]
        self._relocate(list(self) if beyond and self.rules.exact else beyond)

    def _leave(self, todo: Plan) -> None:
        if todo.leave:
            self._hooks.free(np.concatenate([self._residents[start].cells for start in todo.leave]))
        rewritten = {p.part.start for p in todo.write}
        for start in todo.leave:
            resident = self._residents.pop(start)
            ref = self._source.ref(start)
            may_hide = self.rules.reuse and not self.rules.exact and start not in rewritten
            may_hide = may_hide and not resident.refreshed
            if may_hide and ref is not None and resident.part.count == self._source.block:
                self.slack.put(Hidden(resident, ref))
            else:
                self._pool.free(resident.cells)
        self.slack.discard(rewritten)  # copies that were of no use where they lie
        self.slack.trim(self.n_slack, keep=frozenset(todo.show))

    def _show(self, starts: Sequence[int]) -> None:
        shown = [entry.resident for start in starts if (entry := self.slack.get(start)) is not None]
        if not shown:
            return
        cells = np.concatenate([r.cells for r in shown])
        positions = np.concatenate([_run(r.position, r.part.count) for r in shown])
        tokens = np.concatenate([self._source.tokens(r.part.start, r.part.end) for r in shown])
        self._hooks.show(self.seq, cells, positions, tokens)
        self._residents.update((start, self.slack.take(start)) for start in starts)

    def _move(self, moved: Sequence[Placed]) -> None:
        if not moved:
            return
        residents = [self._residents[p.part.start] for p in moved]
        cells = np.concatenate([r.cells for r in residents])
        positions = np.concatenate([_run(p.position, p.part.count) for p in moved])
        self._hooks.move(self.seq, cells, positions)
        for resident, placed in zip(residents, moved, strict=True):
            resident.position = placed.position
            resident.moves += 1

    def _write(self, written: Sequence[Placed]) -> None:
        n = sum(p.part.count for p in written)
        if not n:
            return
        self.slack.make_room(n)
        try:
            above = self.highest_cell if self.rules.exact else Cell(-1)
            cells = self._pool.alloc_above(n, above)
        except PoolExhausted:
            if not self.rules.exact:
                raise
            # what stays lies too high for the rest to follow it: everything goes to the lowest cells
            written = [*(Placed(r.part, r.position) for r in self), *written]
            self._free([r.cells for r in self])
            self._residents = {}
            cells = self._pool.alloc(sum(p.part.count for p in written))
        self._write_into(cells, written)

    def _relocate(self, residents: Sequence[Resident]) -> None:
        """Rebuilds parts in the lowest free cells; their view positions stay."""
        if not residents:
            return
        self._free([r.cells for r in residents])
        cells = self._pool.alloc(sum(r.part.count for r in residents))
        self._write_into(cells, [Placed(r.part, r.position) for r in residents])

    def _write_into(self, cells: Cells, written: Sequence[Placed]) -> None:
        first = 0
        own: list[Cells] = []
        for placed in written:
            part = placed.part
            own.append(cells[first : first + part.count])
            first += part.count
            # Before its rows are there: so its cells are given back if they cannot be had.
            self._residents[part.start] = Resident(part, placed.position, own[-1])
        try:
            self._fill(own, written)
        except BaseException:  # cells of the view may hold anything now
            self.clear()
            raise

    def _fill(self, own: Sequence[Cells], written: Sequence[Placed]) -> None:
        block = self._source.block
        for batch in self._source.fetch([floor_to(block, placed.part.start) for placed in written]):
            writes = []
            for i, record in sorted(batch, key=lambda item: item[0]):
                part = written[i].part
                tokens = self._source.tokens(part.start, part.end)
                writes.append(BlockWrite(record, part.start % block, own[i], written[i].position, tokens))
            for call in [writes] if self._packing else [[write] for write in writes]:
                self._hooks.write_blocks(self.seq, call)

    def _free(self, cells: Sequence[Cells]) -> None:
        if cells:
            joined = np.concatenate(cells)
            self._hooks.free(joined)
            self._pool.free(joined)


def _run(first: int, n: int) -> I32:
    return np.arange(first, first + n, dtype=np.int32)
