"""The delta between what lies in the cells of a sequence and a target view. Pure: it moves nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvmem_llama.engine.cells import Cells
from kvmem_llama.settings import Settings
from kvmem_llama.store.records import RecordRef

from .canonical import Part
from .positions import ViewPos


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of a target view and the view position of its first token; the others follow."""

    part: Part
    position: ViewPos


@dataclass(frozen=True, slots=True)
class Target:
    """An execution view that is wanted."""

    placed: tuple[Placed, ...]  # in history order
    original: bool  # view positions are token positions; else they are packed from 0 on

    @classmethod
    def of(cls, parts: Iterable[Part], *, original: bool) -> Target:
        placed, n = [], 0
        for part in parts:
            placed.append(Placed(part, ViewPos(part.start if original else n)))
            n += part.count
        return cls(tuple(placed), original)


@dataclass(slots=True)
class Resident:
    """A part whose rows lie in cells; K is baked for positions position .. position+count-1."""

    part: Part
    position: ViewPos
    cells: Cells  # [count]
    moves: int = 0  # times K was rotated in place since it was computed or rebuilt
    refreshed: bool = False  # evaluated anew in the view: its rows are not those of its record


@dataclass(frozen=True, slots=True)
class Hidden:
    """A complete block that left the view, but whose rows still lie in its cells."""

    resident: Resident
    ref: RecordRef  # the rows are those of this record


@dataclass(frozen=True, slots=True)
class Rules:
    """What the planner may do with rows that lie in cells."""

    reuse: bool  # keep them at all
    move: bool  # rotate K in place
    max_moves: int
    exact: bool  # cells must ascend in view order

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """A quantized K would be rounded again by every move, so only an f16 cache moves blocks in place."""
        may_move = settings.cache_type_k == "f16" and not settings.exact and settings.max_moves > 0
        return cls(settings.reuse_resident, may_move, settings.max_moves, settings.exact)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, in this order: `leave`, `show`, `move`, `write`. Parts are named by their first token."""

    keep: tuple[int, ...]
    leave: tuple[int, ...]  # residents that go; those that are written anew are among them
    show: tuple[int, ...]  # hidden blocks that come back
    move: tuple[Placed, ...]  # residents, or blocks just shown, that get another position
    write: tuple[Placed, ...]  # rebuilt from their records

    @property
    def is_noop(self) -> bool:
        return not (self.leave or self.show or self.move or self.write)


def plan(
    residents: Sequence[Resident],
    hidden: Callable[[int], Hidden | None],
    target: Target,
    ref: Callable[[int], RecordRef | None],
    rules: Rules,
    *,
    rebuild: bool,
) -> Plan:
    """The cheapest way from `residents` (in view order) to `target`.

    ref: stored record of the complete block at a token; a hidden block counts only if it holds that record.
    A refreshed block never stays: what a target means by a block is its record.
    rebuild: nothing may stay that was, or would be, moved in place (the canonical view).
    """
    if rules.exact:
        return _plan_exact(residents, target.placed, rules)
    by_start = {r.part.start: r for r in residents}
    keep, show, move, write = [], [], [], []
    stay = set()
    for placed in target.placed:
        start = placed.part.start
        found = by_start.get(start)
        is_hidden = found is None
        if found is None and (entry := hidden(start)) is not None and entry.ref == ref(start):
            found = entry.resident
        if not rules.reuse or found is None or found.refreshed or found.part != placed.part:
            write.append(placed)
            continue
        moves = found.moves + (found.position != placed.position)
        if moves and (rebuild or not rules.move or moves > rules.max_moves):
            write.append(placed)
            continue
        stay.add(start)
        if is_hidden:
            show.append(start)
        if found.position != placed.position:
            move.append(placed)
        elif not is_hidden:
            keep.append(start)
    leave = tuple(r.part.start for r in residents if r.part.start not in stay)
    return Plan(tuple(keep), leave, tuple(show), tuple(move), tuple(write))


def _plan_exact(residents: Sequence[Resident], target: Sequence[Placed], rules: Rules) -> Plan:
    """Only a common beginning can stay: what follows it must lie in higher cells, in view order."""
    n_keep, highest = 0, -1
    for resident, placed in zip(residents, target, strict=False):
        ascending = [highest, *resident.cells.tolist()]
        same = (resident.part, resident.position, resident.moves) == (placed.part, placed.position, 0)
        same = same and not resident.refreshed
        if not rules.reuse or not same or ascending != sorted(set(ascending)):
            break
        n_keep, highest = n_keep + 1, ascending[-1]
    keep = tuple(r.part.start for r in residents[:n_keep])
    leave = tuple(r.part.start for r in residents[n_keep:])
    return Plan(keep, leave, (), (), tuple(target[n_keep:]))
