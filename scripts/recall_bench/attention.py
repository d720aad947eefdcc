"""The oracle: where the question's tokens really look when they attend to the whole history."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.native.layout import F32, LayerInfo

from .passes import FullPass

F64 = NDArray[np.float64]


def attention_mass(layers: list[LayerInfo], history: list[F32], asked: FullPass, block: int) -> F64:
    """Softmax attention that falls on each block of the history, mean over layers, query heads and the
    question's tokens: [n_blocks]. The rest up to 1 falls on the question itself.

    layers: the full-attention ones. history: their K with RoPE, [n_history, n_head_kv, d] each.
    """
    n_history = len(history[0])
    total = np.zeros(n_history)
    for layer, keys, own, q in zip(layers, history, asked.k, asked.q, strict=True):
        k = np.concatenate([keys, own])  # [n, n_head_kv, d]
        m, n_head, d = q.shape
        group = n_head // k.shape[1]
        seen = np.arange(len(k)) <= np.repeat(asked.positions, group)[:, None]
        for head in range(k.shape[1]):
            rows = q[:, head * group : (head + 1) * group].reshape(m * group, d)
            logits = layer.scale * (rows @ k[:, head].T)  # [m * group, n]
            logits[~seen] = -np.inf
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            total += weights[:, :n_history].sum(axis=0) / (m * n_head)
    return np.add.reduceat(total, np.arange(0, n_history, block)) / len(layers)
