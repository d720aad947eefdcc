"""The bytes that tokens stand for, one token after the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .requests import I32
from .vocab import Vocab


class TokenBytes:
    """Of the tokens of a text. Each different token is looked up once, however often it stands there."""

    def __init__(self, vocab: Vocab, tokens: I32) -> None:
        """tokens: [n] ids."""
        unique, self._where = np.unique(tokens, return_inverse=True)
        self._ids: list[int] = unique.tolist()
        self._pieces = [vocab.piece(token) for token in self._ids]
        self.sizes: NDArray[np.int64] = np.array([len(p) for p in self._pieces], np.int64)[self._where]
        """[n] bytes of each."""

    def data(self) -> bytes:
        """Of all of them."""
        return b"".join(self._pieces[i] for i in self._where.tolist())

    def which(self, test: Callable[[int], bool]) -> NDArray[np.bool_]:
        """[n] whether `test` holds of the token."""
        return np.array([test(token) for token in self._ids], np.bool_)[self._where]
