"""Probabilities of tokens, as llama-server tells them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvmem_llama.engine.token_probs import TokenProbs


def probs_json(probs: Sequence[TokenProbs], *, after_sampling: bool) -> list[dict[str, Any]]:
    """after_sampling: probabilities rather than their logarithms."""
    return [
        _one(p.token, p.piece, p.logprob, after_sampling)
        | {
            ("top_probs" if after_sampling else "top_logprobs"): [
                _one(token, piece, logprob, after_sampling) for token, piece, logprob in p.top
            ]
        }
        for p in probs
    ]


def _one(token: int, piece: bytes, logprob: float, after_sampling: bool) -> dict[str, Any]:
    number = {"prob": _f32(math.exp(logprob))} if after_sampling else {"logprob": _f32(logprob)}
    return {"id": token, "token": whole_text(piece), "bytes": list(piece)} | number


def whole_text(piece: bytes) -> str:
    """The text of bytes without a character that is cut at the end."""
    for n in range(1, min(4, len(piece)) + 1):
        byte = piece[-n]
        if (
            (byte & 0xE0 == 0xC0 and n < 2)
            or (byte & 0xF0 == 0xE0 and n < 3)
            or (byte & 0xF8 == 0xF0 and n < 4)
        ):
            piece = piece[:-n]
            break
    return piece.decode("utf-8", "replace")


def _f32(number: float) -> float:
    return float(np.float32(number))
