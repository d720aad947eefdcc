"""Where the strings of a GGUF array begin: a vocabulary has some 100,000, too many for a loop."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_LENGTH: Final = np.dtype("<u8")  # stands before each string
_PIECE: Final = 1 << 20  # bytes: of what a hostile file makes of them, some 30 times as many are in memory
_SHORT: Final = 256  # bytes; a longer string is found by walking to it


def starts_of(data: bytes, n: int) -> NDArray[np.int64]:
    """[<= n] where each string's length stands, of strings end to end from byte 0 on. Those whose length does
    not lie in `data` as a whole are left out; the last string may end beyond it."""
    found: list[NDArray[np.int64]] = []
    at = 0
    while n > 0 and at + _LENGTH.itemsize <= len(data):
        piece = data[at : at + _PIECE]
        starts = _starts(piece, n)
        found.append(starts + at)
        n -= len(starts)
        last = int(starts[-1])
        at += last + _LENGTH.itemsize + int(np.frombuffer(piece, _LENGTH, 1, last)[0])
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _starts(data: bytes, n: int) -> NDArray[np.int64]:
    """Those of one piece, at least one.

    A short string may begin wherever a small number stands. A run of such places of which each is where the
    one before leads to is taken whole; the rest is walked one by one.
    """
    size = len(data)
    numbers = np.ndarray(size - _LENGTH.itemsize + 1, _LENGTH, data, strides=(1,))  # at every byte
    places = np.flatnonzero(numbers < _SHORT)
    leads_on = places[:-1] + _LENGTH.itemsize + numbers[places[:-1]].astype(np.int64) == places[1:]
    ends = np.append(np.flatnonzero(~leads_on), len(places) - 1)  # last of each run, by number of the place
    found: list[NDArray[np.int64]] = []
    at = 0
    while n and at + _LENGTH.itemsize <= size:
        i = int(np.searchsorted(places, at))
        if i < len(places) and places[i] == at:
            run = places[i : min(int(ends[np.searchsorted(ends, i)]) + 1, i + n)]
        else:
            run = np.array([at])
        found.append(run)
        n -= len(run)
        last = int(run[-1])
        at = last + _LENGTH.itemsize + int(numbers[last])
    return np.concatenate(found)
