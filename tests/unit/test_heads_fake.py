"""Calibrated heads over the fake model: what they find, and a token index that follows its blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
import wide_heads
from fake_run import asked, checked_sessions, faked_template, request, text
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from wide_heads import check_indexes, history_of, on, recomputed_of, rows_of

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import Cancelled, InvalidOption, StoreFull
from kvmem_llama.memory.index import mean_of
from kvmem_llama.store.compact import compact
from kvmem_llama.store.disk import DiskStore
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template", "wide")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    wide_heads.widen(monkeypatch)


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    wide_heads.write(tmp_path, wide_heads.calibration())
    return lambda n_disk=0, **options: on(tmp_path, n_disk, **options)


def ask(ws: Workspace, seed: int, n: int = 30) -> Any:
    return ws.step(text(20, seed), sampling=GREEDY, max_tokens=n).result()


def told(result: Any) -> Any:
    recalls = [[(b.start, b.rank, b.channels, b.why) for b in r.blocks] for r in result.recalls]
    return result.tokens, recalls


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every record that is read from disk from now on."""
    seen: list[int] = []
    read = DiskStore.read

    def spy(self: DiskStore, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(DiskStore, "read", spy)
    return seen


# -- what is found


@pytest.mark.parametrize("score", ["heads", "fused"])
def test_a_question_finds_blocks_by_heads(tmp_path: Path, score: str) -> None:
    path = wide_heads.write(tmp_path, wide_heads.calibration())
    run, session = asked(score=score, calibration=path)
    assert session.history.indexes.mean_k is None
    (report,) = run.step(session, request(text(20, 1), 5)).recalls
    ranks = [b.channels.get("heads", 0) for b in report.blocks if b.rank is not None]
    assert 1 in ranks and len(ranks) == report.n_selected
    assert score == "fused" or sorted(ranks) == list(range(1, len(ranks) + 1))


def test_only_the_layers_that_are_scored_are_read(tmp_path: Path) -> None:
    path = wide_heads.write(tmp_path, wide_heads.calibration([(2, 0)]))
    for score, layers in {"heads": (2,), "lexical": (), "mean_k": (0, 2), "fused": (2,)}.items():
        run, session = asked(300, score=score, calibration=path)
        assert session.layers.numbers == layers
        assert run.step(session, request(text(20, 1), 5)).n_generated == 5
    _, session = asked(300, score="fused", calibration="none")
    assert session.layers.numbers == (0, 2) and session.history.indexes.tokens is None


def test_the_score_heads_needs_a_calibration_that_fits_the_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="kvmem calibrate"):
        asked(100, score="heads", calibration="none")
    for heads, changes in (([(1, 0)], {}), ([(0, 2)], {}), ([(7, 0)], {})):
        path = wide_heads.write(tmp_path, wide_heads.calibration(heads, **changes))
        with pytest.raises(InvalidOption, match="full attention"):
            asked(100, score="heads", calibration=path)


def test_a_step_remembers_what_found_its_blocks(opened: Open) -> None:
    names = []
    for score in ("heads", "fused", "mean_k", "lexical"):
        with opened(score=score) as engine, engine.workspace(score) as ws:
            ws.read_tokens(text(600)).result()
            ask(ws, 1)
        with opened(score=score) as engine:
            names.append(
                engine.shelf.open(score, create=False, policy="kvmem", system=None).restored.steps[-1].scorer
            )
    assert names[0].startswith("heads@") and len(names[0]) == len("heads@") + 8
    assert names[1] == f"heads+lexical@{names[0][-8:]}"
    assert names[2:] == ["reference", "lexical"]


def test_stats_say_what_is_indexed_and_what_would_find_more(opened: Open) -> None:
    sizes = {"heads": {"heads": 2 * 34.0}, "mean_k": {"mean_k": 2 * 32 * 2 / 8}, "lexical": {}}
    for score, expected in sizes.items():
        with opened(score=score) as engine, engine.workspace() as ws:
            ws.read_tokens(text(100)).result()
            stats = ws.stats()
            assert stats.index_bytes_per_token == expected and not stats.hint
    with opened(score="fused", calibration="none") as engine, engine.workspace() as ws:
        stats = ws.stats()
        assert "kvmem calibrate" in stats.hint and stats.score == "lexical+reference"
        assert set(stats.index_bytes_per_token) == {"mean_k"}


# -- it is kept


@pytest.mark.parametrize("score", ["heads", "fused"])
def test_opening_reads_no_record_and_finds_the_same(
    opened: Open, monkeypatch: pytest.MonkeyPatch, score: str
) -> None:
    with opened(score=score) as engine, engine.workspace() as ws:
        ws.read_tokens(text(1501)).result()
        expected = [told(ask(ws, seed)) for seed in (1, 2)]
    with opened(score=score) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
        assert told(ask(ws, 1)) == expected[0]
    seen = rows_read(monkeypatch)
    with opened(score=score) as engine, engine.workspace("notes") as ws:
        assert not seen
        check_indexes(history_of(ws))
        assert told(ask(ws, 2)) == expected[1]


@pytest.mark.parametrize("first", ["mean_k", "lexical", "other heads"])
def test_another_score_makes_its_index_from_the_records_once(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    options = {"score": first}
    if first == "other heads":
        other = wide_heads.write(tmp_path, wide_heads.calibration([(0, 0)]), "other.json")
        options = {"score": "heads", "calibration": other}
    with opened(**options) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
    with opened() as engine, engine.workspace() as ws:
        ws.read_tokens(text(1501)).result()
        expected = told(ask(ws, 1))
    seen, reported = rows_read(monkeypatch), []
    with opened() as engine:
        engine.on_rows = lambda done, n: reported.append((done, n))
        with engine.workspace("notes") as ws:
            assert len(seen) == 188 and reported == [(0, 188), (188, 188)]
            check_indexes(history_of(ws))
    del seen[:]
    with opened() as engine, engine.workspace("notes") as ws:
        assert not seen
        assert told(ask(ws, 1)) == expected
    del seen[:]
    with opened(score="mean_k") as engine, engine.workspace("notes") as ws:  # its rows are always kept
        assert not seen
        check_indexes(history_of(ws))


def test_a_damaged_file_of_rows_is_made_again(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
    (path,) = tmp_path.glob("data/*/index/*.tk")
    whole = path.read_bytes()
    seen = rows_read(monkeypatch)
    for damaged, n in (
        (whole[:-1], 1),
        (whole[:5000] + bytes([whole[5000] ^ 4]) + whole[5001:], 1),
        (whole[:20] + b"x" + whole[21:], 188),
        (b"", 188),
        (whole, 0),
    ):
        path.write_bytes(damaged)
        del seen[:]
        with opened() as engine, engine.workspace("notes") as ws:
            assert len(seen) == n
            check_indexes(history_of(ws))
        assert path.read_bytes() == whole
    path.unlink()
    with opened() as engine, engine.workspace("notes", read_only=True) as ws:
        check_indexes(history_of(ws))
    assert not path.exists()


def test_a_damaged_row_is_found_and_repaired(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
    (path,) = tmp_path.glob("data/*/index/*.tk")
    whole = path.read_bytes()
    path.write_bytes(whole[:90000] + bytes([whole[90000] ^ 4]) + whole[90001:])
    root = Root(tmp_path / "data")
    (family,) = root.family_ids()
    (finding,) = verify_family(root, family).findings
    assert finding.kind == "tokens" and "token index" in str(finding.what)
    assert verify_family(root, family, repair=True).n_repaired == 1
    assert not verify_family(root, family).findings
    seen = rows_read(monkeypatch)
    with opened() as engine, engine.workspace("notes") as ws:
        assert len(seen) == 1
        check_indexes(history_of(ws))
    assert path.read_bytes() == whole


def test_a_truncated_and_a_forked_history_keep_their_rows(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
        ws.truncate(1203)
        with ws.fork("branch") as fork:
            fork.read_tokens(text(101, 3)).result()
        ws.read_tokens(text(50, 4)).result()
    seen = rows_read(monkeypatch)
    with opened() as engine, engine.workspace("notes") as ws, engine.workspace("branch") as fork:
        assert not seen
        for one in (ws, fork):
            check_indexes(history_of(one))


def test_rows_outlive_their_records(opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that fell to their tokens are found by the rows that they had, and so are those that were
    computed again. Rows that are gone, too, come back when the block is computed again."""
    with opened() as engine, engine.workspace() as ws:
        ws.read_tokens(text(1501)).result()
        expected = told(ask(ws, 1, 0))
    with opened(40) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
        assert ws.stats().n_without_rows == 0
        assert told(ask(ws, 1, 0)) == expected and ws.stats().n_recomputed > 0
        check_indexes(history_of(ws), recomputed_of(ws))
        ws.truncate(1501)
    with opened(40) as engine, engine.workspace("notes") as ws:
        assert check_indexes(history_of(ws), recomputed_of(ws)) > 100 and ws.stats().n_without_rows == 0
    for path in tmp_path.glob("data/*/index/*.tk"):
        path.unlink()
    with opened(40) as engine, engine.workspace("notes") as ws:
        n = ws.stats().n_without_rows
        assert n > 100
        assert ask(ws, 2).n_generated == 30
        history = history_of(ws)
        missing = np.flatnonzero(history.indexes.tokens.counts == 0)  # type: ignore[union-attr]
        assert len(missing) == ws.stats().n_without_rows
        lost = [block.start // 8 for block in history.table if history.store.where(block.ref) == "tokens"]
        assert set(missing.tolist()) <= set(lost) and len(missing) < n


def test_a_fork_with_other_heads_leaves_the_rows_of_its_parent(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(903)).result()
        with ws.fork("branch"):
            pass
        ws.read_tokens(text(300, 2)).result()
    other = wide_heads.write(tmp_path, wide_heads.calibration([(0, 0)]), "other.json")
    with opened(calibration=other) as engine, engine.workspace("branch") as fork:
        fork.read_tokens(text(100, 3)).result()
        check_indexes(history_of(fork))
    seen = rows_read(monkeypatch)
    with opened() as engine, engine.workspace("notes") as ws:
        assert not seen
        check_indexes(history_of(ws))


def test_rows_are_made_on_any_thread() -> None:
    model = fake_model.FakeModel(8, 8, 8)
    mean = mean_of(model.layers, model.layout)
    rng = np.random.default_rng(3)
    records = [rng.integers(0, 60, model.layout.nbytes, dtype=np.uint8) for _ in range(4)]
    expected = [mean(record, 8).tobytes() for record in records]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: mean(records[i % 4], 8).tobytes(), range(2000)))
    assert found == [expected[i % 4] for i in range(2000)]


def test_compaction_and_export_leave_an_index_that_fits(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
        ws.truncate(903)
        ws.read_tokens(text(300, 2)).result()
        holding, store = ws._opened.holding, ws._opened.store  # type: ignore[union-attr]
        ws.truncate(1100)
        moved = compact(holding, store).n_moved
        assert moved
    seen = rows_read(monkeypatch)
    with opened() as engine, engine.workspace("notes") as ws:
        assert not seen
        check_indexes(history_of(ws))
    root = Root(tmp_path / "data")
    for family in root.family_ids():
        assert not verify_family(root, family).findings


# -- any life

SUFFIXES, HOWS = ("gguf", "mk", "tk"), ("flipped", "lost", "short")
CALIBRATIONS = ([(2, 0), (0, 1), (2, 1)], [(0, 0)])


def damage(folder: Path, what: str, at: int) -> None:
    """Bits flip, or files go."""
    suffix, how = what.split()
    for path in sorted(folder.glob(f"data/*/*/*.{suffix}")):
        if how == "lost":
            path.unlink()
            continue
        data = bytearray(path.read_bytes())
        if how == "short":
            data = data[: 4096 + at % max(len(data) - 4096, 1)]
        for i in range(4096 + at % 4096, len(data), 20_000):
            data[i] ^= 4
        path.write_bytes(data)


def act(draw: Callable[..., Any], ws: Workspace, names: list[str]) -> Workspace:
    """Does something -> the workspace that goes on. What is drawn must not depend on the history: how long an
    answer is may depend on which blocks fell first."""
    acts = ["read", "ask", "truncate", "fork", "compact", "rewrite", "cancel"]
    what, seed = draw(st.sampled_from(acts)), draw(st.integers(0, 5))
    n, n_events = draw(st.integers(1, 300)), draw(st.integers(0, 3))
    first, end = sorted(draw(st.integers(0, 1000)) * ws.n_tokens // 1000 for _ in range(2))
    if what == "read":
        ws.read_tokens(text(n, seed)).result()
    elif what == "ask":
        ask(ws, seed, 12)
    elif what == "truncate":
        ws.truncate(end)
    elif what == "compact":
        compact(ws._opened.holding, ws._opened.store)  # type: ignore[union-attr]
    elif what == "fork" and len(names) < 3:
        names.append(f"fork {len(names)}")
        forked = ws.fork(names[-1])
        check_indexes(history_of(forked), recomputed_of(forked))
        ws.close()
        return forked
    elif what == "rewrite":
        ids = ws.history()
        stream = ws.rewrite(np.concatenate([ids[:first], text(n // 4, seed), ids[end:]]))
        with suppress(StoreFull):  # a budget that the edit does not fit refuses and undoes it
            stream.result()
    elif what == "cancel":
        stream = ws.rewrite(np.concatenate([text(n, seed), ws.history()]))
        for _ in zip(range(n_events), stream, strict=False):
            pass
        stream.cancel()
        with suppress(Cancelled, StoreFull):
            stream.result()
    return ws


# What falls first depends on the time that a disk takes: shrinking would not meet the same failure again.
@settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
)  # fmt: skip
@given(st.data())
def test_after_any_life_the_rows_are_those_of_the_records(data: st.DataObject) -> None:
    draw = data.draw
    with tempfile.TemporaryDirectory() as at:
        folder, names = Path(at), ["notes"]
        paths = [
            wide_heads.write(folder, wide_heads.calibration(heads), f"{i}.json")
            for i, heads in enumerate(CALIBRATIONS)
        ]
        root, is_sound = Root(folder / "data"), True
        for _ in range(draw(st.integers(2, 5), label="openings")):
            n_disk = draw(st.sampled_from([0, 40]))
            options = draw(
                st.sampled_from(
                    [
                        {"score": "heads", "calibration": paths[0]},
                        {"score": "fused", "calibration": paths[0]},
                        {"score": "heads", "calibration": paths[1]},
                        {"score": "fused", "calibration": "none"},
                        {"score": "mean_k", "calibration": paths[1]},
                    ]
                ),
                label="options",
            )
            name = draw(st.sampled_from(names), label="workspace")
            with on(folder, n_disk, n_ctx=128, **options) as engine:
                ws = engine.workspace(name)
                check_indexes(history_of(ws), recomputed_of(ws))
                for _ in range(draw(st.integers(1, 4), label="acts")):
                    ws = act(draw, ws, names)
                    check_indexes(history_of(ws), recomputed_of(ws))
                name, rows = ws.name, rows_of(history_of(ws))
            with on(folder, n_disk, n_ctx=128, **options) as engine, engine.workspace(name) as ws:
                assert rows_of(history_of(ws)) == rows  # computed again or not
            what = draw(
                st.sampled_from(["", *(f"{s} {how}" for s in SUFFIXES for how in HOWS)]), label="damage"
            )
            if what:
                damage(folder, what, draw(st.integers(0, 1 << 16)))
            is_sound = is_sound and not what
            is_mended = draw(st.booleans()) and not is_sound
            for family in root.family_ids():
                for _ in range(2 * is_mended):  # a block whose record is dropped may lack a row of the index
                    verify_family(root, family, repair=True)
                if is_sound or is_mended:
                    assert not verify_family(root, family).findings
            is_sound |= is_mended
