"""Which tokens of a step are its query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InputError
from kvmem_llama.native.layout import I32
from kvmem_llama.settings import Settings


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A step as its caller gives it."""

    tokens: I32  # [n] appended to the history before the answer
    query_start: int  # index of the first token that may belong to the query
    scored: NDArray[np.bool_]  # [n] text of a user or a tool rather than template
    sampling: SamplingParams
    max_tokens: int = -1  # of the answer; -1: no limit
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not n:
            raise InputError("the step", "it holds no tokens", hint="Give a text to answer.")
        if len(self.scored) != n or not 0 <= self.query_start <= n:
            raise ValueError(f"{n} tokens, {len(self.scored)} marks, query from {self.query_start}")


@dataclass(frozen=True, slots=True)
class Query:
    """The end of a step's tokens that is scored and replayed; what comes before is read as history."""

    start: int  # index in the step's tokens
    scored: NDArray[np.bool_]  # [n - start]


def query_of(request: StepRequest, settings: Settings) -> Query:
    """The newest `n_query` text tokens, and what lies between and after them.

    A step without a text token (template only) is scored by its last tokens. query_tokens = all takes
    every token from `query_start` on, the paper's reading, however many there are.
    """
    n = len(request.tokens)
    first = min(request.query_start, n - 1)  # at least one token gives the logits of the answer
    if settings.query_tokens == "all":
        return Query(first, np.ones(n - first, dtype=np.bool_))
    text = first + np.flatnonzero(request.scored[first:])
    if not len(text):
        first = max(first, n - settings.n_query)
        return Query(first, np.ones(n - first, dtype=np.bool_))
    if len(text) > settings.n_query:
        first = int(text[-settings.n_query])
    return Query(first, request.scored[first:])
