"""Reads a history and asks over it, for the rows of keys and queries that calibration compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engine.context import UBATCH
from ..engine.core import EngineCore
from ..engine.requests import Phase, TaskGenerator
from ..errors import KvmemError, ModelUnsupported
from ..memory.feeding import feed
from ..memory.frame import frame_of_query
from ..memory.guard import provisional, undo
from ..memory.query_rows import QueryBuffer
from ..memory.reading import read_history
from ..memory.recompute import reach
from ..memory.scoring import QueryRows
from ..memory.session import Session
from ..native.layout import I32, LayerInfo
from ..workspace import WorkspaceEngine

F16 = NDArray[np.float16]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Done = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question over a history."""

    rows: QueryRows  # raw Q, per full-attention layer [n_query, n_head, d]
    mean_k: F64  # [n_candidates] block scores over all heads


@dataclass(frozen=True, slots=True)
class Read:
    """A history that was read, and the questions that were asked over it."""

    layers: tuple[LayerInfo, ...]  # those with full attention
    keys: tuple[F16, ...]  # of each: raw K of the complete blocks, [n_tokens, n_head_kv, d]
    candidates: I64  # numbers of the blocks that a question may find
    asked: tuple[Asked, ...]


class _Reading:
    """Keeps its cells while its task runs: see engine.sequences.Resident."""

    def __init__(self, core: EngineCore) -> None:
        if core.hooks is None:
            raise ModelUnsupported(
                core.model.arch, "its keys cannot be captured, so it has no heads to calibrate",
                hint="These still work with it: --policy full_context, --policy sliding_window.",
            )  # fmt: skip
        self.session = Session(core)

    def evict(self) -> None:
        self.session.evict()


def read_and_ask(engine: WorkspaceEngine, tokens: I32, questions: Sequence[I32], done: Done) -> Read:
    """Reads a history and asks each question over its canonical view, as a search does.

    engine: its score must be mean_k, of all layers. done: called on the owner thread with the number of
    tokens that were evaluated since the last call. Raises ModelUnsupported, or as a step does.
    """
    reading = engine.call(_Reading)
    task = engine.submit(lambda core: _task(reading.session, tokens, questions, done), resident=reading)
    try:
        return task.result()
    finally:
        task.cancel()  # where waiting was interrupted
        with contextlib.suppress(KvmemError):
            task.result()
        engine.release(reading)
        engine.call(lambda core: reading.session.history.close())


def _task(session: Session, tokens: I32, questions: Sequence[I32], done: Done) -> TaskGenerator[Read]:
    yield from _read(session, tokens, done)
    asked = []
    candidates = np.zeros(0, np.int64)
    for question in questions:
        one, candidates = yield from _ask(session, question)
        asked.append(one)
        done(len(question))
    full = [i for i, layer in enumerate(session.hooks.layers) if layer.cache == 0]
    layers = tuple(session.hooks.layers[i] for i in full)
    return Read(layers, tuple(_keys(session, i) for i in full), candidates, tuple(asked))


def _read(session: Session, tokens: I32, done: Done) -> TaskGenerator[None]:
    history, step = session.history, session.settings.n_ubatch or UBATCH
    session.begin()
    with provisional(session, keep_until=0):
        history.extend(tokens)
        for start in range(0, len(tokens), step):
            end = min(start + step, len(tokens))
            yield from read_history(session, start, end)
            done(end - start)
        history.commit()


def _ask(session: Session, question: I32) -> TaskGenerator[tuple[Asked, I64]]:
    history, canonical = session.history, session.canonical
    start, n = history.n_committed, len(question)
    buffer = QueryBuffer(session.layers)
    with provisional(session, keep_until=0):
        history.extend(question)
        parts = canonical.view(start, canonical.first_pass_start(start, n))
        yield from reach(session, session.target(parts, canonical.epoch_end(start)), rebuild=True)
        yield from feed(session, start, start + n, Phase.QUERY, query=buffer)
        candidates = frame_of_query(session.budget, canonical, start, n).candidates()
        index = history.indexes.mean_k
        assert index is not None
        rows = buffer.rows()
        mean_k = session.core.scorer.score(rows, index, candidates)
        undo(session, keep_until=0)
    return Asked(rows, mean_k), candidates


def _keys(session: Session, layer: int) -> F16:
    history, layout, info = session.history, session.hooks.layout, session.hooks.layers[layer]
    rows = [
        layout.raw_k(history.store.get(block.ref), layer, info, block.count)
        for block in history.table
        if block.count == history.block
    ]
    keys: F16 = np.concatenate(rows).astype(np.float16)
    return keys
