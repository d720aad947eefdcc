"""Probabilities of tokens, compared with NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from kvmem_llama.engine.token_probs import LOWEST, after_sampling, before_sampling


def piece(token: int) -> bytes:
    return b"<%d>" % token


@pytest.mark.parametrize("n_top", [0, 1, 7, 300, 1000])
def test_before_sampling_it_is_the_softmax_over_all_tokens(n_top: int) -> None:
    logits = np.random.default_rng(1).normal(0, 4, 300).astype(np.float32)
    wide = logits.astype(np.float64)
    want = wide - np.log(np.exp(wide).sum())
    probs = before_sampling(logits, 17, n_top, piece)
    assert probs.token == 17 and probs.piece == b"<17>"
    assert probs.logprob == pytest.approx(want[17], abs=1e-5)
    order = np.argsort(-want, kind="stable")[:n_top]
    assert [t for t, _, _ in probs.top] == order.tolist()
    assert [text for _, text, _ in probs.top] == [piece(t) for t in order]
    assert [p for _, _, p in probs.top] == pytest.approx(want[order].tolist(), abs=1e-5)


def test_large_logits_and_forbidden_tokens_give_finite_numbers() -> None:
    logits = np.array([3e38, -np.inf, 3e38, -3e38], dtype=np.float32)
    probs = before_sampling(logits, 1, 4, piece)
    assert probs.logprob == LOWEST
    assert [t for t, _, _ in probs.top] == [0, 2, 3, 1]
    assert probs.top[0][2] == pytest.approx(np.log(0.5)) and probs.top[3][2] == LOWEST
    assert all(np.isfinite(p) for _, _, p in probs.top)


def test_after_sampling_only_what_is_left_counts() -> None:
    ids, p = np.array([5, 9, 2, 7], dtype=np.int32), np.array([0.2, 0.5, 0.3, 0.0], dtype=np.float32)
    probs = after_sampling(ids, p, 2, 10, piece)
    assert probs.logprob == pytest.approx(np.log(0.3))
    assert [t for t, _, _ in probs.top] == [9, 2, 5]
    assert np.exp([x for _, _, x in probs.top]).sum() == pytest.approx(1)
    assert len(after_sampling(ids, p, 2, 1, piece).top) == 1
