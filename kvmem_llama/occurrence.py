"""Whether a text that is about to be read is in the history already."""

from __future__ import annotations

from typing import Final

import numpy as np

from .native.layout import I32

_EDGE: Final = 4  # tokens at both ends of a text that may depend on what stands beside it
_N_LEAST: Final = 16  # tokens: shorter texts occur by chance
_N_PROBED: Final = 32  # first tokens, and last ones, by which places are ruled out
_N_PLACES: Final = 16  # newest places that are compared whole


def occurs(tokens: I32, history: I32) -> bool:
    """Whether the text of `tokens` [n] stands in `history` [n_tokens], up to its outermost tokens."""
    inner = tokens[_EDGE : len(tokens) - _EDGE]
    n = len(inner)
    if n < _N_LEAST or n > len(history):
        return False
    places = np.flatnonzero(history[: len(history) - n + 1] == inner[0])
    first = min(n, _N_PROBED)
    for i in (*range(1, first), *range(max(n - _N_PROBED, first), n)):
        places = places[history[places + i] == inner[i]]
    return any(np.array_equal(history[at : at + n], inner) for at in places[-_N_PLACES:])
