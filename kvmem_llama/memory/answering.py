"""The answer of a step, whatever the policy: sample, feed, until the model ends it or a limit does."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from kvmem_llama.engine.requests import TaskGenerator
from kvmem_llama.engine.sampler import Sampler
from kvmem_llama.engine.token_probs import TokenProbs
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.errors import InvalidOption
from kvmem_llama.native.layout import F32, I32

from .answer import AnswerText
from .link import TaskLink
from .query import StepRequest
from .report import FinishReason, StopType, TextPiece

_HINT: Final = "Return the logits that were given, changed as you like."


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
        self.probs: list[TokenProbs] = []  # of these, without the end token
        self.end_probs: TokenProbs | None = None
        self.stop_type: StopType = "none"
        self._vocab = vocab
        self._link = link
        self._growth = growth
        self._request = request
        self._text = AnswerText(request.stop)
        self._n_told = 0  # of `probs`, in the pieces of text so far

    @property
    def text(self) -> str:
        return self._text.text

    @property
    def stopping_word(self) -> str:
        return self._text.stopping_word

    def run(self, history: I32, logits: F32 | None) -> TaskGenerator[FinishReason]:
        """history: the newest `n_seen` tokens before the answer. logits: after the last, [n_vocab].

        What a processor of logits or a stopping criterion raises is raised here."""
        sampler = Sampler(self._vocab, self._request.sampling)
        try:
            n = self._request.sampling.n_looked_at
            sampler.accept_prompt(history[max(len(history) - n, 0) :])
            reason = yield from self._generate(sampler, Callbacks(self._request, history), logits)
        finally:
            sampler.close()
        self._emit(self._text.finish(), None, len(self.probs))
        return reason

    def _generate(
        self, sampler: Sampler, callbacks: Callbacks, logits: F32 | None
    ) -> TaskGenerator[FinishReason]:
        n_most = self._request.max_tokens
        while n_most < 0 or len(self.tokens) < n_most:
            if self._link.stop_requested:
                return "truncated"
            assert logits is not None
            logits = yield from self._growth.make_room(logits)
            if logits is None:
                break
            logits = callbacks.process(logits)
            if callbacks.want_stop(logits):
                return "stop"
            token = sampler.sample(logits)
            is_end = self._vocab.is_eog(token)
            self._note_probs(sampler, logits, token, is_end)
            sampler.accept(token)
            callbacks.append(token)
            text = self._text.push(b"" if is_end and not self._is_shown(token) else self._piece(token))
            if self._text.stopped:
                self.stop_type = "word"
                del self.probs[self._text.n_kept :]
            elif is_end:
                self.stop_type = "eos"
            self._emit(text, token, self._text.n_released)
            if self._text.stopped and self._text.n_kept <= len(self.tokens):
                self._growth.drop(self._text.n_kept)
                del self.tokens[self._text.n_kept :]
                return "stop"
            self.tokens.append(token)
            is_last = is_end or self._text.stopped or len(self.tokens) == n_most
            logits = yield from self._growth.feed(token, logits=not is_last)
            if is_end or self._text.stopped:
                return "stop"
        self.stop_type = "limit"
        return "length"

    def _is_shown(self, token: int) -> bool:
        return token in self._request.preserved

    def _piece(self, token: int) -> bytes:
        return self._vocab.piece(token, special=self._is_shown(token))

    def _note_probs(self, sampler: Sampler, logits: F32, token: int, is_end: bool) -> None:
        if not self._request.sampling.n_probs:
            return
        probs = sampler.probs(logits, token, self._piece)
        if is_end:
            self.end_probs = probs
        else:
            self.probs.append(probs)

    def _emit(self, text: str, token: int | None, n_told: int) -> None:
        probs = tuple(self.probs[self._n_told : n_told])
        self._n_told += len(probs)
        if text or probs or (token is not None and self._request.every_token):
            self._link.emit(TextPiece(text, token, probs))


class Callbacks:
    """A caller's functions that have a say in an answer, and the tokens that they are shown."""

    def __init__(self, request: StepRequest, history: I32) -> None:
        self._processors = request.logits_processors
        self._criteria = request.stopping_criteria
        self._n = len(history) if _wants_all(request) else 0
        self._tokens = np.array(history[: self._n], dtype=np.int32)  # and room for more

    def process(self, logits: F32) -> F32:
        """[n_vocab] -> [n_vocab]. Raises InvalidOption for something that cannot be sampled from."""
        if not self._processors:
            return logits
        out: F32 = logits.copy()
        for processor in self._processors:
            out = np.asarray(processor(self._tokens[: self._n], out), dtype=np.float32)
            if out.shape != logits.shape:
                raise InvalidOption(
                    "logits_processors",
                    out.shape,
                    f"must return an array of shape {logits.shape}",
                    hint=_HINT,
                )
        if np.isnan(out).any() or not np.isfinite(out.max()):
            why = "must leave a finite logit, and none that is not a number"
            raise InvalidOption("logits_processors", float(out.max()), why, hint=_HINT)
        return out

    def want_stop(self, logits: F32) -> bool:
        return any(criterion(self._tokens[: self._n], logits) for criterion in self._criteria)

    def append(self, token: int) -> None:
        """The answer goes on with `token`."""
        if not (self._processors or self._criteria):
            return
        if self._n == len(self._tokens):
            more = np.empty(max(self._n, 256), dtype=np.int32)
            self._tokens = np.concatenate([self._tokens, more])
        self._tokens[self._n] = token
        self._n += 1


def n_seen(request: StepRequest, n_tokens: int) -> int:
    """Newest of the `n_tokens` tokens before the answer that the choice of its tokens depends on."""
    return n_tokens if _wants_all(request) else min(request.sampling.n_looked_at, n_tokens)


def _wants_all(request: StepRequest) -> bool:
    return bool(request.logits_processors or request.stopping_criteria)
