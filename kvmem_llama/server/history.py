"""One history that requests are answered in, and the right to use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ..native.layout import I32
from ..store.names import Place
from ..workspace import Workspace


class History:
    """One history. Its fields change under the lock of `Histories`."""

    def __init__(self, owner: str, name: str | None, *, is_auto: bool, place: Place | None = None) -> None:
        """name: in the store; None: it is in RAM only. is_auto: no client has named it."""
        self.owner: Final = owner
        self.name: Final = name
        self.is_auto: Final = is_auto
        self.place: Final = place  # of one that was found on disk
        self.workspace: Workspace | None = None
        self.prompt_end = 0
        self.used = 0
        self.is_busy = False
        self.tokens: I32 = np.empty(0, np.int32)
        self.is_read = place is None  # `tokens` are there
        self.n_head = 0  # tokens of instructions at its beginning
        self.n_pinned = 0  # of these, kept in every view
        self.is_unfinished = False  # `tokens` were read, but no step over them has ended

    def will_hold(self, tokens: I32) -> None:
        """It is busy with a prompt whose client has gone, and will soon hold what was read of it. Any
        thread, without a lock: what comes after that says the same, or more."""
        if self.is_busy and not len(self.tokens):
            self.prompt_end = len(tokens)
            self.tokens = tokens

    @property
    def is_stored(self) -> bool:
        return self.name is not None


@dataclass(frozen=True, slots=True)
class Lease:
    """A history for one request; nobody else uses it until it is given back."""

    history: History
    workspace: Workspace
    is_new: bool = False  # it was made for this request
    append: bool = False  # the prompt comes after all that is stored, not in its place
    start: int = 0  # token at which the conversation begins that the prompt goes on with
    source: History | None = None  # leased, too: what its first step takes over from
