"""What a task asks of the scheduler, what it gets back, and what the scheduler itself stands on.

A task is a generator on the owner thread: it yields a `Decode` and is resumed with a `Decoded`, or it yields
a `Wait` and is resumed with an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

I8: TypeAlias = NDArray[np.int8]
I32: TypeAlias = NDArray[np.int32]
F32: TypeAlias = NDArray[np.float32]
T = TypeVar("T")


class Phase(Enum):
    """Why tokens are evaluated. DECODE is served before the others in every batch."""

    READ = "read"  # history, over the canonical view
    QUERY = "query"  # first pass of the query
    REPLAY = "replay"  # the query again, over the new view
    DECODE = "decode"  # tokens of the answer


@dataclass(slots=True)
class Decode:
    """Tokens to evaluate, [n] each: token ids, view positions (ascending), cells (allocated, empty)."""

    seq: int
    tokens: I32
    positions: I32
    cells: I32
    phase: Phase
    capture_q: bool = False
    logits: bool = False  # logits of the last token


@dataclass(slots=True)
class Decoded:
    """What a batch did of a request. Arrays are valid until the task yields again."""

    n: int  # only the first n tokens were evaluated; the task asks again for the rest
    rows: I32  # [n] capture rows; empty without hooks
    logits: F32 | None  # [n_vocab] if they were asked for and the last token was evaluated


@dataclass(slots=True)
class Wait:
    """Nothing is evaluated for the task until `over()`, which is asked on the owner thread between batches.
    Whoever makes it true wakes the engine (Task.wake)."""

    over: Callable[[], bool]


TaskGenerator: TypeAlias = Generator[Decode | Wait, Decoded, T]


class Batch:
    """Arguments of one llama_decode call: arrays of `capacity` tokens, filled anew for every call."""

    def __init__(self, capacity: int) -> None:
        self.capacity: Final = capacity
        self.n = 0
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._seqs = np.zeros(capacity, dtype=np.int32)
        self._cells = np.zeros(capacity, dtype=np.int32)
        self._outputs = np.zeros(capacity, dtype=np.int8)

    def clear(self) -> None:
        self.n = 0

    def add(self, request: Decode, n: int, *, every: bool = False) -> int:
        """Appends the first `n` tokens of `request` -> index of its first token in the batch.

        every: logits of every token, whatever the request asks for."""
        first, last = self.n, self.n + n
        if last > self.capacity:
            raise ValueError(f"batch of {last} tokens, the limit is {self.capacity}")
        self._tokens[first:last] = request.tokens[:n]
        self._positions[first:last] = request.positions[:n]
        self._cells[first:last] = request.cells[:n]
        self._seqs[first:last] = request.seq
        self._outputs[first:last] = every
        self._outputs[last - 1] = every or (request.logits and n == len(request.tokens))
        self.n = last
        return first

    # Views of the filled part; the addresses of the arrays never change.
    @property
    def tokens(self) -> I32:
        return self._tokens[: self.n]

    @property
    def positions(self) -> I32:
        return self._positions[: self.n]

    @property
    def seqs(self) -> I32:
        return self._seqs[: self.n]

    @property
    def cells(self) -> I32:
        return self._cells[: self.n]

    @property
    def outputs(self) -> I8:
        return self._outputs[: self.n]


class Decoder(Protocol):
    """One llama.cpp context as the scheduler sees it. Owner thread only."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_cells(self) -> int: ...

    @property
    def n_batch(self) -> int:
        """Most tokens of one call."""
        ...

    def decode(self, batch: Batch) -> int:
        """llama_decode -> its return code, 0 for success. Never raises for a failed decode."""
        ...

    def logits(self, index: int) -> F32:
        """Logits of token `index` of the last batch, [n_vocab]: a view that the next decode overwrites."""
        ...

    def remove(self, seq: int, first: int = 0, end: int = -1) -> bool:
        """Empties the cells of `seq` at view positions first <= p < end (-1: no end). False: not possible."""
        ...

    def shift(self, seq: int, first: int, end: int, delta: int) -> bool:
        """Moves view positions first <= p < end (-1: no end) of `seq` by `delta`. False: not possible.

        For sequences without hooks only; a recurrent part or quantized cells may lose by it.
        """
        ...


class BatchHooks(Protocol):
    """The part of native.hooks.Hooks that the scheduler uses."""

    def capture(self, *, k: bool, q: bool) -> None: ...

    def place(self, cells: I32) -> None: ...

    def captured(self) -> tuple[I32, I32]: ...

    def cells(self) -> tuple[I32, I32]: ...

    def free(self, cells: I32) -> None: ...
