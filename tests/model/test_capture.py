"""Captured raw Q and K are what goes into the rotation; capture is complete for batches of any size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plain_loop import Plain, Scenario, prompt
from tiny_models import write_model

from kvmem_llama.errors import HookFailed, ModelUnsupported
from kvmem_llama.native.hooks import Hooks
from kvmem_llama.native.library import load

N = 48


@pytest.fixture(params=["smollm2", "gemma3", "llama", "qwen2", "qwen3"])
def model(request, tmp_path) -> Path:
    if request.param in ("smollm2", "gemma3"):
        return request.getfixturevalue(request.param)
    return write_model(tmp_path / f"{request.param}.gguf", request.param)


def hooked(model: Path, n_rows: int = 128, **kw) -> tuple[Plain, Hooks]:
    plain = Plain(Scenario(model=str(model), n_ctx=256, **kw))
    return plain, Hooks(load(), plain.ctx_address, n_rows=n_rows, raw_k_type="f32")


def test_rotated_captures_equal_q_and_k_after_the_rope_node_of_the_stock_library(model, stock_lib, tmp_path):
    out = tmp_path / "stock.npz"
    env = dict(os.environ, LLAMA_CPP_LIB_PATH=str(stock_lib))
    script = Path(__file__).with_name("eval_callback.py")
    subprocess.run([sys.executable, str(script), str(model), str(N), str(out)], check=True, env=env)
    stock = np.load(out)

    plain, hooks = hooked(model)
    ids = prompt(N, 11, n_vocab=min(40000, plain.n_vocab))
    hooks.capture(k=True, q=True)
    assert plain.decode(ids, range(N), [0] * N, {N - 1}) == 0
    rows, positions = np.arange(N, dtype=np.int32), np.arange(N, dtype=np.int32)
    q, k = hooks.read_q(rows), hooks.read_k(rows)
    full = [i for i, layer in enumerate(hooks.layers) if layer.cache == 0]
    for i, layer in enumerate(hooks.layers):
        assert layer.rope
        assert np.array_equal(hooks.rotate(i, k[i], positions), stock[f"K-{layer.il}"])
    for i, rows_q in zip(full, q, strict=True):
        assert np.array_equal(hooks.rotate(i, rows_q, positions), stock[f"Q-{hooks.layers[i].il}"])
    hooks.close()
    plain.close()


def test_rows_do_not_depend_on_the_batch_split_in_exact_mode(smollm2):
    got = []
    for n_ubatch in (1, 7, 48):
        plain, hooks = hooked(smollm2, n_ubatch=n_ubatch, exact=True)
        hooks.set_exact(True)
        ids, rows = prompt(N, 11), []
        for i in range(0, N, n_ubatch):
            part = ids[i : i + n_ubatch]
            hooks.capture(k=True, q=False)
            assert plain.decode(part, range(i, i + len(part)), [0] * len(part)) == 0
            rows.append(hooks.read_k(np.arange(len(part), dtype=np.int32)))
        got.append([np.concatenate(layer) for layer in zip(*rows, strict=True)])
        hooks.close()
        plain.close()
    for other in got[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(got[0], other, strict=True))


def test_a_graph_built_without_capture_is_not_reused_with_it(smollm2):
    plain, hooks = hooked(smollm2)
    for step, on in enumerate((False, True, False, True)):
        hooks.capture(k=on, q=False)
        assert plain.decode([5], [step], [0], {0}) == 0
        seq, pos = hooks.captured()
        assert (list(seq), list(pos)) == (([0], [step]) if on else ([], []))
    hooks.close()
    plain.close()


def test_more_tokens_than_rows_and_foreign_rows_are_refused(smollm2):
    plain = Plain(Scenario(model=str(smollm2), n_ctx=256, n_ubatch=32))
    hooks = Hooks(load(), plain.ctx_address, n_rows=32)
    hooks.capture(k=True, q=False)
    for i in range(2):
        assert plain.decode(prompt(32, i), range(32 * i, 32 * i + 32), [0] * 32) == 0
    with pytest.raises(HookFailed, match="more tokens"):
        hooks.captured()
    hooks.capture(k=True, q=False)
    assert plain.decode([5], [64], [0]) == 0
    with pytest.raises(HookFailed, match="row 1 was not captured"):
        hooks.read_k(np.array([1], np.int32))
    hooks.close()
    plain.close()


def test_occupied_unknown_and_missing_cells_are_refused_and_nothing_changes(smollm2):
    plain, hooks = hooked(smollm2)
    hooks.capture(k=True, q=False)
    hooks.place(np.array([3, 9], np.int32))
    assert plain.decode([5, 6], [0, 1], [0, 0]) == 0
    with pytest.raises(HookFailed, match="cell 9 is occupied"):
        hooks.place(np.array([9], np.int32))
    with pytest.raises(HookFailed, match="does not exist"):
        hooks.free(np.array([256], np.int32))
    hooks.place(np.array([10], np.int32))
    assert plain.decode([5, 6], [2, 3], [0, 0]) != 0  # one cell for two tokens
    pos, seq = hooks.cells()
    assert (
        list(np.flatnonzero(pos >= 0)) == [3, 9] and list(pos[[3, 9]]) == [0, 1] and set(seq[[3, 9]]) == {0}
    )
    hooks.close()
    plain.close()


def test_a_placed_batch_may_skip_positions_but_not_go_back(smollm2):
    plain, hooks = hooked(smollm2)

    def decode(position: int, cell: int) -> int:
        hooks.capture(k=True, q=False)
        hooks.place(np.array([cell], np.int32))
        return plain.decode([5], [position], [0], {0})

    assert decode(0, 0) == 0
    assert decode(7, 1) == 0
    assert decode(7, 2) != 0 and decode(3, 2) != 0
    assert decode(8, 2) == 0
    hooks.close()
    plain.close()


@pytest.mark.parametrize(("arch", "why"), [("gpt2", "learned"), ("lfm2", "recurrent state")])
def test_models_whose_blocks_cannot_be_moved_are_refused_by_name(arch, why, tmp_path):
    plain = Plain(Scenario(model=str(write_model(tmp_path / "m.gguf", arch)), n_ctx=256))
    with pytest.raises(ModelUnsupported, match=why):
        Hooks(load(), plain.ctx_address, n_rows=128, arch=arch)
    assert plain.decode([5], [0], [0], {0}) == 0  # the context still works without hooks
    plain.close()
