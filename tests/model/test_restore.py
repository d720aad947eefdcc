"""Cells rebuilt from records equal the cells that were never evicted; moves equal the public API's."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from plain_loop import Plain, Scenario, prompt

from kvmem_llama.native.hooks import Hooks
from kvmem_llama.native.layout import BlockWrite
from kvmem_llama.native.library import load

N_PROMPT, N_QUERY = 2000, 32


class Loop:
    """A context with hooks, filled cell by cell from cell 0."""

    def __init__(self, model, type_kv: str, raw: str, n_ctx: int = 2304, **kw) -> None:
        self.plain = Plain(Scenario(model=str(model), type_kv=type_kv, n_ctx=n_ctx, **kw))
        self.hooks = Hooks(load(), self.plain.ctx_address, n_rows=128, raw_k_type=raw)
        self.records: list[np.ndarray] = []
        self.tokens = np.zeros(0, np.int32)

    def feed(self, tokens: np.ndarray, *, keep: bool = True) -> np.ndarray:
        """Decode at positions and cells n, n+1, ...; returns the last logits."""
        start = len(self.tokens)
        for i in range(0, len(tokens), 128):
            part = tokens[i : i + 128]
            cells = np.arange(start + i, start + i + len(part), dtype=np.int32)
            self.hooks.capture(k=keep, q=False)
            self.hooks.place(cells)
            assert self.plain.decode(part, cells, [0] * len(part), {len(part) - 1}) == 0
            if keep:
                self._record(cells)
        if keep:
            self.tokens = np.concatenate([self.tokens, tokens])
        return self.plain.logits(len(part) - 1)

    def _record(self, cells: np.ndarray) -> None:
        for row, cell in enumerate(cells):
            if cell % 32 == 0:
                self.records.append(np.zeros(self.hooks.layout.nbytes, np.uint8))
            one = np.array([row], np.int32), np.array([cell], np.int32)
            self.hooks.stage_out(self.records[-1], int(cell) % 32, *one)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.plain.ctx), True)

    def restore(self, *, graph: bool = False, shift: int = 0) -> None:
        writes = []
        for b, record in enumerate(self.records):
            cells = np.arange(b * 32, min((b + 1) * 32, len(self.tokens)), dtype=np.int32)
            writes.append(BlockWrite(record, 0, cells, b * 32 + shift, self.tokens[cells]))
        self.hooks.write_blocks(0, writes, graph=graph)

    def all_cells(self) -> np.ndarray:
        return np.arange(len(self.tokens), dtype=np.int32)

    def close(self) -> None:
        self.hooks.close()
        self.plain.close()


@pytest.fixture
def loops():
    made: list[Loop] = []

    def make(*args, **kw) -> Loop:
        made.append(Loop(*args, **kw))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


def row_error(got: list[np.ndarray], want: list[np.ndarray]) -> tuple[float, float]:
    """Relative L2 of f16 K rows over everything, and of the worst row."""
    total_d = total_w = worst = 0.0
    for g8, w8 in zip(got, want, strict=True):
        g, w = (a.view(np.float16).astype(np.float64) for a in (g8, w8))
        d2, w2 = ((g - w) ** 2).sum(1), (w**2).sum(1)
        total_d, total_w = total_d + d2.sum(), total_w + w2.sum()
        worst = max(worst, float(np.sqrt(d2 / w2).max()))
    return float(np.sqrt(total_d / total_w)), worst


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("type_kv", ["f16", "q8_0", "q4_0"])
def test_rebuild_from_f32_records_gives_the_same_bytes_and_logits(loops, smollm2, type_kv):
    loop = loops(smollm2, type_kv, "f32")
    loop.feed(prompt(N_PROMPT, 1))
    before = loop.hooks.read_rows(loop.all_cells())
    want = loop.feed(prompt(N_QUERY, 2), keep=False)
    for graph in (False, True):
        loop.clear()
        assert not same(
            loop.hooks.read_rows(loop.all_cells())[0], before[0]
        )  # the rewrite starts from zeroed cells
        loop.restore(graph=graph)
        after = loop.hooks.read_rows(loop.all_cells())
        assert same(after[0], before[0]) and same(after[1], before[1])
        assert np.array_equal(loop.feed(prompt(N_QUERY, 2), keep=False), want)


def test_rebuild_of_a_sliding_window_model_gives_the_same_bytes_and_logits(loops, gemma3):
    loop = loops(gemma3, "f16", "f32", n_ctx=1280)
    loop.feed(prompt(1000, 1))
    before = loop.hooks.read_rows(loop.all_cells())
    want = loop.feed(prompt(N_QUERY, 2), keep=False)
    loop.clear()
    loop.restore()
    after = loop.hooks.read_rows(loop.all_cells())
    assert same(after[0], before[0]) and same(after[1], before[1])
    assert np.array_equal(loop.feed(prompt(N_QUERY, 2), keep=False), want)


def test_rebuild_from_f16_records_rounds_k_once_more_and_leaves_v_alone(loops, smollm2):
    loop = loops(smollm2, "f16", "f16")
    loop.feed(prompt(N_PROMPT, 1))
    before = loop.hooks.read_rows(loop.all_cells())
    for graph in (False, True):
        loop.clear()
        loop.restore(graph=graph)
        after = loop.hooks.read_rows(loop.all_cells())
        assert same(after[1], before[1])
        overall, worst = row_error(after[0], before[0])
        assert 0 < overall <= 4e-4 and worst <= 1e-3


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
def test_a_move_equals_seq_rm_and_seq_add(loops, smollm2, type_kv):
    ids, tail = prompt(640, 1), prompt(1, 3)
    ours, theirs = loops(smollm2, type_kv, "f16"), loops(smollm2, type_kv, "f16")
    for loop in (ours, theirs):
        loop.feed(ids)
    ours.hooks.free(np.arange(128, 320, dtype=np.int32))
    moved = np.arange(320, 640, dtype=np.int32)
    ours.hooks.move(0, moved, moved - 192)

    memory = llama_cpp.llama_get_memory(theirs.plain.ctx)
    assert llama_cpp.llama_memory_seq_rm(memory, 0, 128, 320)
    llama_cpp.llama_memory_seq_add(memory, 0, 320, -1, -192)
    theirs.hooks.capture(k=False, q=False)
    theirs.hooks.place(np.array([640], np.int32))
    assert theirs.plain.decode(tail, [448], [0], {0}) == 0  # the shift is applied by the next decode

    assert same(ours.hooks.read_rows(moved)[0], theirs.hooks.read_rows(moved)[0])
    pos, _ = ours.hooks.cells()
    assert list(pos[moved]) == list(moved - 192)


def test_drift_stays_small_under_the_move_limit_and_grows_without_it(loops, smollm2):
    loop = loops(smollm2, "f16", "f32", n_ctx=1024)
    loop.feed(prompt(512, 1))
    cells = loop.all_cells()
    fresh = loop.hooks.read_rows(cells)[0]
    rng = np.random.default_rng(5)
    errors = {}
    for n_moves in (2, 8, 62):
        loop.clear()
        loop.restore()
        for _ in range(n_moves - 1):
            loop.hooks.move(0, cells, cells + rng.integers(1, 4000, dtype=np.int32))
        loop.hooks.move(0, cells, cells)
        errors[n_moves] = row_error(loop.hooks.read_rows(cells)[0], fresh)
    assert errors[8][0] <= 8e-4 and errors[8][1] <= 2e-3
    assert errors[62][0] > 1.5 * errors[8][0] > 1.5 * errors[2][0] > 0


def test_raw_k_read_back_from_cells_is_the_captured_raw_k(loops, smollm2):
    loop = loops(smollm2, "f16", "f32", n_ctx=512)
    loop.feed(prompt(100, 1))
    back = loop.hooks.read_raw_k(loop.all_cells())
    layout = loop.hooks.layout
    for i, info in enumerate(loop.hooks.layers):
        want = np.concatenate([layout.raw_k(r, i, info, 32) for r in loop.records])[:100]
        assert np.linalg.norm(back[i] - want) <= 1e-3 * np.linalg.norm(want)


def test_hidden_cells_keep_their_rows_and_come_back(loops, smollm2):
    loop = loops(smollm2, "f16", "f16", n_ctx=512)
    loop.feed(prompt(256, 1))
    want = loop.feed(prompt(8, 2), keep=False)
    cells = np.arange(64, 256, dtype=np.int32)
    tail = np.arange(256, 264, dtype=np.int32)
    loop.hooks.free(np.concatenate([cells, tail]))
    assert (loop.hooks.cells()[0][cells] == -1).all()
    loop.hooks.show(0, cells, cells)
    assert np.array_equal(loop.feed(prompt(8, 2), keep=False), want)
