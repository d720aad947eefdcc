"""How likely a chosen token was, and which ones were likeliest in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from .requests import F32, I32

LOWEST: Final = float(np.finfo(np.float32).min)
"""Stands for the logarithm of 0, as in llama.cpp: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenProbs:
    """logprob: natural logarithm of the probability, `LOWEST` for none.

    The probability is that of the logits over the whole vocabulary, or with `post_sampling_probs` the one
    that the samplers have left.
    """

    token: int
    piece: bytes  # its text in the answer; b"" for a control token
    logprob: float
    top: tuple[tuple[int, bytes, float], ...]  # token, its text, logprob; the likeliest first


def before_sampling(logits: F32, token: int, n_top: int, piece: Callable[[int], bytes]) -> TokenProbs:
    """The softmax over all logits, [n_vocab], of `token` and of the `n_top` likeliest ones; of equally likely
    ones the lower id comes first."""
    largest = logits.max()
    with np.errstate(over="ignore"):  # a processor of logits may say "never" with the lowest float
        log_sum = math.log(np.exp(logits - largest).sum(dtype=np.float64))

    def logprob(token: int) -> float:
        return max(float(logits[token]) - float(largest) - log_sum, LOWEST)

    n_top = min(n_top, len(logits))
    candidates = np.flatnonzero(logits >= np.partition(logits, -n_top)[-n_top]) if n_top else np.empty(0, int)
    top = candidates[np.argsort(-logits[candidates], kind="stable")][:n_top].tolist()
    return TokenProbs(token, piece(token), logprob(token), tuple((t, piece(t), logprob(t)) for t in top))


def after_sampling(ids: I32, p: F32, token: int, n_top: int, piece: Callable[[int], bytes]) -> TokenProbs:
    """ids, p: [n] tokens that the samplers have left and their probabilities, in any order. Those of
    probability 0 are no candidates."""
    found = p[ids == token]
    top = np.argsort(-p, kind="stable")[:n_top]
    return TokenProbs(
        token,
        piece(token),
        _log(float(found[0]) if len(found) else 1.0),
        tuple((int(ids[i]), piece(int(ids[i])), _log(float(p[i]))) for i in top if p[i] > 0),
    )


def _log(p: float) -> float:
    return math.log(p) if p > 0 else LOWEST
