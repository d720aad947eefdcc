"""While the view holds everything, the patched library with capture on gives the stock library's logits."""

from __future__ import annotations

import numpy as np
import pytest
from plain_loop import Plain, Scenario, run, run_stock

from kvmem_llama.native.hooks import Hooks
from kvmem_llama.native.library import load


def run_hooked(sc: Scenario) -> np.ndarray:
    """The plain loop with capture of K and Q, cells placed explicitly, ascending as by the stock search."""
    plain = Plain(sc)
    hooks = Hooks(load(), plain.ctx_address, n_rows=max(sc.n_ubatch, 32), raw_k_type="f16")
    sent: list[tuple[list[int], list[int]]] = []
    n_placed = 0

    def before(seqs, positions):
        nonlocal n_placed
        sent.append((list(seqs), list(positions)))
        hooks.capture(k=True, q=True)
        hooks.place(np.arange(n_placed, n_placed + len(sent[-1][0]), dtype=np.int32))
        n_placed += len(sent[-1][0])

    def after():
        seq, pos = hooks.captured()
        assert (list(seq), list(pos)) == sent[-1]

    try:
        return run(plain, sc, before, after)
    finally:
        hooks.close()
        plain.close()


@pytest.mark.parametrize("n_ubatch", [1, 7, 32, 128, 512])
@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
def test_logits_are_bit_equal_to_the_stock_library(smollm2, stock_lib, tmp_path, type_kv, n_ubatch):
    n_prompt = 600 if n_ubatch == 512 else 150
    sc = Scenario(model=str(smollm2), type_kv=type_kv, n_ubatch=n_ubatch, n_prompt=n_prompt, n_greedy=64)
    assert np.array_equal(run_hooked(sc), run_stock(sc, stock_lib, tmp_path / "stock.npy"))


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
def test_two_interleaved_sequences_are_bit_equal_to_the_stock_library(smollm2, stock_lib, tmp_path, type_kv):
    sc = Scenario(
        model=str(smollm2), type_kv=type_kv, n_ubatch=32, n_prompt=100, n_greedy=32, n_seq=2, interleave=True
    )
    assert np.array_equal(run_hooked(sc), run_stock(sc, stock_lib, tmp_path / "stock.npy"))


def test_a_sliding_window_model_is_bit_equal_to_the_stock_library(gemma3, stock_lib, tmp_path):
    sc = Scenario(model=str(gemma3), n_ctx=1280, n_prompt=700, n_greedy=16)
    assert np.array_equal(run_hooked(sc), run_stock(sc, stock_lib, tmp_path / "stock.npy"))
