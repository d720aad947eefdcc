"""Choosing the next token: llama.cpp's sampler chain over logits that are ours."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from ..native.library import import_binding
from . import sampler_chain, token_probs
from .grammar import AnswerGrammar, Constraint
from .requests import F32
from .sampling_params import SamplingParams
from .token_probs import TokenProbs
from .vocab import Vocab

__all__ = ["Sampler", "SamplingParams"]

# struct llama_token_data
_CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Sampler:
    """The sampler of one answer. Owner thread of whoever made it; `close` frees it.

    Equal parameters, seed and logits give equal tokens.
    """

    def __init__(self, vocab: Vocab, params: SamplingParams) -> None:
        """Raises InvalidOption for a bias of no token or a grammar that llama.cpp cannot parse,
        LibraryMissing or LibraryMismatch if a grammar is wanted and libkvmem_chat is not there."""
        llama: Any = import_binding()
        self._llama = llama
        drawn = params.seed in (-1, llama.LLAMA_DEFAULT_SEED)  # both mean "random" to llama.cpp's users
        self.seed = secrets.randbits(31) if drawn else params.seed
        self._n_probs, self._after = params.n_probs, params.post_sampling_probs
        self._chain: Any = None
        self._left: Any = None  # candidates that the samplers have left of the last choice
        parts = sampler_chain.parts(llama, vocab, params, self.seed)
        self._chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for part in parts:
            llama.llama_sampler_chain_add(self._chain, part)  # the chain owns it from here on
        grammar = params.grammar or None
        if isinstance(grammar, str):
            grammar = AnswerGrammar(grammar)
        self._constraint: Constraint | None = None
        if grammar or params.reasoning:
            try:
                self._constraint = Constraint(vocab, grammar, params.reasoning)
            except BaseException:
                self.close()
                raise
        is_free = self._constraint is None and not vocab.suppressed
        self._is_argmax = params.is_argmax and is_free and not (self._n_probs and self._after)
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

    def probs(self, logits: F32, token: int, piece: Callable[[int], bytes]) -> TokenProbs:
        """Probabilities of `token`, which was sampled from `logits` just now, and of the likeliest ones, as
        `n_probs` and `post_sampling_probs` say. piece: the text of a token."""
        if not self._after:
            return token_probs.before_sampling(logits, token, self._n_probs, piece)
        left = self._left
        n_bytes = left.size * _CANDIDATE.itemsize
        address = ctypes.cast(left.data, ctypes.c_void_p).value
        rows = np.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=_CANDIDATE)
        return token_probs.after_sampling(rows["id"], rows["p"], token, self._n_probs, piece)

    def accept(self, token: int, *, generated: bool = True) -> None:
        """Tells the samplers and the grammar of a token; generated=False: one of the
        prompt, outside the grammar.

        Raises OutputMismatch if the grammar has no place for it; the answer must end then.
        """
        if self._constraint is not None and generated:
            self._constraint.accept(token)
        self._llama.llama_sampler_accept(self._chain, token)

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Tells the samplers of the tokens before the answer; the newest `n_looked_at` are enough."""
        for token in tokens:
            self.accept(int(token), generated=False)

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
        self._left = array
        return int(array.data[array.selected].id)

    def _allowed(self, constraint: Constraint, token: int) -> bool:
        one = np.zeros(1, dtype=_CANDIDATE)
        one["id"], one["logit"] = token, 1.0
        constraint.restrict(ctypes.byref(self._array(one)))
        return bool(np.isfinite(one["logit"][0]))

    def _array(self, candidates: Any) -> Any:
        data = candidates.ctypes.data_as(self._llama.llama_token_data_p)
        return self._llama.llama_token_data_array(data=data, size=len(candidates), selected=-1, sorted=False)
