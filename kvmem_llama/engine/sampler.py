"""Choosing the next token: llama.cpp's sampler chain over logits that are ours."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import InvalidOption
from ..native.library import import_binding
from ..settings import Settings
from .grammar import AnswerGrammar, Constraint, ReasoningLimit
from .requests import F32
from .vocab import Vocab

# struct llama_token_data
_CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names, meanings and defaults are llama.cpp's (common/common.h)."""

    temp: float = 0.8  # <= 0: always the likeliest token
    top_k: int = 40  # tokens; 0: all
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0  # 1: off
    seed: int = -1  # -1: a random one, to be read from Sampler.seed
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens; 0: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: str | AnswerGrammar = ""  # GBNF; empty: none
    reasoning: ReasoningLimit | None = None

    @classmethod
    def of(cls, settings: Settings, n_view: int) -> SamplingParams:
        """The sampling options of `settings`; n_view: tokens that repeat_last_n = -1 stands for."""
        last_n = n_view if settings.repeat_last_n < 0 else settings.repeat_last_n
        return cls(
            temp=settings.temp,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=settings.seed,
            repeat_penalty=settings.repeat_penalty,
            repeat_last_n=last_n,
        )

    @property
    def has_penalties(self) -> bool:
        off = self.repeat_penalty == 1 and not self.frequency_penalty and not self.presence_penalty
        return self.repeat_last_n != 0 and not off


class Sampler:
    """The sampler of one answer. Owner thread of whoever made it; `close` frees it.

    Equal parameters, seed and logits give equal tokens.
    """

    def __init__(self, vocab: Vocab, params: SamplingParams) -> None:
        """Raises InvalidOption for a penalty that llama.cpp refuses or a grammar it cannot parse,
        LibraryMissing or LibraryMismatch if a grammar is wanted and libkvmem_chat is not there."""
        llama: Any = import_binding()
        self._llama = llama
        if params.repeat_penalty <= 0:
            raise InvalidOption("--repeat-penalty", params.repeat_penalty, "must be greater than 0")
        drawn = params.seed in (-1, llama.LLAMA_DEFAULT_SEED)  # both mean "random" to llama.cpp's users
        self.seed = secrets.randbits(31) if drawn else params.seed
        self._chain: Any = None
        grammar = params.grammar or None
        if isinstance(grammar, str):
            grammar = AnswerGrammar(grammar)
        self._constraint: Constraint | None = None
        if grammar or params.reasoning:
            self._constraint = Constraint(vocab, grammar, params.reasoning)
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for part in _parts(llama, vocab, params, self.seed):
            llama.llama_sampler_chain_add(self._chain, part)  # the chain owns it from here on
        self._is_argmax = params.temp <= 0 and not params.has_penalties and self._constraint is None
        self._candidates = np.empty(vocab.n_tokens, dtype=_CANDIDATE)
        self._ids = np.arange(vocab.n_tokens, dtype=np.int32)

    def sample(self, logits: F32) -> int:
        """Token chosen from `logits`, [n_vocab], which are left as they are. Call `accept` with it next."""
        if self._is_argmax:
            return int(logits.argmax())  # as the greedy sampler does: the first of equals
        array = self._array(self._fill(logits))
        constraint = self._constraint
        if constraint is None:
            return self._apply(array)
        constraint.force(ctypes.byref(array))
        token = self._apply(array)
        # A grammar over the whole vocabulary is slow: it is asked about the choice first, as in llama.cpp's
        # common/sampling.cpp, and applied to all only if it refuses.
        if constraint.is_waiting or self._allowed(constraint, token):
            return token
        array = self._array(self._fill(logits))
        constraint.force(ctypes.byref(array))
        constraint.restrict(ctypes.byref(array))
        return self._apply(array)

    def accept(self, token: int, *, generated: bool = True) -> None:
        """Tells penalties and grammar of a token; generated=False: one of the prompt, outside the grammar.

        Raises OutputMismatch if the grammar has no place for it; the answer must end then.
        """
        if self._constraint is not None and generated:
            self._constraint.accept(token)
        self._llama.llama_sampler_accept(self._chain, token)

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Tells the penalties of the tokens before the answer."""
        for token in tokens:
            self.accept(int(token), generated=False)

    def reset(self) -> None:
        """Back to the state after construction, random numbers included."""
        self._llama.llama_sampler_reset(self._chain)
        if self._constraint is not None:
            self._constraint.reset()

    def close(self) -> None:
        """Frees the samplers. Idempotent."""
        chain, self._chain = self._chain, None
        if chain:
            self._llama.llama_sampler_free(chain)
        if self._constraint is not None:
            self._constraint.close()

    def _fill(self, logits: F32) -> Any:
        candidates = self._candidates
        candidates["id"] = self._ids  # the samplers reorder and cut the array
        candidates["logit"] = logits
        return candidates

    def _apply(self, array: Any) -> int:
        self._llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def _allowed(self, constraint: Constraint, token: int) -> bool:
        one = np.zeros(1, dtype=_CANDIDATE)
        one["id"], one["logit"] = token, 1.0
        constraint.restrict(ctypes.byref(self._array(one)))
        return bool(np.isfinite(one["logit"][0]))

    def _array(self, candidates: Any) -> Any:
        data = candidates.ctypes.data_as(self._llama.llama_token_data_p)
        return self._llama.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)


def _parts(llama: Any, vocab: Vocab, params: SamplingParams, seed: int) -> list[Any]:
    """The samplers in llama.cpp's default order (common/sampling.cpp)."""
    parts = []
    if params.has_penalties:
        parts.append(
            llama.llama_sampler_init_penalties(
                vocab.n_tokens,
                params.repeat_last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        )
    if params.temp <= 0:
        return [*parts, llama.llama_sampler_init_greedy()]
    if params.top_k > 0:
        parts.append(llama.llama_sampler_init_top_k(params.top_k))
    if params.typical_p < 1:
        parts.append(llama.llama_sampler_init_typical(params.typical_p, 1))
    if params.top_p < 1:
        parts.append(llama.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        parts.append(llama.llama_sampler_init_min_p(params.min_p, 1))
    parts.append(llama.llama_sampler_init_temp(params.temp))
    return [*parts, llama.llama_sampler_init_dist(seed)]
