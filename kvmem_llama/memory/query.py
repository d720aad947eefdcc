"""A step as its caller gives it, what is refused of that, and which tokens of it are its query."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InputError, InvalidOption
from kvmem_llama.native.layout import I32
from kvmem_llama.settings import Settings

_HINT: Final = "Give a flat sequence of token ids of this model."


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A step as its caller gives it."""

    tokens: I32  # [n] appended to the history before the answer
    query_start: int  # index of the first token that may belong to the query
    scored: NDArray[np.bool_]  # [n] text of a user or a tool rather than template
    sampling: SamplingParams
    max_tokens: int = -1  # of the answer; -1: no limit
    stop: Sequence[str] = ()
    kind: str = "step"  # what a durable workspace remembers it as; 'ask': a turn of its conversation

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


def token_ids(tokens: Iterable[int] | NDArray[np.integer], n_vocab: int) -> I32:
    """[n] int32. Raises InvalidOption, naming the first that is not an integer from 0 to `n_vocab` - 1."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1:
            raise InvalidOption(
                "tokens", f"an array of shape {tokens.shape}", "must have one dimension", hint=_HINT
            )
        if tokens.dtype.kind in "iu":
            bad = np.flatnonzero((tokens < 0) | (tokens >= n_vocab))
            if len(bad):
                raise _bad(int(bad[0]), int(tokens[bad[0]]), n_vocab)
            return tokens.astype(np.int32)
    try:
        values = list(tokens)
    except TypeError:
        raise InvalidOption("tokens", reprlib.repr(tokens), "must be a sequence", hint=_HINT) from None
    for i, value in enumerate(values):
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not is_integer or not 0 <= value < n_vocab:
            raise _bad(i, value, n_vocab)
    return np.array(values, dtype=np.int32)


def token_marks(marks: NDArray[np.bool_] | None, n: int) -> NDArray[np.bool_]:
    """[n] bool, one mark for each token; None stands for all true. Raises InvalidOption."""
    if marks is None:
        return np.ones(n, dtype=np.bool_)
    if not isinstance(marks, np.ndarray) or marks.dtype != np.bool_ or marks.shape != (n,):
        given = (
            f"{marks.dtype} of shape {marks.shape}" if isinstance(marks, np.ndarray) else type(marks).__name__
        )
        raise InvalidOption("scored", given, f"must be an array of {n} booleans", hint="Give one per token.")
    return marks


def _bad(i: int, value: object, n_vocab: int) -> InvalidOption:
    shown = value
    if isinstance(value, int) and value.bit_length() > 64:
        shown = f"an integer of {value.bit_length()} bits"  # Python refuses to print very long ones
    elif not isinstance(value, (int, float)):
        shown = reprlib.repr(value)
    return InvalidOption(f"tokens[{i}]", shown, f"must be an integer from 0 to {n_vocab - 1}", hint=_HINT)
