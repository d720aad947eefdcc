"""A llama.cpp context that is a few arrays: the scheduler and the engine are tested over it without a model.

Its logits are a function of what one sequence holds (tokens by view position), so a wrong cell, a leftover
token or a mixed-up sequence changes the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.cells import CellPool
from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import F32, I32, Batch, Decode, Decoded, Phase
from kvmem_llama.engine.resources import Resources
from kvmem_llama.settings import Settings

N_VOCAB = 97


class FakeContext:
    """Decoder and hooks over the same cells. Without `place` it takes the lowest empty ones, as llama.cpp."""

    def __init__(self, n_cells: int = 256, n_batch: int = 16) -> None:
        self.n_cells, self.n_batch, self.n_vocab = n_cells, n_batch, N_VOCAB
        self.position = np.full(n_cells, -1, dtype=np.int32)
        self.seq = np.full(n_cells, -1, dtype=np.int32)
        self.token = np.zeros(n_cells, dtype=np.int32)
        self.flags: list[tuple[bool, bool]] = []  # what `capture` was called with
        self.batches: list[list[tuple[int, int]]] = []  # (sequence, view position) of every token
        self.seconds = 0.0  # that a decode takes
        self.fail: list[int] = []  # return codes of the next decodes
        self.lose_rows = 0  # captured rows to leave out, once
        self.refuse: Exception | None = None  # what `place` raises, once
        self.crash: BaseException | None = None  # what `decode` raises
        self.n_closed = 0
        self._placed: I32 | None = None
        self._rows: tuple[I32, I32] = (np.empty(0, np.int32), np.empty(0, np.int32))
        self._logits: dict[int, F32] = {}

    # Decoder

    def decode(self, batch: Batch) -> int:
        time.sleep(self.seconds)
        if self.crash is not None:
            raise self.crash
        cells = self._placed
        self._placed = None
        if cells is None:
            cells = np.flatnonzero(self.position < 0)[: batch.n].astype(np.int32)
        assert len(cells) == batch.n and np.all(self.position[cells] == -1)
        rc = self.fail.pop(0) if self.fail else 0
        # A failed decode leaves a mess, as llama.cpp may.
        n = batch.n if rc == 0 else batch.n // 2
        for cell, token, position, seq in zip(
            cells[:n], batch.tokens, batch.positions, batch.seqs, strict=False
        ):
            self.position[cell], self.seq[cell], self.token[cell] = position, seq, token
        if rc != 0:
            return rc
        self.batches.append(list(zip(batch.seqs.tolist(), batch.positions.tolist(), strict=True)))
        self._logits = {
            i: self.logits_of(int(batch.seqs[i]), int(batch.positions[i]))
            for i in range(batch.n)
            if batch.outputs[i]
        }
        keep = batch.n - self.lose_rows
        self.lose_rows = 0
        self._rows = batch.seqs[:keep].copy(), batch.positions[:keep].copy()
        return 0

    def logits(self, index: int) -> F32:
        return self._logits[index]

    def logits_of(self, seq: int, position: int) -> F32:
        """One-hot at a hash of what `seq` holds up to `position`."""
        mine = (self.seq == seq) & (self.position >= 0) & (self.position <= position)
        pairs = sorted(zip(self.position[mine].tolist(), self.token[mine].tolist(), strict=True))
        return expected_logits(pairs)

    def remove(self, seq: int, first: int = 0, end: int = -1) -> bool:
        mine = (self.seq == seq) & (self.position >= first)
        if end >= 0:
            mine &= self.position < end
        self.position[mine] = self.seq[mine] = -1
        return True

    def shift(self, seq: int, first: int, end: int, delta: int) -> bool:
        mine = (self.seq == seq) & (self.position >= first)
        if end >= 0:
            mine &= self.position < end
        self.position[mine] += delta
        return True

    # BatchHooks

    def capture(self, *, k: bool, q: bool) -> None:
        self.flags.append((k, q))

    def place(self, cells: I32) -> None:
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        self._placed = cells.copy()

    def captured(self) -> tuple[I32, I32]:
        return self._rows

    def cells(self) -> tuple[I32, I32]:
        return self.position.copy(), self.seq.copy()

    def free(self, cells: I32) -> None:
        assert np.all(self.position[cells] >= 0)
        self.position[cells] = self.seq[cells] = -1

    def close(self) -> None:
        self.n_closed += 1


def expected_logits(pairs: list[tuple[int, int]]) -> F32:
    """Logits after the (view position, token) pairs of one sequence."""
    state = 7
    for position, token in pairs:
        state = (state * 31 + 3 * position + token) % 1_000_003
    logits = np.zeros(N_VOCAB, dtype=np.float32)
    logits[state % N_VOCAB] = 1.0
    return logits


def expected_answer(prompt: list[int], n: int) -> list[int]:
    """The greedy answer of n tokens to a prompt, alone in a context."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(expected_logits(list(enumerate(tokens))).argmax()))
    return tokens[len(prompt) :]


def fake_core(context: FakeContext, *, hooks: bool = True, n_parallel: int = 4) -> EngineCore:
    settings = Settings(n_ctx=64, n_parallel=n_parallel)
    return EngineCore(
        model=cast(Any, None),
        decoder=context,
        hooks=cast(Any, context) if hooks else None,
        pool=CellPool(context.n_cells),
        settings=settings,
        n_view=64,
    )


def fake_resources(context: FakeContext, **options: Any) -> Resources:
    return Resources(fake_core(context, **options), context.close)


class Answer:
    """A task: reads a prompt, writes `n` greedy tokens, frees its cells. `log` is what it went through."""

    def __init__(self, prompt: list[int], n: int = 0, *, capture_q: bool = False) -> None:
        self.prompt, self.n, self.capture_q = prompt, n, capture_q
        self.log: list[str] = []
        self.decoded: list[Decoded] = []
        self.before_token: Callable[[EngineCore, int], None] = lambda core, i: None

    def __call__(self, core: EngineCore) -> Generator[Decode, Decoded, list[int]]:
        cells = core.pool.alloc(len(self.prompt) + self.n)
        seq = core.seq
        try:
            done, logits = 0, None
            tokens = np.array(self.prompt, dtype=np.int32)
            while done < len(tokens):
                request = self._request(seq, tokens[done:], done, cells[done:], Phase.READ)
                decoded = yield request
                self.decoded.append(decoded)
                done += decoded.n
                logits = decoded.logits
            answer: list[int] = []
            for i in range(self.n):
                assert logits is not None
                self.before_token(core, i)
                token = int(logits.argmax())
                answer.append(token)
                if core.current_task is not None:
                    core.emit(core.current_task, token)
                one = np.array([token], dtype=np.int32)
                decoded = yield self._request(seq, one, done, cells[done:], Phase.DECODE)
                done += 1
                logits = decoded.logits
            self.log.append("done")
            return answer
        except GeneratorExit:
            raise
        except BaseException as error:
            self.log.append(type(error).__name__)
            raise
        finally:
            core.decoder.remove(seq)
            core.pool.free(cells)
            self.log.append("freed")

    def _request(self, seq: int, tokens: I32, first: int, cells: I32, phase: Phase) -> Decode:
        n = len(tokens)
        positions: NDArray[np.int32] = np.arange(first, first + n, dtype=np.int32)
        return Decode(seq, tokens, positions, cells[:n], phase, capture_q=self.capture_q, logits=True)
