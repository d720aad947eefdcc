"""What runs on an engine's owner thread: a history is read once; every question is asked over it, over as
many views as wanted, and leaves no trace. The parts are those a step is made of (kvmem_llama.memory.step)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InvalidOption
from kvmem_llama.memory.feeding import feed
from kvmem_llama.memory.frame import frame_of_query
from kvmem_llama.memory.query import StepRequest, query_of
from kvmem_llama.memory.query_rows import QueryBuffer
from kvmem_llama.memory.scoring import QueryRows
from kvmem_llama.memory.session import Session
from kvmem_llama.memory.step import read
from kvmem_llama.native.layout import F32, I32
from kvmem_llama.workspace import WorkspaceEngine

from .prompts import Prompt

I64 = NDArray[np.int64]
Choose = Callable[[I64, NDArray[np.float64]], Mapping[str, I64]]


class Reader:
    """One history in one engine. It keeps its cells between tasks: see engine.sequences.Resident."""

    def __init__(self, engine: WorkspaceEngine) -> None:
        self.engine = engine
        self.session = engine.call(Session)

    def evict(self) -> None:
        self.session.evict()

    def read(self, tokens: I32) -> None:
        self.engine.submit(lambda core: read(self.session, tokens), resident=self).result()

    def close(self) -> None:
        self.engine.release(self)
        self.engine.call(lambda core: self.session.history.close())


@dataclass(frozen=True, slots=True)
class FullPass:
    """The question over the whole history."""

    q: list[F32]  # Q with RoPE, per layer [n_query, n_head, d]; of the question's text
    k: list[F32]  # K with RoPE of the question and its template, per layer [n_turn, n_head_kv, d]
    positions: I32  # [n_query] token positions of q
    logits: F32  # [n_answer, n_vocab] before each token of the answer


@dataclass(frozen=True, slots=True)
class Recalls:
    """The question over views made of selected blocks."""

    candidates: I64  # block numbers
    selected: Mapping[str, I64]  # by name of the view
    logits: Mapping[str, F32]  # by name of the view: [n_answer, n_vocab]


def history_keys(reader: Reader) -> list[F32]:
    """K with RoPE at token positions of the committed history, per full-attention layer [n, n_head_kv, d]."""
    n = reader.session.history.n_committed
    return reader.engine.call(lambda core: _keys(reader.session, 0, n))


def full_pass(reader: Reader, prompt: Prompt) -> FullPass:
    """Asks over everything; the reader's view must hold it."""
    return reader.engine.submit(lambda core: _full_pass(reader.session, prompt), resident=reader).result()


def recalls(reader: Reader, prompt: Prompt, choose: Choose) -> Recalls:
    """Asks over the canonical view, scores, and asks again over the views that `choose` makes of candidates
    (block numbers) and their scores."""
    return reader.engine.submit(
        lambda core: _recalls(reader.session, prompt, choose), resident=reader
    ).result()


def _full_pass(session: Session, prompt: Prompt) -> TaskGenerator[FullPass]:
    with _asked(session, prompt) as (start, end, scored):
        parts = session.canonical.view(start)
        assert session.canonical.keeps_all(start), "the view does not hold the history"
        session.go_to(session.target(parts, end), rebuild=True)
        buffer = QueryBuffer(session.layers)
        logits = yield from feed(session, start, end, Phase.QUERY, logits=True, query=buffer, scored=scored)
        positions = (start + np.flatnonzero(scored)).astype(np.int32)
        rows, hooks = buffer.rows(), session.hooks
        q = [
            hooks.rotate(i, x, positions) if hooks.layers[i].rope else x for i, x in _by_layer(session, rows)
        ]
        keys = _keys(session, start, end)
        return FullPass(q, keys, positions, (yield from _forced(session, logits, end, prompt)))


def _recalls(session: Session, prompt: Prompt, choose: Choose) -> TaskGenerator[Recalls]:
    canonical = session.canonical
    with _asked(session, prompt) as (start, end, scored):
        first = session.target(canonical.view(start, canonical.first_pass_start(start, end - start)), end)
        session.go_to(first, rebuild=True)
        buffer = QueryBuffer(session.layers)
        yield from feed(session, start, end, Phase.QUERY, query=buffer, scored=scored)
        frame = frame_of_query(session.budget, canonical, start, end - start)
        candidates = frame.candidates()
        outside = set((prompt.evidence // frame.block).tolist()) - set(candidates.tolist())
        assert not outside, f"{prompt.case.id}: evidence in blocks {outside}, which are in every view"
        scores = session.core.scorer.score(buffer.rows(), session.history.indexes.mean_k, candidates)
        selected, answers = choose(candidates, scores), {}
        largest = max(map(len, selected.values()))
        if largest > frame.n_select:
            room = f"it has room for {frame.n_select} selected blocks, {largest} were asked for"
            raise InvalidOption("--view", session.budget.n_view, room)
        for name, blocks in selected.items():
            session.view.drop_from(start)
            session.go_to(session.target(frame.parts(blocks), end), rebuild=False)
            logits = yield from feed(session, start, end, Phase.REPLAY, logits=True)
            answers[name] = yield from _forced(session, logits, end, prompt)
        return Recalls(candidates, selected, answers)


@contextmanager
def _asked(session: Session, prompt: Prompt) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Token positions start, end of the query, and [end - start] which of its tokens are text."""
    history = session.history
    first = history.n_committed
    request = StepRequest(
        tokens=prompt.tokens[first:],
        query_start=prompt.n_history - first,
        scored=prompt.scored[first:],
        sampling=SamplingParams(temp=0),
    )
    query = query_of(request, session.settings)
    session.begin()
    history.extend(request.tokens)
    history.extend(prompt.answer)
    try:
        yield first + query.start, len(prompt.tokens), query.scored
    finally:
        session.view.drop_from(first)
        session.view.slack.forget(first)
        history.rollback(first)


def _forced(session: Session, logits: F32 | None, end: int, prompt: Prompt) -> TaskGenerator[F32]:
    """Logits before each token of the answer, whatever the model would have said itself."""
    rows = []
    for at in range(end, end + len(prompt.answer)):
        assert logits is not None
        rows.append(logits.copy())
        if len(rows) < len(prompt.answer):
            logits = yield from feed(session, at, at + 1, Phase.DECODE, logits=True)
    return np.stack(rows)


def _by_layer(session: Session, rows: QueryRows) -> list[tuple[int, F32]]:
    """(position of the layer in hooks.layers, its rows) of the full-attention layers."""
    full = [i for i, layer in enumerate(session.hooks.layers) if layer.cache == 0]
    return [(full[i], x) for i, x in zip(session.layers.indices, rows.layers, strict=True)]


def _keys(session: Session, start: int, end: int) -> list[F32]:
    history, hooks = session.history, session.hooks
    positions = np.arange(start, end, dtype=np.int32)
    first, block = start // history.block * history.block, history.block
    records = [history.rows(at) for at in range(first, end, block)]
    keys = []
    for i, layer in enumerate(hooks.layers):
        if layer.cache == 0:
            rows = np.concatenate([hooks.layout.raw_k(record, i, layer, block) for record in records])
            raw = rows[start - first : end - first].astype(np.float32)
            keys.append(hooks.rotate(i, raw, positions) if layer.rope else raw)
    return keys
