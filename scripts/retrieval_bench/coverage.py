"""Share of the evidence's tokens in the blocks that each way of searching finds within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.memory.retrieval import Ranking, interleave
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, open_engine

from .questions import History, Question, histories

BUDGETS = (256, 512, 1024, 2048)  # tokens


@dataclass(frozen=True, slots=True)
class Found:
    """One question: coverage by way of searching and budget."""

    set: str
    kind: str
    id: str
    coverage: Mapping[tuple[str, int], float]


def measure(
    model: Path, settings: Settings, sets: list[str], n_chars: int, shares: Mapping[str, Mapping[str, float]]
) -> Iterator[Found]:
    """Reads every history once and searches it with all of its questions. shares: named ways of fusing."""
    settings = replace(settings, score="fused")
    with open_engine(model, settings) as engine:
        for name in sets:
            for history in histories(name, n_chars):
                with engine.workspace() as ws:
                    ws.read(history.text).result()
                    ends = _ends(ws, engine.core.model.vocab)
                    for question in history.questions:
                        ranking = ws.search(question.text, 1 << 30).ranking
                        cover = _coverage(ranking, ends, history, question, settings.block_size, shares)
                        yield Found(name, question.kind, question.id, cover)


def _ends(ws: Workspace, vocab) -> NDArray[np.int64]:  # type: ignore[no-untyped-def]
    """Where each token of the history ends, in bytes of its text; control tokens have none."""
    sizes = [len(vocab.piece(int(token), special=False)) for token in ws.history()]
    return np.cumsum(sizes)


def _coverage(
    ranking: Ranking,
    ends: NDArray[np.int64],
    history: History,
    question: Question,
    block: int,
    shares: Mapping[str, Mapping[str, float]],
) -> dict[tuple[str, int], float]:
    starts = np.concatenate([[0], ends[:-1]])
    shift = int(ends[-1]) - len(history.text.encode())  # a space that the tokenizer puts first
    inside = np.zeros(len(ends), np.bool_)
    for a, b in question.evidence:
        first, last = (len(history.text[:at].encode()) + shift for at in (a, b))
        inside |= (ends > first) & (starts < last)
    blocks = np.flatnonzero(inside) // block
    orders = ranking.orders
    out = {}
    for budget in BUDGETS:
        n = budget // block
        ways = {channel: best[:n] for channel, best in orders.items()}
        for way, share in shares.items():
            ways[way] = interleave([orders[c] for c in share], list(share.values()), n)
        for way, best in ways.items():
            out[way, budget] = float(np.isin(blocks, ranking.candidates[best]).mean())
        out["random", budget] = min(n / len(ranking.candidates), 1.0)
    return out
