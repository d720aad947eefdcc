"""Ranges of tokens as a caller names them."""

from __future__ import annotations

import contextlib
from operator import index
from typing import Protocol, SupportsIndex, TypeAlias, cast

from ..errors import InvalidOption


class HasCount(Protocol):
    """A block of a recall report or of a search."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...


class HasEnd(Protocol):
    """A turn."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


Span: TypeAlias = range | tuple[int, int] | HasCount | HasEnd


def token_range(span: int | Span, end: int | None) -> tuple[int, int]:
    """[start, end) in tokens. span: the start if `end` is given. Raises InvalidOption for a range with gaps,
    and for what is no range at all."""
    with contextlib.suppress(TypeError):  # of what is no integer; one of numpy's is one
        if end is not None:
            return index(cast(SupportsIndex, span)), index(end)
        if isinstance(span, range):
            if span.step == 1:
                return span.start, span.stop
        elif isinstance(span, tuple):
            if len(span) == 2:
                return index(span[0]), index(span[1])
        elif hasattr(span, "start") and hasattr(span, "count"):
            return index(span.start), index(span.start) + index(span.count)
        elif hasattr(span, "start") and hasattr(span, "end"):
            return index(span.start), index(span.end)
    raise InvalidOption(
        "span", span if end is None else (span, end), "is no range of tokens",
        hint="Give the first token and the one after the last, a range, or a block of a recall.",
    )  # fmt: skip
