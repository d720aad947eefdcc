"""Attention mass of an answer's tokens, against the formula written out."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kvmem_llama.memory.attending import _mass
from kvmem_llama.native.layout import LayerInfo


def layer(n_head: int, n_head_kv: int, d: int) -> LayerInfo:
    fields = {field.name: 0 for field in dataclasses.fields(LayerInfo)}
    return LayerInfo(**{**fields, "n_head": n_head, "n_head_kv": n_head_kv, "d_k": d, "scale": 0.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_head", "n_head_kv"), [(1, 1), (4, 2), (6, 1)])
def test_mass_is_the_mean_softmax_of_what_each_token_can_see(n_head: int, n_head_kv: int) -> None:
    rng = np.random.default_rng(0)
    n, n_view, d = 3, 7, 4
    q = rng.normal(size=(n, n_head, d)).astype(np.float32)
    k = rng.normal(size=(n_view + n, n_head_kv, d)).astype(np.float32)
    expected = np.zeros(n_view)
    for i in range(n):
        for head in range(n_head):
            keys = k[: n_view + i + 1, head * n_head_kv // n_head]
            weights = [math.exp(0.5 * float(np.dot(q[i, head], key))) for key in keys]
            expected += np.array(weights[:n_view]) / sum(weights)
    found = _mass(layer(n_head, n_head_kv, d), q, k, n_view)
    assert found == pytest.approx(expected / (n * n_head), rel=1e-5)
