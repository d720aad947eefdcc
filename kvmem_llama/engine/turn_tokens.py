"""The tokens of a turn, and which of them are a person's or a tool's own text rather than template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .requests import I32
from .token_bytes import TokenBytes
from .vocab import Vocab


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Tokens of a turn, [n] each."""

    tokens: I32
    scored: NDArray[np.bool_]  # the token lies inside a span and is not a control token
    starts: tuple[int, ...] = ()  # index of the first token of every span

    @property
    def question(self) -> int:
        """Index of the first token of the last span; n without spans."""
        return self.starts[-1] if self.starts else len(self.tokens)


def tokenize_turn(
    vocab: Vocab, text: str, spans: Sequence[tuple[int, int]], *, add_bos: bool = False
) -> TurnTokens:
    """Tokens of `text`, special tokens parsed; `spans` are characters start <= i < end, ascending.

    A token that reaches over the edge of a span (a line end of the template merged with one of the text) is
    not scored. The text is tokenized in one piece, as llama.cpp's own programs do; a tokenizer whose tokens
    do not add up to the text (it normalizes) gets the text between the edges of spans piece by piece.
    """
    edges = _byte_edges(text, spans)
    data = text.encode("utf-8", errors="replace")
    tokens = vocab.tokenize(data, add_bos=add_bos)
    n_front = int(add_bos and vocab.add_bos and len(tokens) > 0)  # BOS stands for no byte of the text
    if n_front and data.startswith(vocab.piece(vocab.bos)):
        n_front = 0
    held = TokenBytes(vocab, tokens)
    starts, ends, total = _extents(held, n_front)
    if total != len(data):
        tokens, starts, ends = _piecewise(vocab, data, edges, tokens[:n_front])
        held = TokenBytes(vocab, tokens)
    return _marked(tokens, held.which(vocab.is_control), starts, ends, edges, n_front)


def mark_tokens(vocab: Vocab, text: str, spans: Sequence[tuple[int, int]], tokens: I32) -> TurnTokens | None:
    """As `tokenize_turn`, where the tokens of `text` are known; None if they do not add up to it. The first
    may be a BOS that stands for no byte of the text."""
    data = text.encode("utf-8", errors="replace")
    held, n_front = TokenBytes(vocab, tokens), 0
    starts, ends, total = _extents(held, n_front)
    if total != len(data) and vocab.add_bos and len(tokens) and int(tokens[0]) == vocab.bos:
        n_front = 1
        starts, ends, total = _extents(held, n_front)
    if total != len(data):
        return None
    return _marked(tokens, held.which(vocab.is_control), starts, ends, _byte_edges(text, spans), n_front)


def _marked(
    tokens: I32,
    is_control: NDArray[np.bool_],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    edges: Sequence[tuple[int, int]],
    n_front: int,
) -> TurnTokens:
    inside = np.zeros(len(tokens), dtype=np.bool_)
    for first, last in edges:
        inside |= (starts >= first) & (ends <= last)
    inside[:n_front] = False
    begun = np.searchsorted(ends, [start for start, _ in edges], side="right")
    return TurnTokens(tokens, inside & ~is_control, tuple(np.maximum(begun, n_front).tolist()))


def _byte_edges(text: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    edges, at, at_bytes = [], 0, 0
    for start, end in spans:
        if start < at or end < start or end > len(text):
            raise ValueError(f"spans must ascend within the {len(text)} characters: {tuple(spans)}")
        first = at_bytes + len(text[at:start].encode("utf-8", errors="replace"))
        at, at_bytes = end, first + len(text[start:end].encode("utf-8", errors="replace"))
        edges.append((first, at_bytes))
    return edges


def _extents(held: TokenBytes, n_front: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """First and last byte + 1 of every token in the text, and the bytes of all."""
    lengths = held.sizes.copy()
    lengths[:n_front] = 0
    ends = np.cumsum(lengths)
    return ends - lengths, ends, int(ends[-1]) if len(ends) else 0


def _piecewise(
    vocab: Vocab, data: bytes, edges: Sequence[tuple[int, int]], front: I32
) -> tuple[I32, NDArray[np.int64], NDArray[np.int64]]:
    cuts = sorted({0, len(data), *(edge for pair in edges for edge in pair)})
    tokens, starts, ends = [front], [np.zeros(len(front), np.int64)], [np.zeros(len(front), np.int64)]
    for first, last in pairwise(cuts):
        piece = vocab.tokenize(data[first:last])
        tokens.append(piece)
        starts.append(np.full(len(piece), first, np.int64))
        ends.append(np.full(len(piece), last, np.int64))
    return np.concatenate(tokens), np.concatenate(starts), np.concatenate(ends)
