"""The context that llama_cpp.Llama evaluates tokens in: a workspace, whose history is made what is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..engine.core import EngineCore
from ..engine.requests import Phase
from ..engine.vocab import Vocab
from ..errors import MandatoryTooLarge
from ..memory.report import StepResult
from ..native.layout import F32, I32
from ..workspace import Workspace
from ..workspace.by_hand import StepByHand


class Evaluation:
    """One history: every call gives all tokens that are wanted, and what is new of them is evaluated.

    New tokens are a step, which recalls; single tokens after it are its answer, until something else comes.
    """

    def __init__(self, workspace: Workspace, core: EngineCore, window: int) -> None:
        """window: tokens that the caller takes the view for."""
        self.workspace: Workspace = workspace
        self.last: StepResult | None = None
        settings = core.settings
        self._vocab: Final = core.model.vocab
        self._window: Final = min(window, core.n_view - settings.n_reserve)
        """Most tokens of which none is ever out of the view."""
        self._n_query: Final = min(settings.n_query, window // 2)
        self._n_tail: Final = min(settings.n_query_tail, window // 2)
        self._open: StepByHand | None = None
        self._n_open = 0  # tokens of the history with the open step's answer

    def extend(self, tokens: I32, n_known: int, question: bytes = b"", rows: PromptRows | None = None) -> F32:
        """Evaluates what is new of `tokens`, [n], of which the caller knows that the first `n_known` are not
        -> logits after the last one, [n_vocab].

        question: a text that a recall is asked with, where the tokens hold it. rows: takes the logits of all
            other tokens that are evaluated.
        Raises what a step raises, and then has forgotten the answer that was open.
        """
        n = len(tokens)
        try:
            if self._open is not None and n == n_known + 1 == self._n_open + 1:
                self._open.feed(int(tokens[-1]))
            else:
                self._begin(tokens, n_known, question, rows)
            assert self._open is not None
            logits = self._open.logits()
        except BaseException:
            self.cancel()
            raise
        if logits is None:
            self.finish()
            raise MandatoryTooLarge(n, self.workspace.n_view)
        if rows is not None:
            rows.settle(n)
        self._n_open = n
        return logits

    def finish(self) -> None:
        """Commits the open step, if there is one."""
        step, self._open = self._open, None
        if step is not None:
            self.last = step.finish()

    def cancel(self) -> None:
        """Undoes the open step, if there is one."""
        step, self._open = self._open, None
        if step is not None:
            step.cancel()
            with contextlib.suppress(Exception):  # the caller is told of what came before it
                step.result()

    def forget(self) -> None:
        """The caller's tokens are others now: what comes next is no answer to what was asked."""
        self._n_open = -1

    def _begin(self, tokens: I32, n_known: int, question: bytes, rows: PromptRows | None) -> None:
        self.finish()
        n, start, scored = len(tokens), None, None
        fits = n <= self._window
        if not fits:
            start = self._query_start(tokens, n_known, question)
            scored = np.ones(n, dtype=np.bool_)
            scored[start:] = [not self._vocab.is_control(int(token)) for token in tokens[start:]]
        self._open = self.workspace.step_by_hand(tokens, start, scored, spans=not fits, on_logits=rows)

    def _query_start(self, tokens: I32, n_known: int, question: bytes) -> int:
        """The first token that a recall is asked with: that of the question, or the first one that is new."""
        n = len(tokens)
        first = n - self._n_query  # of a prompt that is longer than the window
        found = _token_of(self._vocab, tokens[first:], question)
        return min(max(n_known, first), n - self._n_tail) if found is None else first + found


class PromptRows:
    """Takes the logits of all tokens of a prompt: called on the owner thread, see Workspace.step_by_hand."""

    def __init__(self, scores: F32, first: int) -> None:
        """scores: [tokens, n_vocab], where the row of each token is written, from `first` on."""
        self._scores: Final = scores
        self._first = self._at = first

    def __call__(self, phase: Phase, logits: Sequence[F32]) -> None:
        if phase in (Phase.READ, Phase.QUERY):
            for row in logits[: len(self._scores) - self._at]:
                self._scores[self._at] = row
                self._at += 1

    def settle(self, end: int) -> None:
        """All is evaluated up to `end`. What the history held already was not: the rows are those of the
        last tokens."""
        n = self._at - self._first
        if n and self._at != end:
            self._scores[end - n : end] = self._scores[self._first : self._at].copy()
        self._at = self._first = len(self._scores)  # no more of them


def _token_of(vocab: Vocab, tokens: NDArray[np.int32], text: bytes) -> int | None:
    """Index of the token in which `text` begins, where it stands last; None: nowhere."""
    pieces = [vocab.piece(int(token)) for token in tokens]
    at = b"".join(pieces).rfind(text) if text else -1
    if at < 0:
        return None
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, at, side="right"))
