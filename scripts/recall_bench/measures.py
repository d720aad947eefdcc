"""Figures of one case, and how sure the mean of many is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.native.layout import F32, I32

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
N_RESAMPLES = 10_000


def coverage(evidence: I32, selected: I64, block: int) -> float:
    """Share of the evidence tokens (token positions) that lie in selected blocks."""
    return float(np.isin(evidence // block, selected).mean())


def share(mass: F64, selected: I64, of: I64) -> float:
    """Attention mass of the selected blocks as a share of that of the blocks `of`."""
    return float(mass[selected].sum() / mass[of].sum())


def log_softmax(logits: F32) -> F64:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def divergence(full: F32, other: F32) -> float:
    """KL(full || other) in nats, mean over the answer's tokens; logits [n_answer, n_vocab] each."""
    p, q = log_softmax(full), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def surprise(logits: F32, answer: I32) -> float:
    """Negative log-likelihood of the gold answer in nats, mean over its tokens."""
    return float(-log_softmax(logits)[np.arange(len(answer)), answer].mean())


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of paired differences with two 95% bootstrap bounds: over cases, and over histories with all their
    cases, for cases of one text are not independent of each other."""

    mean: float
    cases: tuple[float, float]
    histories: tuple[float, float]


def paired(a: Sequence[float], b: Sequence[float], groups: Sequence[str], seed: int = 0) -> Difference:
    """a - b, case by case; groups: the history of each case."""
    difference = np.asarray(a) - np.asarray(b)
    rng = np.random.default_rng(seed)
    n = len(difference)
    means = difference[rng.integers(0, n, (N_RESAMPLES, n))].mean(axis=1)
    names, number = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(number, difference), np.bincount(number)
    drawn = rng.integers(0, len(names), (N_RESAMPLES, len(names)))
    clustered = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return Difference(float(difference.mean()), _bound(means), _bound(clustered))


def _bound(means: F64) -> tuple[float, float]:
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
