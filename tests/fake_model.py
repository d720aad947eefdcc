"""A decoder that is a few arrays, with every memory hook: whole steps run on it without llama.cpp.

A token's raw K holds the token, and a fingerprint of all it attended to: of the tokens, view positions and
fingerprints of the visible cells below it. So a wrong row, cell or position anywhere changes every later
fingerprint and the answer. Cells remember the position their K is baked for; every decode checks that it is
the position they are shown at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.calibration import find
from kvmem_llama.engine.cells import CellPool
from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import F32, I32, Batch
from kvmem_llama.engine.resources import Resources
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.engine.token_probs import TokenProbs, before_sampling
from kvmem_llama.memory.scoring import make_scorer
from kvmem_llama.memory.session import Session
from kvmem_llama.native.layout import BlockWrite, LayerInfo, RecordLayout
from kvmem_llama.settings import Settings

N_VOCAB = 97
FINGERPRINT = "fa" * 16
END = 96  # the end-of-generation token; the model never chooses it by itself
_D = 8  # head size: 6 numbers that stand for the token, the token itself, the fingerprint
_MODULUS = 2039  # fingerprints are exact in float16


def _layer(il: int, cache: int) -> LayerInfo:
    row = _D * 4
    return LayerInfo(
        il=il, cache=cache, rope=True, n_head=2, n_head_kv=1, d_k=_D, d_v=4, raw_k_row=row, k_row=row,
        v_row=16, scale=2.0, type_k=0, type_v=0, k_rotated=False, rope_params=(0,) * 16, rope_factors=False,
        k_base=0, v_base=0,
    )  # fmt: skip


LAYERS = (_layer(0, 0), _layer(1, 1), _layer(2, 0))
_MEANING = np.random.default_rng(5).normal(size=(N_VOCAB, 6)).astype(np.float32)


_LAYER_SHIFT = np.arange(len(LAYERS), dtype=np.float32)[:, None]


def _mix(positions: Any, tokens: Any, fingerprints: Any) -> Any:
    p, t, f = (np.asarray(x, dtype=np.int64) for x in (positions, tokens, fingerprints))
    return (p * 131 + t * 17 + 1) * (f + 3)


class FakeVocab:
    """Token t is one character; 5 and 6 are halves of one."""

    n_tokens = N_VOCAB
    bos, add_bos = -1, False

    def piece(self, token: int, *, special: bool = True) -> bytes:
        if token == END:
            return b"<end>" if special else b""
        halves = {5: "é".encode()[:1], 6: "é".encode()[1:]}
        return halves.get(token, bytes([32 + token % 94]))

    def detokenize(self, tokens: I32, *, special: bool = True) -> bytes:
        return b"".join(self.piece(int(t), special=special) for t in tokens)

    def tokenize(self, text: str | bytes, *, add_bos: bool = False, parse_special: bool = True) -> I32:
        data = text.encode("ascii", "replace") if isinstance(text, str) else text
        return np.array([(byte - 32) % 94 for byte in data], dtype=np.int32)

    def is_eog(self, token: int) -> bool:
        return token == END

    def is_control(self, token: int) -> bool:
        return token == END


class FakeSampler:
    """Greedy."""

    def __init__(self, vocab: object, params: SamplingParams) -> None:
        self.closed = False
        self.n_probs = params.n_probs

    def sample(self, logits: F32) -> int:
        return int(logits.argmax())

    def probs(self, logits: F32, token: int, piece: Callable[[int], bytes]) -> TokenProbs:
        return before_sampling(logits, token, self.n_probs, piece)

    def accept(self, token: int) -> None:
        assert not self.closed

    def accept_prompt(self, tokens: I32) -> None: ...

    def close(self) -> None:
        self.closed = True


class FakeModel:
    """Decoder and hooks over the same cells."""

    def __init__(self, n_cells: int, n_batch: int, block_size: int) -> None:
        self.n_cells, self.n_batch, self.n_vocab = n_cells, n_batch, N_VOCAB
        self.layers = LAYERS
        self.layout = RecordLayout.of(LAYERS, block_size, "f32")
        self.position = np.full(n_cells, -1, np.int32)
        self.seq = np.full(n_cells, -1, np.int32)
        self.baked = np.full(n_cells, -1, np.int32)
        self.k = np.zeros((len(LAYERS), n_cells, _D), np.float32)  # raw; `baked` stands for the rotation
        self.v = np.zeros((len(LAYERS), n_cells, 4), np.float32)
        self.n_moves = np.zeros(n_cells, np.int32)  # since K was computed or written
        self.forced: list[int] = []  # what the next logits choose
        self.fail: dict[int, int] = {}  # number of a decode call -> its return code
        self.before_decode: Callable[[Batch], None] = lambda batch: None
        self.batches: list[list[tuple[int, int, int]]] = []  # (sequence, view position, token)
        self.writes: list[int] = []  # tokens written by each call of write_blocks
        self.n_moved = self.n_shown = 0  # tokens
        self.n_calls = 0
        self.auto_place = False  # choose cells itself, as llama.cpp does without hooks
        self._placed: I32 = np.zeros(0, np.int32)
        self._rows: tuple[I32, I32] = (self._placed, self._placed)
        self._row_k: NDArray[np.float32] = np.zeros((len(LAYERS), 0, _D), np.float32)
        self._q_on = False
        self._logits: dict[int, F32] = {}

    # Decoder

    def decode(self, batch: Batch) -> int:
        number, self.n_calls = self.n_calls, self.n_calls + 1
        self.before_decode(batch)
        cells = self._placed
        if self.auto_place:
            cells = np.flatnonzero(self.position < 0)[: batch.n].astype(np.int32)
        assert len(cells) == batch.n and np.all(self.position[cells] == -1), "cells of a batch must be empty"
        rc = self.fail.pop(number, 0)
        if rc:
            for seq, position in zip(batch.seqs, batch.positions, strict=True):
                self.remove(int(seq), int(position))
            return rc
        self.position[cells], self.seq[cells] = batch.positions, batch.seqs
        self.baked[cells], self.n_moves[cells] = batch.positions, 0
        for seq in np.unique(batch.seqs):
            self._compute(cells[batch.seqs == seq], batch.tokens[batch.seqs == seq])
        self.batches.append(
            list(zip(batch.seqs.tolist(), batch.positions.tolist(), batch.tokens.tolist(), strict=True))
        )
        self._rows = batch.seqs.copy(), batch.positions.copy()
        self._row_k = self.k[:, cells].copy()
        self._logits = {i: self._logits_at(int(cells[i])) for i in range(batch.n) if batch.outputs[i]}
        return 0

    def _compute(self, cells: I32, tokens: I32) -> None:
        """K and V of new tokens of one sequence, in order of their positions."""
        old = self.seq == self.seq[cells[0]]
        old[cells] = False
        assert np.array_equal(self.position[old], self.baked[old]), (
            "a cell is shown where it is not baked for"
        )
        assert np.array_equal(self.k[0, old, 6], self.v[0, old, 0]), "K and V of different tokens"
        positions = self.position[old]
        assert len(np.unique(positions)) == len(positions), "two tokens at one view position"
        assert np.all(positions < self.position[cells[0]]), "tokens come at the end of the view"
        attended = int(np.sum(_mix(positions, self.k[0, old, 6], self.k[0, old, 7])))
        for cell, token in zip(cells.tolist(), tokens.tolist(), strict=True):
            fingerprint = (attended + token) % _MODULUS
            self.k[:, cell, :6] = _MEANING[token] + _LAYER_SHIFT
            self.k[:, cell, 6:8] = token, fingerprint
            self.v[:, cell] = token, fingerprint, 0, 0
            attended += int(_mix(self.position[cell], token, fingerprint))

    def _logits_at(self, cell: int) -> F32:
        logits = np.zeros(N_VOCAB, np.float32)
        choice = self.forced.pop(0) if self.forced else 10 + int(self.k[0, cell, 7]) % 80
        logits[choice] = 1.0
        return logits

    def logits(self, index: int) -> F32:
        return self._logits[index]

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
        self.baked[mine] += delta
        return True

    # Hooks

    def capture(self, *, k: bool, q: bool) -> None:
        self._q_on = q

    def place(self, cells: I32) -> None:
        self._placed = cells.copy()

    def captured(self) -> tuple[I32, I32]:
        return self._rows

    def stage_out(self, record: NDArray[np.uint8], slot0: int, rows: I32, cells: I32) -> None:
        assert slot0 + len(rows) <= self.layout.block_size
        for i in range(len(LAYERS)):
            self._record_k(record, i)[slot0 : slot0 + len(rows)] = self._row_k[i, rows]
            self._record_v(record, i)[slot0 : slot0 + len(rows)] = self.v[i, cells]

    def read_q(self, rows: I32, layers: Collection[int] | None = None) -> list[F32]:
        assert self._q_on, "Q was not captured"
        out = []
        for i, layer in enumerate(LAYERS):
            if layer.cache == 0 and (layers is None or layer.il in layers):
                q = np.zeros((len(rows), layer.n_head, _D), np.float32)
                q[:, :, :6] = self._row_k[i, rows][:, None, :6]
                out.append(q)
        return out

    def write_blocks(self, seq: int, blocks: Sequence[BlockWrite]) -> None:
        self.writes.append(sum(len(b.cells) for b in blocks))
        for b in blocks:
            assert np.all(self.position[b.cells] == -1), "a block is written into an occupied cell"
            slots = slice(b.slot0, b.slot0 + len(b.cells))
            for i in range(len(LAYERS)):
                self.k[i, b.cells] = self._record_k(b.record, i)[slots]
                self.v[i, b.cells] = self._record_v(b.record, i)[slots]
            assert np.array_equal(self.k[0, b.cells, 6], b.tokens), "a record of other tokens"
            positions = np.arange(b.pos0, b.pos0 + len(b.cells))
            self.position[b.cells] = self.baked[b.cells] = positions
            self.seq[b.cells], self.n_moves[b.cells] = seq, 0

    def move(self, seq: int, cells: I32, positions: I32) -> None:
        assert np.all(self.seq[cells] == seq)
        self.position[cells] = self.baked[cells] = positions
        self.n_moves[cells] += 1
        self.n_moved += len(cells)

    def show(self, seq: int, cells: I32, positions: I32, tokens: I32 | None = None) -> None:
        assert np.all(self.position[cells] == -1) and np.array_equal(self.baked[cells], positions)
        assert tokens is not None and np.array_equal(self.k[0, cells, 6], tokens), (
            "hidden rows of other tokens"
        )
        self.position[cells], self.seq[cells] = positions, seq
        self.n_shown += len(cells)

    def free(self, cells: I32) -> None:
        self.position[cells] = self.seq[cells] = -1

    def cells(self) -> tuple[I32, I32]:
        return self.position.copy(), self.seq.copy()

    def close(self) -> None: ...

    # For tests

    def _record_k(self, record: NDArray[np.uint8], i: int) -> NDArray[np.float32]:
        n = self.layout.block_size
        at = self.layout.k_offsets[i]
        return record[at : at + n * _D * 4].view(np.float32).reshape(n, _D)

    def _record_v(self, record: NDArray[np.uint8], i: int) -> NDArray[np.float32]:
        n = self.layout.block_size
        at = self.layout.v_offsets[i]
        return record[at : at + n * 16].view(np.float32).reshape(n, 4)

    def tokens_of(self, record: NDArray[np.uint8], count: int) -> list[int]:
        """Tokens whose rows a record holds."""
        return [int(t) for t in self._record_k(record, 0)[:count, 6]]

    def fingerprints_of(self, record: NDArray[np.uint8], count: int) -> list[int]:
        """What the tokens of a record had attended to when they were evaluated."""
        return [int(t) for t in self._record_k(record, 0)[:count, 7]]

    def visible(self, seq: int) -> list[tuple[int, int]]:
        """(view position, token) of the cells of a sequence, by position."""
        mine = self.seq == seq
        return sorted(zip(self.position[mine].tolist(), self.k[0, mine, 6].astype(int).tolist(), strict=True))


def fake_core(model: FakeModel, settings: Settings, n_train: int, *, hooks: bool = True) -> EngineCore:
    core = EngineCore(
        model=cast(
            Any,
            SimpleNamespace(
                vocab=FakeVocab(),
                arch="fake",
                n_ctx_train=n_train,
                chat_template=None,
                info=SimpleNamespace(fingerprint=FINGERPRINT, name="fake", arch="fake"),
            ),
        ),
        decoder=model,
        hooks=cast(Any, model) if hooks else None,
        pool=CellPool(model.n_cells),
        settings=settings,
        n_view=min(settings.n_ctx or n_train, n_train),
    )
    core.scorer = make_scorer(settings)
    core.calibration = find(settings, FINGERPRINT)
    return core


def make_model(settings: Settings, n_train: int = 10_000) -> FakeModel:
    """A model with the cells that the engine would give it."""
    n_view = min(settings.n_ctx or n_train, n_train)
    n_cells = settings.n_parallel * (n_view + int(settings.slack * n_view))
    return FakeModel(n_cells, settings.n_ubatch, settings.block_size)


def fake_resources(model: FakeModel, settings: Settings, n_train: int = 10_000) -> Resources:
    return Resources(fake_core(model, settings, n_train), model.close)


def check_before_decode(model: FakeModel, sessions: Sequence[Session]) -> None:
    """From now on every decode checks that the cells show what the sessions' views say: the right token at
    the right view position in every cell, each token once."""

    def check(batch: Batch) -> None:
        for session in sessions:
            seq = session.view.seq
            if seq not in batch.seqs:
                continue
            residents = list(session.view)
            cells = np.concatenate([np.zeros(0, np.int32), *(r.cells for r in residents)])
            positions = [np.arange(r.position, r.position + r.part.count) for r in residents]
            tokens = [session.history.tokens(r.part.start, r.part.end) for r in residents]
            assert np.array_equal(np.sort(cells), np.flatnonzero(model.seq == seq)), (
                "cells that are not the view"
            )
            if residents:
                assert np.array_equal(model.position[cells], np.concatenate(positions))
                assert np.array_equal(model.k[0, cells, 6], np.concatenate(tokens)), "a cell of another token"
            mine = batch.seqs == seq
            n = int(mine.sum())
            new, end = batch.positions[mine], int(session.view.end)
            assert np.array_equal(new, np.arange(new[0], new[0] + n)), "a gap in positions"
            start = int(new[0])
            if not session.view.original:
                assert start == session.view.n_tokens, "packed positions do not go on"
                windows = np.lib.stride_tricks.sliding_window_view(session.history.tokens(end), n)
                start = end + int(np.flatnonzero(np.all(windows == batch.tokens[mine], axis=1))[0])
            assert start >= end
            assert np.array_equal(batch.tokens[mine], session.history.tokens(start, start + n))
            assert session.view.n_tokens + n <= session.budget.n_view, "more tokens than the view holds"

    model.before_decode = check
