"""A step as its caller gives it, what is refused of that, and which tokens of it are its query."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.sampling_params import SamplingParams, plain_int
from kvmem_llama.errors import InputError, InvalidOption
from kvmem_llama.native.layout import F32, I32
from kvmem_llama.settings import Settings

from .recall_params import RecallParams

I64 = NDArray[np.int64]
LogitsProcessor: TypeAlias = Callable[[I32, F32], F32]
"""Called with all tokens so far and a copy of the logits after them, [n_vocab] -> logits to sample from."""
StoppingCriterion: TypeAlias = Callable[[I32, F32], bool]
"""Called with all tokens so far and the logits after them, [n_vocab] -> the answer ends here."""

_GAP: Final = 32  # tokens; texts with less between them count as one
_HINT: Final = "Give a flat sequence of token ids of this model."


class Hand(Protocol):
    """Chooses the tokens of an answer one by one, elsewhere and in its own time. Owner thread only."""

    def offer(self, logits: F32) -> None:
        """The next token is wanted; logits to choose it from, [n_vocab], valid within the call."""
        ...

    def has_chosen(self) -> bool: ...

    def take(self) -> int | None:
        """The token that was chosen, once; None: the answer ends here."""
        ...


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
    is_whole: bool = False  # the tokens are what is new of a whole prompt, maybe several turns
    user: NDArray[np.bool_] | None = None  # [n] a user's text rather than a tool's; None: all scored tokens
    recall: RecallParams | None = None  # how it recalls; None: as the engine's options say
    preserved: frozenset[int] = frozenset()  # control tokens whose text the answer's text holds
    logits_processors: tuple[LogitsProcessor, ...] = ()  # one after the other, on the owner thread
    stopping_criteria: tuple[StoppingCriterion, ...] = ()  # before each token, on the owner thread
    every_token: bool = False  # a TextPiece for each token, also where it adds no text yet
    hand: Hand | None = None  # who chooses the tokens of the answer, instead of a sampler

    def __post_init__(self) -> None:
        # They are stored as JSON.
        object.__setattr__(self, "max_tokens", plain_int("max_tokens", self.max_tokens))
        object.__setattr__(self, "query_start", plain_int("query_start", self.query_start))
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        n = len(self.tokens)
        if not n:
            raise InputError("the step", "it holds no tokens", hint="Give a text to answer.")
        if len(self.scored) != n or not 0 <= self.query_start <= n:
            raise ValueError(f"{n} tokens, {len(self.scored)} marks, query from {self.query_start}")
        if self.user is not None and len(self.user) != n:
            raise ValueError(f"{n} tokens, {len(self.user)} marks of a user's text")

    def options(self, settings: Settings) -> Settings:
        """The engine's settings, with what this step has chosen anew."""
        return settings if self.recall is None else self.recall.over(settings)


@dataclass(frozen=True, slots=True)
class Query:
    """The end of a step's tokens that is replayed; what comes before is read as history. Indices are those of
    the step's tokens."""

    start: int
    scored: NDArray[np.bool_]  # [n - start]
    earlier: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # of scored tokens before `start`
    user: tuple[int, int] | None = None  # [start, end) of the newest text of a user; None: there is none

    @property
    def indices(self) -> I64:
        """Of all scored tokens, ascending."""
        return np.concatenate([self.earlier, self.start + np.flatnonzero(self.scored)])


def query_of(request: StepRequest, settings: Settings) -> Query:
    """What is replayed: the newest `n_query` text tokens, and what lies between and after them. What is
    scored: the text tokens of that; of a step with more text, as `query_long` says.

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
    user = _newest_run(text if request.user is None else text[request.user[text]])
    span = (int(user[0]), int(user[-1]) + 1) if len(user) else None
    if len(text) <= settings.n_query:
        return Query(first, request.scored[first:], user=span)
    first = int(text[-settings.n_query])
    if settings.query_long == "newest":
        return Query(first, request.scored[first:], user=span)
    chosen = _ends(text, user, settings)
    scored = np.zeros(n - first, dtype=np.bool_)
    scored[chosen[chosen >= first] - first] = True
    return Query(first, scored, chosen[chosen < first], span)


def runs(indices: I64) -> list[tuple[int, int]]:
    """[start, end) of runs of ascending indices; small gaps are bridged."""
    edges = np.flatnonzero(np.diff(indices) > _GAP) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, edges) if len(run)]


def _newest_run(indices: I64) -> I64:
    return indices if not len(indices) else indices[indices >= runs(indices)[-1][0]]


def _ends(text: I64, user: I64, settings: Settings) -> I64:
    """Of the indices of a step's text, more than `n_query`: the newest of a user's, and both ends of the
    rest; of a text that is all a user's, both ends of that."""
    most = max(settings.n_query // 3, 1)
    n_ends, n_user = min(settings.query_ends, most), min(settings.query_user, most, len(user))
    newest = user[len(user) - n_user :]
    rest = np.setdiff1d(text, user)
    if not len(rest):
        rest = text
    return np.unique(np.concatenate([rest[:n_ends], rest[-n_ends:], newest]))


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
        if isinstance(tokens, (bytes, bytearray, memoryview)):  # its items are no token ids
            raise TypeError
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


def _texts(name: str, texts: object) -> tuple[str, ...]:
    """One text, or a sequence of them. Raises InvalidOption."""
    if isinstance(texts, str):
        return (texts,)
    if isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise InvalidOption(name, reprlib.repr(texts), "must be texts", hint='For example ["\\n"].')


def _bad(i: int, value: object, n_vocab: int) -> InvalidOption:
    shown = value
    if isinstance(value, int) and value.bit_length() > 64:
        shown = f"an integer of {value.bit_length()} bits"  # Python refuses to print very long ones
    elif not isinstance(value, (int, float)):
        shown = reprlib.repr(value)
    return InvalidOption(f"tokens[{i}]", shown, f"must be an integer from 0 to {n_vocab - 1}", hint=_HINT)
