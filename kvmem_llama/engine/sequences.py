"""Who holds which sequence id of the context, and whose cells are dropped when another needs one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


class Resident(Protocol):
    """What may keep its cells between tasks: a workspace."""

    def evict(self) -> None:
        """Frees every cell it holds. Called on the owner thread, only while none of its tasks runs.

        Afterwards its sequence id belongs to another; its next task may get a different one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    seq: int  # sequence id
    kept: bool  # the resident held it all the time: its cells are still there


class Sequences:
    """The `n` sequence ids of a context. Owner thread only."""

    def __init__(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"at least one sequence is needed, not {n}")
        self._free = list(range(n))
        self._busy: dict[int, tuple[Resident, int]] = {}  # id(resident) -> resident, sequence
        self._idle: OrderedDict[int, tuple[Resident, int]] = OrderedDict()  # least recently used first

    @property
    def n_busy(self) -> int:
        return len(self._busy)

    def is_busy(self, resident: Resident) -> bool:
        """A task of this resident runs."""
        return id(resident) in self._busy

    def acquire(self, resident: Resident) -> Lease | None:
        """A sequence id for a task of `resident`; None while there is none, or while a task of it runs.

        The one it kept from its last task, else a free one, else that of the least recently used idle
        resident, which is evicted. An error of `evict` comes out of here and changes nothing.
        """
        key = id(resident)
        if key in self._busy:
            return None
        kept = self._idle.pop(key, None)
        if kept is not None:
            seq = kept[1]
        elif self._free:
            seq = self._free.pop(0)
        elif self._idle:
            oldest, (other, seq) = next(iter(self._idle.items()))
            other.evict()
            del self._idle[oldest]
        else:
            return None
        self._busy[key] = (resident, seq)
        return Lease(seq, kept is not None)

    def release(self, resident: Resident, *, keep: bool) -> None:
        """The task of `resident` ended; `keep`: cells and sequence id stay until another needs them."""
        entry = self._busy.pop(id(resident))
        if keep:
            self._idle[id(resident)] = entry
        else:
            self._return(entry[1])

    def drop(self, resident: Resident) -> bool:
        """Evicts an idle resident, frees its sequence id -> False if it holds none or its task runs."""
        entry = self._idle.get(id(resident))
        if entry is None:
            return False
        resident.evict()
        del self._idle[id(resident)]
        self._return(entry[1])
        return True

    def _return(self, seq: int) -> None:
        self._free.append(seq)
        self._free.sort()  # the lowest id first, so that runs are repeatable
