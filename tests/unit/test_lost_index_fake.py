"""Index rows that are lost with their records: whoever makes them again, they are made once and for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wide_heads
from fake_run import checked_sessions, faked_template, text
from wide_heads import check_indexes, history_of, on, recomputed_of, rows_of

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import Cancelled
from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template", "wide")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wide_heads.widen(monkeypatch)
    wide_heads.write(tmp_path, wide_heads.calibration())


def ask(ws: Workspace, seed: int, n: int = 5) -> None:
    ws.step(text(20, seed), sampling=GREEDY, max_tokens=n).result()


def lose(folder: Path, pattern: str) -> None:
    """Files of an index go; every record of a segment is damaged."""
    paths = list(folder.glob(f"data/*/*/{pattern}"))
    assert paths
    for path in paths:
        if path.suffix != ".gguf":
            path.unlink()
            continue
        data = bytearray(path.read_bytes())
        data[4096:] = bytes(0xFF ^ b for b in data[4096:])
        path.write_bytes(data)


@pytest.mark.parametrize("score", ["heads", "mean_k"])
def test_two_that_compute_a_block_again_agree_on_its_record_and_its_rows(tmp_path: Path, score: str) -> None:
    with on(tmp_path, score=score, n_ctx=128) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(400)).result()
        ws.fork("fork").close()
    lose(tmp_path, "*.gguf")
    lose(tmp_path, "*.mk")
    if score == "heads":
        lose(tmp_path, "*.tk")
    with (
        on(tmp_path, score=score, n_ctx=128) as engine,
        engine.workspace("notes") as ws,
        engine.workspace("fork") as fork,
    ):
        fork.pin(100, 130)  # what it computes again is evaluated in other surroundings
        for one in (ws, fork):
            for seed in range(4):
                ask(one, seed)
        both = (ws, fork)
        assert all(one.stats().n_recomputed for one in both)
        for one in both:
            check_indexes(history_of(one))
        rows = [rows_of(history_of(one)) for one in both]
        numbers = [n for n in range(50) if rows[0][0][n] and rows[1][0][n]]
        assert len(numbers) > 5
        for mine, its in zip(*rows, strict=True):
            assert [mine[n] for n in numbers] == [its[n] for n in numbers]
    with (
        on(tmp_path, score=score, n_ctx=128) as engine,
        engine.workspace("notes") as ws,
        engine.workspace("fork") as fork,
    ):
        for one, before in zip((ws, fork), rows, strict=True):
            for index, was in zip(rows_of(history_of(one)), before, strict=True):
                assert [index[n] for n in numbers] == [was[n] for n in numbers]
            check_indexes(history_of(one))
    root = Root(tmp_path / "data")
    (family,) = root.family_ids()
    left = {"index", "record"} if score == "heads" else set()  # of blocks that nobody wanted
    assert {finding.kind for finding in verify_family(root, family).findings} <= left


def test_rows_made_while_an_edit_waits_are_not_made_again_by_it(tmp_path: Path) -> None:
    with on(tmp_path, score="mean_k") as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(900)).result()
    lose(tmp_path, "000001.gguf")
    lose(tmp_path, "*.mk")
    wanted = np.concatenate([text(203), text(60, 5), text(900)[300:]])
    with on(tmp_path, score="mean_k") as engine, engine.workspace("notes") as ws:
        lost = list(history_of(ws).unscored)
        assert len(lost) == 8
        checks, n_calls = engine.model.before_decode, 0

        def cancel(batch: Any) -> None:
            nonlocal n_calls
            n_calls += 1
            if n_calls == 3:
                stream.cancel()
            checks(batch)

        engine.model.before_decode = cancel
        stream = ws.rewrite(wanted)
        with pytest.raises(Cancelled):
            stream.result()
        engine.model.before_decode = checks
        policy: Any = ws._policy
        draft = policy._draft
        assert 0 < draft.n_recomputed < 8 and len(history_of(ws).unscored) == 8 - draft.n_recomputed
        made = [number for number in lost if number not in history_of(ws).unscored]
        for number in made:
            mine, its = history_of(ws).indexes.mean_k, draft.history.indexes.mean_k
            assert mine is not None and mine.row(number).tobytes() == its.row(number).tobytes()
        ws.search("AB")
        assert not history_of(ws).unscored
        ws.rewrite(wanted).result()
        assert policy._session is draft and ws.stats().n_recomputed == 8
        check_indexes(history_of(ws))
        rows = rows_of(history_of(ws))
    with on(tmp_path, score="mean_k") as engine, engine.workspace("notes") as ws:
        assert rows_of(history_of(ws)) == rows and not history_of(ws).unscored


def test_a_lost_file_of_means_leaves_the_rows_of_heads_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of blocks that were computed again, too, though the Mean-K of these is another one then."""
    with on(tmp_path, 40) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
        for seed in range(3):
            ask(ws, seed)
        n_recomputed = ws.stats().n_recomputed
        assert n_recomputed > 5
    with on(tmp_path) as engine, engine.workspace("notes") as ws:
        expected = rows_of(history_of(ws))
        again = recomputed_of(ws)
        held = {n for n in again if history_of(ws).store.where(history_of(ws).table[n].ref) == "disk"}
        assert held and ws.stats().n_without_rows == 0
    lose(tmp_path, "*.mk")
    with on(tmp_path, score="mean_k") as engine, engine.workspace("notes") as ws:
        assert len(history_of(ws).unscored) > 50
    seen: list[object] = []
    read = DiskStore.read
    monkeypatch.setattr(DiskStore, "read", lambda self, *args: seen.append(args) or read(self, *args))
    with on(tmp_path) as engine, engine.workspace("notes") as ws:
        assert not seen and ws.stats().n_without_rows == 0
        assert rows_of(history_of(ws)) == expected
