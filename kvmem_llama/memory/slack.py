"""Complete blocks that left the view, but whose rows still lie in their cells, hidden from attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvmem_llama.engine.cells import CellPool

from .planner import Hidden, Resident


class Slack:
    """Hidden blocks of one sequence, longest hidden first. Their cells stay allocated in the pool."""

    def __init__(self, pool: CellPool) -> None:
        self._pool = pool
        self._entries: dict[int, Hidden] = {}  # by first token

    def __iter__(self) -> Iterator[Hidden]:
        return iter(self._entries.values())

    @property
    def n_tokens(self) -> int:
        return sum(entry.resident.part.count for entry in self)

    def get(self, start: int) -> Hidden | None:
        return self._entries.get(start)

    def put(self, entry: Hidden) -> None:
        """Adds a block whose cells were just emptied; an older copy of it is given up."""
        self.discard([entry.resident.part.start])
        self._entries[entry.resident.part.start] = entry

    def take(self, start: int) -> Resident:
        """Takes a block out, with its cells. Raises KeyError."""
        return self._entries.pop(start).resident

    def discard(self, starts: Iterable[int]) -> None:
        """Gives up the cells of the blocks that start at these tokens, where there are any."""
        for start in starts:
            if start in self._entries:
                self._pool.free(self.take(start).cells)

    def trim(self, n_tokens: int, keep: frozenset[int] = frozenset()) -> None:
        """Gives up the longest hidden blocks, but for `keep`, until the others hold at most `n_tokens`."""
        others = {s: e.resident.part.count for s, e in self._entries.items() if s not in keep}
        n = sum(others.values())
        for start, count in others.items():
            if n <= n_tokens:
                break
            self.discard([start])
            n -= count

    def make_room(self, n_cells: int) -> None:
        """Gives up blocks until the pool has `n_cells` free cells, or none is left."""
        while self._pool.n_free < n_cells and self._entries:
            self.discard([next(iter(self._entries))])

    def forget(self, from_token: int = 0) -> None:
        """Gives up the blocks that end after token position `from_token`."""
        self.discard([start for start, e in self._entries.items() if e.resident.part.end > from_token])
