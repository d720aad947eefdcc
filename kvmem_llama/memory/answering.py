"""The answer of a step, whatever the policy: sample, feed, until the model ends it or a limit does."""

from __future__ import annotations

from typing import Protocol

from kvmem_llama.engine.requests import TaskGenerator
from kvmem_llama.engine.sampler import Sampler
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.native.layout import F32, I32

from .answer import AnswerText
from .link import TaskLink
from .query import StepRequest
from .report import FinishReason, TextPiece


class Growth(Protocol):
    """The end of a history, where the answer grows."""

    def make_room(self, logits: F32) -> TaskGenerator[F32 | None]:
        """Makes room for one token -> the logits to sample it from, `logits` themselves if nothing had to be
        evaluated; None if the view is full and the policy has no way to go on."""
        ...

    def feed(self, token: int, *, logits: bool) -> TaskGenerator[F32 | None]:
        """Appends a token to the history and evaluates it -> logits after it if asked for."""
        ...

    def drop(self, n_kept: int) -> None:
        """Takes back all fed tokens of the answer but the first `n_kept`."""
        ...


class Answering:
    """Every sampled token is fed, the end token too, so that its rows belong to the history; tokens that
    begin after a stop string are dropped instead."""

    def __init__(self, vocab: Vocab, link: TaskLink, growth: Growth, request: StepRequest) -> None:
        self.tokens: list[int] = []  # as they stand in the history
        self._vocab = vocab
        self._link = link
        self._growth = growth
        self._request = request
        self._text = AnswerText(request.stop)

    @property
    def text(self) -> str:
        return self._text.text

    def run(self, history: I32, logits: F32 | None) -> TaskGenerator[FinishReason]:
        """history: newest tokens before the answer, for the penalties. logits: after the last, [n_vocab]."""
        sampler = Sampler(self._vocab, self._request.sampling)
        try:
            sampler.accept_prompt(history)
            reason = yield from self._generate(sampler, logits)
        finally:
            sampler.close()
        self._emit(self._text.finish(), None)
        return reason

    def _generate(self, sampler: Sampler, logits: F32 | None) -> TaskGenerator[FinishReason]:
        n_most = self._request.max_tokens
        while n_most < 0 or len(self.tokens) < n_most:
            if self._link.stop_requested:
                return "truncated"
            assert logits is not None
            logits = yield from self._growth.make_room(logits)
            if logits is None:
                return "length"
            token = sampler.sample(logits)
            sampler.accept(token)
            is_end = self._vocab.is_eog(token)
            text = self._text.push(b"" if is_end else self._vocab.piece(token, special=False))
            self._emit(text, token)
            if self._text.stopped and self._text.n_kept <= len(self.tokens):
                self._growth.drop(self._text.n_kept)
                del self.tokens[self._text.n_kept :]
                return "stop"
            self.tokens.append(token)
            is_last = is_end or self._text.stopped or len(self.tokens) == n_most
            logits = yield from self._growth.feed(token, logits=not is_last)
            if is_end or self._text.stopped:
                return "stop"
        return "length"

    def _emit(self, text: str, token: int | None) -> None:
        if text:
            self._link.emit(TextPiece(text, token))


def n_penalized(request: StepRequest) -> int:
    """Newest tokens of the history that the sampler's penalties look at."""
    return request.sampling.repeat_last_n if request.sampling.has_penalties else 0
