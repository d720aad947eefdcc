"""Blocks whose rows are lost, on the fake model: whatever needs them has them computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_run import checked_sessions, faked_template, text

from kvmem_llama.engine.cells import Cells
from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import Cancelled, MandatoryTooLarge, StoreFull
from kvmem_llama.memory.history import History
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)
RECORD = fake_model.FakeModel(8, 8, 8).layout.nbytes
SLOT = 8192  # bytes on disk of a record of the fake model


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """An engine whose workspaces lie in a folder of the test. n_disk: records that fit the disk budget."""

    @contextmanager
    def open_engine(n_disk: int = 0, n_host: int = 4, **options: Any) -> Iterator[Engine]:
        budgets = {"disk_budget": n_disk * SLOT, "host_budget": n_host * RECORD, "commit_blocks": 128}
        with engine_on(tmp_path / "data", **(budgets | options)) as engine:
            yield engine

    return open_engine


def ask(ws: Workspace, seed: int, n: int = 30) -> Any:
    return ws.step(text(20, seed), sampling=GREEDY, max_tokens=n).result()


def history_of(ws: Workspace) -> History:
    return ws._policy._session.history  # type: ignore[attr-defined,no-any-return]


def lost(ws: Workspace) -> list[int]:
    """First tokens of the blocks whose rows are lost."""
    history = history_of(ws)
    return history.lost(block.start for block in history.table)


def damage(folder: Path) -> None:
    """Every record is damaged."""
    for path in folder.glob("data/*/segments/*.gguf"):
        data = bytearray(path.read_bytes())
        data[4096:] = bytes(0xFF ^ b for b in data[4096:])
        path.write_bytes(data)


class Neighbour:
    """Cells that somebody else has."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cells: Cells = np.zeros(0, np.int32)

    def has(self, choose: Callable[[EngineCore], Cells]) -> None:
        def change(core: EngineCore) -> None:
            before, self._cells = self._cells, choose(core)
            core.pool.free(before)

        self._engine.call(change)


def crowd(engine: Engine, neighbour: Neighbour) -> None:
    """The neighbour takes all free cells; those that it had, below the view, become free."""
    neighbour.has(lambda core: core.pool.alloc(core.pool.n_free))


# -- exact mode


def test_a_view_that_has_to_move_in_exact_mode_has_its_lost_rows_computed_again(opened: Open) -> None:
    with opened(14, exact=True) as engine, engine.workspace("notes") as ws:
        neighbour = Neighbour(engine)
        neighbour.has(lambda core: core.pool.alloc(100))
        ws.read_tokens(text(1510)).result()
        crowd(engine, neighbour)
        n_resident, missing = ws.stats().n_resident, set(lost(ws))
        session = ws._policy._session
        assert n_resident > 150 and len(missing & {r.part.start for r in session.view}) > 10
        result = ws.read_tokens(text(30, 2)).result()  # the view has room for these
        assert result.n_read == 30 and ws.n_tokens == 1540
        assert ws.stats().n_recomputed > 10
        assert ask(ws, 1).n_generated == 30


def test_a_view_that_has_to_move_in_mid_answer_has_its_lost_rows_computed_again(opened: Open) -> None:
    with opened(14, exact=True) as engine, engine.workspace("notes") as ws:
        neighbour = Neighbour(engine)
        neighbour.has(lambda core: core.pool.alloc(100))
        ws.read_tokens(text(1510)).result()
        stream = ws.step(text(20, 1), sampling=GREEDY, max_tokens=120)
        n_before = 0
        for n, _ in enumerate(stream):
            if n == 12:
                n_before = ws.stats().n_recomputed
                crowd(engine, neighbour)
        result = stream.result()
        assert result.n_generated == 120 and ws.n_tokens == 1650
        assert ws.stats().n_recomputed > n_before


# -- blocks that every step needs


def test_sink_and_pins_and_the_partial_block_never_fall(opened: Open) -> None:
    with opened(14) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(300)).result()
        ws.pin(290, 300)
        ws.read_tokens(text(903, 1)).result()
        history = history_of(ws)
        assert len(lost(ws)) > 100
        assert not set(lost(ws)) & {0, 288, 296, 1200}
        assert history.store.where(history.table[37].ref) != "tokens"  # it was partial when it was pinned
        ws.unpin(290, 300)
        ws.truncate(1197)
        ws.read_tokens(text(500, 2)).result()
        assert {288, 296} <= set(lost(ws)) and not set(lost(ws)) & {0, 1696}
    with opened(14) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(400, 3)).result()
        assert 0 not in lost(ws)
        with ws.fork("branch") as fork:
            fork.read_tokens(text(400, 4)).result()
            assert 0 not in lost(fork)


# -- truncation


@pytest.mark.parametrize("how", ["tokens tier", "damage"])
def test_a_lost_block_can_be_cut(opened: Open, tmp_path: Path, how: str) -> None:
    n_disk = 14 if how == "tokens tier" else 0
    with opened(n_disk) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1500)).result()
    if how == "damage":
        damage(tmp_path)
    for n in (803, 802):
        with opened(n_disk) as engine, engine.workspace("notes") as ws:
            ws.truncate(n)
            assert np.array_equal(ws.history(), text(1500)[:n])
    with opened(n_disk) as engine, engine.workspace("notes") as ws, ws.fork("branch") as fork:
        assert ws.n_tokens == 802 and not engine.model.batches
        for one in (ws, fork):
            assert ask(one, 1).n_generated == 30
            assert np.array_equal(one.history()[:802], text(1500)[:802])
            assert one.stats().n_recomputed > 0
            one.truncate(800)
            one.truncate(797)
            assert ask(one, 1).n_generated == 30


def test_a_cut_block_has_the_rows_of_its_tokens(opened: Open) -> None:
    """Computed again from a lost block or cut from a whole one: the same tokens at the same place."""
    with opened(14) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1500)).result()
        ws.truncate(803)
        ws.read_tokens(text(2, 1)).result()
        history = history_of(ws)
        tokens = engine.model.tokens_of(history.store.get(history.table[100].ref), 5)
        assert tokens == [*text(1500)[800:803].tolist(), *text(2, 1).tolist()]
        mean = history.indexes.mean_k.means(0, np.array([100]))[0, 0]
        assert mean[6] == pytest.approx(np.mean(tokens), abs=0.1)


# -- a step that does not reach its commit


def test_what_a_cancelled_read_has_read_is_there_after_opening(opened: Open) -> None:
    tokens = text(1500)
    with opened(commit_blocks=1000) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(3, 9)).result()
        for goal in (400, 800):
            stream = ws.read_tokens(tokens)
            for event in stream:
                if event.done >= goal:
                    stream.cancel()
                    break
            with pytest.raises(Cancelled):
                stream.result()
            assert ws.n_tokens == 3
    with opened(commit_blocks=1000) as engine, engine.workspace("notes") as ws:
        result = ws.read_tokens(tokens).result()
        assert 800 - 16 - 8 <= result.n_reused < 1500 and ws.n_tokens == 1503
        last = ask(ws, 1).tokens
    with opened() as engine, engine.workspace() as ws:
        ws.read_tokens(text(3, 9)).result()
        ws.read_tokens(tokens).result()
        assert ask(ws, 1).tokens == last


def test_a_full_disk_undoes_the_step_but_not_the_view(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreFull("disk", 1, 0)

    front = text(200, 5)
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(1501)).result()
        with monkeypatch.context() as patch:
            patch.setattr(ws._opened.journal, "commit", full)
            with pytest.raises(StoreFull):
                ws.read_tokens(front).result()
        stats = ws.stats()
        assert stats.n_tokens == 1501 and stats.n_resident > 0 and stats.n_orphans == (1501 + 200) // 8 - 187
        result = ws.read_tokens(front).result()
        assert result.n_read == (1501 + 200) % 8
        last = ask(ws, 1).tokens
    with opened() as engine, engine.workspace() as ws:
        ws.read_tokens(text(1501)).result()
        ws.read_tokens(front).result()
        assert ask(ws, 1).tokens == last


# -- any life


@pytest.mark.parametrize("seed", range(4))
def test_no_step_fails_for_rows_that_are_lost(opened: Open, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "exact": bool(seed % 2),
        "n_ctx": 128,
        "n_sink": int(rng.choice([0, 8, 16])),
        "n_prefill_view": int(rng.choice([0, 64])),
        "first_pass": str(rng.choice(["canonical", "current"])),
        "position_mode": str(rng.choice(["auto", "compact"])),
        "commit_blocks": 4,
        "durability": "relaxed",
    }
    n_recomputed = 0
    for life in range(4):
        n_disk = int(rng.integers(36, 48))
        with (
            opened(n_disk, **options) as engine,
            engine.workspace("notes") as ws,
            engine.workspace("others") as other,
        ):
            for _ in range(6):
                streams = []
                for one in (ws, other):
                    kind = rng.integers(0, 5)
                    n = one.n_tokens
                    if kind == 0 and n > 400:
                        one.truncate(int(rng.integers(n // 2, n)))
                    elif kind == 1 and n > 100 and not one.stats().pins:
                        one.pin(40, 60)
                    if kind <= 2:
                        streams.append(
                            one.read_tokens(text(int(rng.integers(1, 400)), int(rng.integers(99))))
                        )
                    else:
                        tokens = text(int(rng.integers(1, 30)), int(rng.integers(99)))
                        streams.append(
                            one.step(tokens, sampling=GREEDY, max_tokens=int(rng.integers(0, 150)))
                        )
                for stream in streams:
                    stream.result()
            n_recomputed += ws.stats().n_recomputed
        if life == 1:
            damage(tmp_path)
        if life == 2:
            damage(tmp_path)
            for path in tmp_path.glob("data/*/index/*"):
                path.unlink()
    assert n_recomputed > 0


# -- RAM


class Watched(dict[int, Any]):
    """Remembers how many there were at once."""

    most = 0

    def __setitem__(self, key: int, value: Any) -> None:
        super().__setitem__(key, value)
        self.most = max(self.most, len(self))


@pytest.mark.parametrize("n_host", [4, 400])
def test_rows_computed_again_take_one_view_beside_the_host_budget(
    opened: Open, tmp_path: Path, n_host: int
) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(3001)).result()
    damage(tmp_path)
    with opened(n_host=n_host) as engine, engine.workspace("notes") as ws:
        history = history_of(ws)
        held = history.recomputed = Watched()
        for seed in range(4):
            assert ask(ws, seed).n_generated == 30
            assert not history.recomputed
        n_view = ws.n_view // 8
        assert n_view // 4 < held.most <= n_view + 1 and ws.stats().n_recomputed > n_view + 1
        assert history.store.stats().peak_bytes <= n_host * RECORD


# -- pins


def test_pins_must_leave_room_for_reading(opened: Open) -> None:
    with opened(n_prefill_view=64) as engine, engine.workspace() as ws:
        ws.read_tokens(text(300)).result()
        with pytest.raises(MandatoryTooLarge) as raised:
            ws.pin(100, 160)
        assert raised.value.n_view == 64 and "n-prefill-view" in raised.value.hint
        assert ws.stats().pins == ()
        ws.pin(100, 130)
        assert ws.read_tokens(text(300, 1)).result().n_read == 300
