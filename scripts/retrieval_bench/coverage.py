"""Share of the evidence's tokens in the blocks that each way of searching finds within a budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.errors import InvalidOption
from kvmem_llama.memory.retrieval import Ranking, interleave
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, WorkspaceEngine, open_engine

from .questions import History, Question, histories

BUDGETS = (256, 512, 1024, 2048)  # tokens
LENGTHS = {"7K": (1, 0), "15K": (2, 56_000), "40K": (0, 160_000)}
"""By name of a length, some tokens: see `histories`."""

Shares = Mapping[str, Mapping[str, float]]
"""By name of a way of fusing: the share of the selection for each channel."""


@dataclass(frozen=True, slots=True)
class Found:
    """One question: coverage by way of searching and budget."""

    set: str
    length: str
    history: str
    kind: str
    id: str
    n_tokens: int  # of the history
    coverage: Mapping[tuple[str, int], float]


def measure(
    model: Path,
    settings: Settings,
    name: str,
    length: str,
    shares: Shares,
    *,
    n_most: int = 0,
    store: str = "",
    twice: bool = False,
) -> Iterator[Found]:
    """Reads every history of a set once and searches it with all of its questions: by Mean-K, by calibrated
    heads if the model has any, by words, as the settings fuse them, and fused by `shares`.

    n_most: histories; 0: all. store: folder that keeps what was read for the next time; empty: RAM.
    twice: asks again in reverse order, and fails if a question finds anything else than before.
    """
    together, n_chars = LENGTHS[length]
    settings = replace(settings, score="fused", data_dir=store or settings.data_dir)
    some = list(histories(name, together, n_chars))[: n_most or None]
    results: dict[str, tuple[History, Question, int, dict[tuple[str, int], float]]] = {}
    for way, calibration in (("default", settings.calibration), ("uncalibrated", "none")):
        with open_engine(model, replace(settings, calibration=calibration)) as engine:
            for history in some:
                with _read(engine, history, length if store else "") as ws:
                    ends = _ends(ws, engine)
                    rankings = [_search(ws, question) for question in history.questions]
                    if twice:
                        for question, before in reversed(list(zip(history.questions, rankings, strict=True))):
                            assert np.array_equal(_search(ws, question).best, before.best), question.id
                    for question, ranking in zip(history.questions, rankings, strict=True):
                        inside = _evidence(ends, history, question, settings.block_size)
                        found = _coverage(ranking, inside, way, settings.block_size, shares)
                        known = results.setdefault(question.id, (history, question, len(ends), {}))
                        known[3].update(found)
    for history, question, n, cover in results.values():
        yield Found(name, length, history.id, question.kind, question.id, n, cover)


def _read(engine: WorkspaceEngine, history: History, prefix: str) -> Workspace:
    """A workspace that holds the history. prefix: of its name in the store; empty: it is not kept."""
    ws = engine.workspace(f"{prefix} {history.id}" if prefix else None)
    if not ws.n_tokens:
        print(f"  reading {history.id} ({len(history.text):,} characters)", file=sys.stderr, flush=True)
        ws.read(history.text).result()
    return ws


def _search(ws: Workspace, question: Question) -> Ranking:
    return ws.search(question.text, 1 << 30).ranking


def _ends(ws: Workspace, engine: WorkspaceEngine) -> NDArray[np.int64]:
    """Where each token of the history ends, in bytes of its text; control tokens have none."""
    vocab = engine.core.model.vocab
    sizes = [len(vocab.piece(int(token), special=False)) for token in ws.history()]
    return np.cumsum(sizes)


def _evidence(ends: NDArray[np.int64], history: History, question: Question, block: int) -> NDArray[np.int64]:
    """The block of every token of the evidence."""
    starts = np.concatenate([[0], ends[:-1]])
    shift = int(ends[-1]) - len(history.text.encode())  # a space that the tokenizer puts first
    if not 0 <= shift <= 1:
        raise InvalidOption("text", history.id, "its tokens do not give its text back")
    inside = np.zeros(len(ends), np.bool_)
    for a, b in question.evidence:
        first, last = (len(history.text[:at].encode()) + shift for at in (a, b))
        inside |= (ends > first) & (starts < last)
    return np.flatnonzero(inside) // block


def _coverage(
    ranking: Ranking, blocks: NDArray[np.int64], way: str, block: int, shares: Shares
) -> dict[tuple[str, int], float]:
    """way: name of the ranking itself."""
    orders = {name: ranking.candidates[best] for name, best in ranking.orders.items()}
    chosen = {name: share for name, share in shares.items() if share.keys() <= orders.keys()}
    out = {}
    for budget in BUDGETS:
        n = budget // block
        ways = {channel: best[:n] for channel, best in orders.items()}
        ways[way] = ranking.best[:n]
        for name, share in chosen.items():
            ways[name] = interleave([orders[c] for c in share], list(share.values()), n)
        for name, found in ways.items():
            out[name, budget] = float(np.isin(blocks, found).mean())
        out["random", budget] = min(n / len(ranking.candidates), 1.0)
    return out
