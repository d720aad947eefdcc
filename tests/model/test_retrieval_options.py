"""Blocks evaluated anew, and text before the query that is searched with: the real library, exact mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.memory.retrieval import Query, Retriever
from kvmem_llama.memory.session import Session
from kvmem_llama.policies import KVMem
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, WorkspaceEngine, open_engine

pytestmark = pytest.mark.usefixtures("checked")
GREEDY = SamplingParams(temp=0)
EXACT: dict[str, Any] = {"n_ctx": 512, "n_threads": 2, "exact": True, "raw_k_type": "f32"}


def ids(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 250, n).astype(np.int32)


def session_of(ws: Workspace) -> Session:
    assert isinstance(ws._policy, KVMem)
    return ws._policy._session


def rows(engine: WorkspaceEngine, ws: Workspace, n: int) -> list[np.ndarray]:
    """K and V in the cells of the first `n` tokens of the view, per layer."""

    def read(core: Any) -> list[np.ndarray]:
        cells = np.concatenate([r.cells for r in session_of(ws).view])[:n]
        k, v = core.hooks.read_rows(cells)
        return [*k, *v]

    return engine.call(read)


def test_a_view_that_is_all_refreshed_is_a_plain_prefill_of_its_text(tiny: Path) -> None:
    options = {**EXACT, "n_recent": 0, "position_mode": "compact"}
    with open_engine(tiny, Settings(**options, refresh=100_000)) as engine, engine.workspace() as ws:
        ws.read_tokens(ids(3008, 1)).result()  # whole blocks
        result = ws.step(ids(20, 7), sampling=GREEDY, max_tokens=12).result()
        report, history = result.recalls[0], ws.history()
        assert report.n_selected > 5
        assert {b.why for b in report.blocks if not b.refreshed} == {"sink", "query"}
        assert all(b.refreshed == (b.why == "selected") for b in report.blocks)
        text = np.concatenate([history[b.start : b.start + b.count] for b in report.blocks])
        fresh = rows(engine, ws, len(text))
        with engine.workspace() as plain:
            want = plain.step(text, sampling=GREEDY, max_tokens=12).result()
            assert not want.recalls and result.tokens == want.tokens
            prefilled = rows(engine, plain, len(text))
            assert all(map(np.array_equal, fresh, prefilled))
    with open_engine(tiny, Settings(**options)) as engine, engine.workspace() as ws:
        ws.read_tokens(ids(3008, 1)).result()
        stored = ws.step(ids(20, 7), sampling=GREEDY, max_tokens=12).result()
        assert [b.start for b in stored.recalls[0].blocks] == [b.start for b in report.blocks]
        assert not all(map(np.array_equal, rows(engine, ws, len(text)), prefilled))  # they saw other text


def test_a_refreshed_step_leaves_the_records_and_the_next_step_as_they_were(tiny: Path) -> None:
    found = []
    for refresh in (0, 256):
        with open_engine(tiny, Settings(**EXACT, refresh=refresh)) as engine, engine.workspace() as ws:
            ws.read_tokens(ids(3000, 1)).result()
            ws.step(ids(20, 7), sampling=GREEDY, max_tokens=4).result()
            ws.truncate(3000)
            report = ws.step(ids(20, 8), sampling=GREEDY, max_tokens=0).result().recalls[0]
            table = session_of(ws).history.table
            records = [session_of(ws).history.store.get(block.ref).tobytes() for block in table][:90]
            found.append(([b.start for b in report.blocks], records))
    assert found[0] == found[1]


def test_text_before_the_query_is_searched_with_as_if_it_were_the_query(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Query] = []
    rank = Retriever.rank

    def spy(self: Retriever, query: Query, *args: Any, **kwargs: Any) -> Any:
        seen.append(query)
        return rank(self, query, *args, **kwargs)

    monkeypatch.setattr(Retriever, "rank", spy)
    settings = Settings(**EXACT, n_query=300)
    with open_engine(tiny, settings) as engine, engine.workspace() as ws:
        ws.read_tokens(ids(2501, 1)).result()
        none = np.zeros(30, np.bool_)
        ws.step(ids(24, 7), sampling=GREEDY, max_tokens=3).result()
        ws.step(ids(30, 8), sampling=GREEDY, max_tokens=3, user=none).result()
        asked, tool = seen[0].rows, seen[1].rows
        assert (asked.n_query, tool.n_query) == (24, 54)
        for one, other in zip(asked.layers, tool.layers, strict=True):
            assert np.array_equal(one, other[:24])
        with ws.fork() as fork:  # nothing is kept there
            fork.truncate(2501 + 24 + 3)
            fork.step(ids(30, 8), sampling=GREEDY, max_tokens=3, user=none).result()
        for one, other in zip(tool.layers, seen[2].rows.layers, strict=True):
            assert np.array_equal(one, other)
        # A long step: what stands in it before the query, in the place where it stands.
        ws.truncate(2501)
        long = np.concatenate([ids(24, 7), ids(700, 9)])
        user = np.arange(len(long)) < 24
        result = ws.step(long, sampling=GREEDY, max_tokens=0, user=user).result()
        assert result.n_query == 300 and seen[3].rows.n_query == 24 + 64 + 64
        for one, other in zip(asked.layers, seen[3].rows.layers, strict=True):
            assert np.array_equal(one, other[:24])
