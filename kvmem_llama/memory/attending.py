"""What an answer looked at: the attention of its newest tokens to each block of its view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.requests import Decode, Phase, TaskGenerator
from kvmem_llama.errors import Cancelled, InputError
from kvmem_llama.native.layout import F32, I32, LayerInfo

from .canonical import floor_to
from .positions import TokenPos
from .query_rows import QueryBuffer, ScoredLayers
from .recompute import as_it_is, reach, take_cells
from .session import Session

N_TOKENS: Final = 32  # newest tokens of an answer that are looked at, and up to a block more

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AttendedBlock:
    """A block of the view."""

    start: TokenPos
    count: int  # tokens
    mass: float  # share of the attention, 0..1: mean over layers, query heads and tokens of the answer
    text: str  # characters cut at its edges are replaced


def attended(session: Session, answer_start: int) -> TaskGenerator[tuple[AttendedBlock, ...]]:
    """The blocks that the newest tokens of the history attended to, by attention mass.

    These tokens are evaluated once more over the rest of the view, then their rows are put back as they are
    stored. The history stays as it is. What they paid to each other is no part of any block.
    answer_start: token position; tokens before it are not looked at. The last step must have been the answer.
    Softcaps and learned sinks of attention are left out of account.
    Raises InputError if its view is there no more.
    """
    history, view = session.history, session.view
    end = history.n_committed
    start = max(answer_start, floor_to(history.block, max(end - N_TOKENS, 0)))
    if view.end != end or start >= end or not view.n_tokens:
        raise InputError(
            "the attention of the last answer", "its view is there no more", hint="Ask again, then look."
        )
    session.begin()
    whole = as_it_is(session)
    view.drop_from(start)
    blocks = list(view)
    cells = np.concatenate([r.cells for r in blocks]).astype(np.int32)
    positions = np.concatenate([r.position + np.arange(r.part.count, dtype=np.int32) for r in blocks])
    rows, own, at = yield from _again(session, start, end)
    keys = session.hooks.read_raw_k(cells)
    yield from reach(session, whole, rebuild=True)
    edges = np.cumsum([0, *(r.part.count for r in blocks)])[:-1]
    total = np.zeros(len(cells))
    full = [i for i, layer in enumerate(session.hooks.layers) if layer.cache == 0]
    for i, q in zip(full, rows, strict=True):
        layer = session.hooks.layers[i]
        k = np.concatenate([_rotated(session, i, keys[i], positions), _rotated(session, i, own[i], at)])
        total += _mass(layer, _rotated(session, i, q, at), k, len(cells))
    masses = np.add.reduceat(total, edges) / len(full)
    found = [
        AttendedBlock(
            TokenPos(r.part.start),
            r.part.count,
            float(mass),
            session.text_of(history.tokens(r.part.start, r.part.end)),
        )
        for r, mass in zip(blocks, masses, strict=True)
    ]
    return tuple(sorted(found, key=lambda block: -block.mass))


def _again(session: Session, start: int, end: int) -> TaskGenerator[tuple[list[F32], list[F32], I32]]:
    """Evaluates tokens start .. end-1 at the end of the view, and forgets them -> raw Q of the full-attention
    layers, raw K of all layers, [n, heads, d_k] each, and their view positions."""
    history, view, hooks = session.history, session.view, session.hooks
    cells = yield from take_cells(session, end - start, may_stop=True)
    tokens = history.tokens(start, end)
    first = view.position_of(start)
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    buffer = QueryBuffer(ScoredLayers(hooks.layers, None))
    keys: list[list[F32]] = []
    n = 0
    try:
        while n < len(tokens):
            if session.link.stop_requested:
                raise Cancelled()
            decoded = yield Decode(view.seq, tokens[n:], positions[n:], cells[n:], Phase.QUERY, True)
            buffer.add(hooks, decoded.rows)
            keys.append(hooks.read_k(decoded.rows))
            n += decoded.n
    finally:
        if n:
            hooks.free(cells[:n])
        view.give_back(cells)
    own = [np.concatenate(layer) for layer in zip(*keys, strict=True)]
    return list(buffer.rows().layers), own, positions


def _rotated(session: Session, layer: int, rows: F32, positions: I32) -> F32:
    return session.hooks.rotate(layer, rows, positions) if session.hooks.layers[layer].rope else rows


def _mass(layer: LayerInfo, q: F32, k: F32, n_view: int) -> F64:
    """Attention of rows q [n, n_head, d_k] to the first `n_view` rows of k [n_view + n, n_head_kv, d_k], mean
    over q's rows and heads: [n_view]. Row i of q comes right after row n_view + i - 1 of k."""
    n, group = len(q), layer.n_head // layer.n_head_kv
    total = np.zeros(n_view)
    hidden = np.arange(len(k)) > n_view + np.arange(n)[:, None]
    for head in range(layer.n_head):
        logits = layer.scale * (q[:, head] @ k[:, head // group].T)  # [n, n_view + n]
        logits[hidden] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        total += (weights / weights.sum(axis=1, keepdims=True))[:, :n_view].sum(axis=0)
    return total / (n * layer.n_head)
