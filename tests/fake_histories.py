"""An engine whose workspaces are lists of tokens, for what decides in which of them a request is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvmem_llama.errors import StoreFailed, StoreFull, StoreLocked
from kvmem_llama.native.layout import I32
from kvmem_llama.settings import Settings


class LetterVocab:
    """A token is a byte; token 300 + n has two bytes, n and n + 1."""

    n_tokens = 600

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else bytes([token - 300, token - 299])

    def detokenize(self, tokens: I32) -> bytes:
        return b"".join(self.piece(int(token)) for token in tokens)


class FakeWorkspace:
    def __init__(self, engine: FakeEngine, name: str | None, tokens: I32) -> None:
        self.name = name
        self.tokens = tokens
        self.is_closed = False
        self.n_view = 256
        self.pins: list[tuple[int, int]] = []
        self.taken: tuple[FakeWorkspace, int] | None = None
        self._engine = engine

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def history(self) -> I32:
        return self.tokens

    def turns(self) -> tuple[Any, ...]:
        return ()

    def fork(self, name: str | None = None) -> FakeWorkspace:
        return self._engine.made(name, self.tokens)

    def take_over(self, other: FakeWorkspace, n_tokens: int) -> None:
        self.taken = other, n_tokens

    def answered(self, tokens: I32) -> None:
        """A step has ended: this is the history now."""
        self.tokens = np.asarray(tokens, np.int32)
        if self.name is not None:
            self._engine.stored[self.name] = self.tokens

    def stats(self) -> Any:
        return SimpleNamespace(pins=tuple(self.pins))

    def pin(self, start: int, end: int) -> None:
        self.pins.append((start, end))

    def close(self) -> None:
        self.is_closed = True
        if self._engine.close_fails:
            raise StoreFailed("somewhere", "no disk")


class FakeEngine:
    """`stored`: what would be on disk, by name."""

    def __init__(self, settings: Settings) -> None:
        model = SimpleNamespace(vocab=LetterVocab())
        self.core = SimpleNamespace(settings=settings, model=model, hooks=object())
        self.stored: dict[str, I32] = {}
        self.locked: set[str] = set()
        self.is_full = False  # there is no room for another workspace
        self.close_fails = False
        self.opened: list[FakeWorkspace] = []

    def workspace(self, name: str | None = None, *, create: bool = True) -> FakeWorkspace:
        if name in self.locked:
            raise StoreLocked(str(name), "somebody")
        tokens = np.empty(0, np.int32) if name is None else self.stored.get(name, np.empty(0, np.int32))
        return self.made(name, tokens)

    def made(self, name: str | None, tokens: I32) -> FakeWorkspace:
        if self.is_full and name not in (None, *self.stored):
            raise StoreFull("somewhere", 4096)
        workspace = FakeWorkspace(self, name, tokens)
        self.opened.append(workspace)
        if name is not None:
            self.stored[name] = tokens
        return workspace
