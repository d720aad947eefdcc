"""Durable workspaces over the fake model: closed and opened again they are as if never closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_model import END
from fake_run import checked_sessions, faked_template, text

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import (
    Cancelled,
    InvalidOption,
    StoreFull,
    StoreLocked,
    WorkspaceMismatch,
    WorkspaceNotFound,
)
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)


Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """An engine whose workspaces lie in a folder of the test."""

    @contextmanager
    def open_engine(*, sound: bool = True, **options: Any) -> Iterator[Engine]:
        folder = tmp_path / "data"
        with engine_on(folder, **options) as engine:
            yield engine
        root = Root(folder)
        for family in root.family_ids() if sound else []:
            assert not verify_family(root, family).findings

    return open_engine


def ask(ws: Workspace, seed: int, n: int = 30) -> Any:
    return ws.step(text(20, seed), sampling=GREEDY, max_tokens=n).result()


def test_a_search_by_words_ends_with_its_workspace(opened: Open) -> None:
    with opened(score="lexical") as engine, engine.workspace("notes") as ws:
        ws.read_tokens(text(400)).result()
        before = ws.stats().index_bytes
        ws.search("AB")
        assert ws.stats().index_bytes > before
        texts = ws._policy._session.history.texts  # type: ignore[attr-defined]
        ws.close()
        assert not texts.nbytes


def told(result: Any) -> Any:
    recalls = [[(b.start, b.count, b.rank, b.why, b.position) for b in r.blocks] for r in result.recalls]
    return result.tokens, result.text, recalls


def never_closed(opened: Open, *steps: Callable[[Workspace], Any], **options: Any) -> list[Any]:
    with opened(**options) as engine, engine.workspace() as ws:
        return [step(ws) for step in steps]


def read(n: int, seed: int = 0) -> Callable[[Workspace], Any]:
    return lambda ws: ws.read_tokens(text(n, seed)).result()


def asking(seed: int) -> Callable[[Workspace], Any]:
    return lambda ws: told(ask(ws, seed))


LIFE = (read(1501), asking(1), read(77, 5), asking(2), asking(3))


@pytest.mark.parametrize("host", [2**20, 3000])
def test_closed_after_every_step_equals_never_closed(opened: Open, host: int) -> None:
    expected = never_closed(opened, *LIFE)
    for step, result in zip(LIFE, expected, strict=True):
        with opened(host_budget=host) as engine, engine.workspace("notes") as ws:
            n = len(engine.model.batches)
            assert ws.n_tokens == len(ws.history()) and n == 0
            found = step(ws)
            if not isinstance(found, tuple):
                assert found.n_read == result.n_read
            else:
                assert found == result


def test_opening_evaluates_nothing_and_a_question_only_itself(opened: Open) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        read(1500)(ws)
    with opened() as engine, engine.workspace("notes") as ws:
        assert not engine.model.batches
        result = ask(ws, 1, 5)
        assert result.n_read == result.n_reused == 0
        # first pass, replay, answer
        assert sum(len(batch) for batch in engine.model.batches) == 20 + 20 + 5


def test_the_conversation_goes_on(opened: Open) -> None:
    with opened() as engine, engine.workspace("notes", system="be brief") as ws:
        engine.model.forced = [40, 41, END]
        ws.ask("why?", sampling=GREEDY).result()
    with opened() as engine, engine.workspace("notes") as ws:
        engine.model.forced = [42, 43]
        ws.ask("and?", sampling=GREEDY, max_tokens=2).result()
    with opened() as engine, engine.workspace("notes", create=False) as ws:
        ws.ask("so?", sampling=GREEDY, max_tokens=0).result()
        said = fake_model.FakeVocab().detokenize(ws.history()).decode()
        assert said == "(be brief)[why?]:HI<end>[and?]:JK|[so?]:"
        ws.truncate(len("(be brief)[why?]:HI"))
    with opened() as engine, engine.workspace("notes") as ws:
        ws.ask("so?", sampling=GREEDY, max_tokens=0).result()
        assert fake_model.FakeVocab().detokenize(ws.history()).decode() == "(be brief)[why?]:HI|[so?]:"


def test_a_workspace_that_is_not_there_is_not_found_and_one_in_use_is_locked(opened: Open) -> None:
    with opened() as engine:
        with pytest.raises(WorkspaceNotFound):
            engine.workspace("notes", create=False)
        with engine.workspace("notes"):
            with pytest.raises(StoreLocked):
                engine.workspace("notes")
            with opened() as other, pytest.raises(StoreLocked):
                other.workspace("notes")
        engine.workspace("notes").close()
        with pytest.raises(InvalidOption):
            engine.workspace("notes", policy="sliding_window")
        with pytest.raises(InvalidOption):
            engine.workspace("notes", system="another")
        engine.workspace("notes").close()
    with opened(block_size=16) as engine, pytest.raises(WorkspaceMismatch, match="block size"):
        engine.workspace("notes")


def test_an_engine_that_is_closed_gives_its_workspaces_up(opened: Open) -> None:
    with opened() as engine:
        ws = engine.workspace("notes")
        read(100)(ws)
    ws.close()
    with opened() as engine, engine.workspace("notes") as ws:
        assert ws.n_tokens == 100


@pytest.mark.parametrize("n", [1504, 1499, 800, 803, 5, 0])
def test_truncated_and_opened_again(opened: Open, n: int) -> None:
    def cut(ws: Workspace) -> None:
        ws.truncate(n)

    expected = never_closed(opened, read(1500), asking(1), cut, asking(2))
    with opened() as engine, engine.workspace("notes") as ws:
        read(1500)(ws)
        asking(1)(ws)
        cut(ws)
    with opened() as engine, engine.workspace("notes") as ws:
        assert ws.n_tokens == n and asking(2)(ws) == expected[3]


def test_pins_are_kept(opened: Open) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        read(600)(ws)
        ws.pin(100, 110)
        ws.pin(300, 301)
        ws.unpin(100, 110)
    with opened() as engine, engine.workspace("notes") as ws:
        assert ws.stats().pins == ((300, 301),)


def test_a_fork_goes_its_own_way(opened: Open) -> None:
    expected = never_closed(opened, read(1501), asking(1), asking(2))
    other = never_closed(opened, read(1501), asking(1), asking(3))
    with opened() as engine, engine.workspace("notes") as ws:
        read(1501)(ws)
        asking(1)(ws)
        with pytest.raises(InvalidOption):
            ws.fork()
        with ws.fork("branch") as fork:
            assert fork.name == "branch" and asking(3)(fork) == other[2]
        assert asking(2)(ws) == expected[2]
    with opened() as engine, engine.workspace("branch") as ws:
        assert ws.n_tokens == 1501 + 50 + 50
        assert ws.history()[-50:-30].tolist() == text(20, 3).tolist()


def test_a_cancelled_read_is_not_read_again_after_opening(opened: Open) -> None:
    tokens = text(1500)
    with opened() as engine, engine.workspace("notes") as ws:
        read(3, 9)(ws)
        stream = ws.read_tokens(tokens)
        for event in stream:
            if event.done >= 800:
                stream.cancel()
                break
        with pytest.raises(Cancelled):
            stream.result()
        assert ws.n_tokens == 3
    with opened() as engine, engine.workspace("notes") as ws:
        result = ws.read_tokens(tokens).result()
        assert 800 - 16 * 8 - 16 <= result.n_reused < 1500 and ws.n_tokens == 1503
        last = told(ask(ws, 1))
    assert last == never_closed(opened, read(3, 9), read(1500), asking(1))[2]


def cancelled_read(ws: Workspace, tokens: Any, n: int) -> None:
    stream = ws.read_tokens(tokens)
    for event in stream:
        if event.done >= n:
            stream.cancel()
            break
    with pytest.raises(Cancelled):
        stream.result()


@pytest.mark.parametrize("n_same", [0, 100, 400])
def test_another_read_takes_the_place_of_a_cancelled_one(opened: Open, n_same: int) -> None:
    one, other = text(1500), np.concatenate([text(1500)[:n_same], text(1500, 7)])
    with opened() as engine, engine.workspace("notes") as ws:
        read(3, 9)(ws)
        cancelled_read(ws, one, 800)
        cancelled_read(ws, other, 700)
    with opened() as engine, engine.workspace("notes") as ws:
        result = ws.read_tokens(other).result()
        assert result.n_reused >= 700 - 16 * 8 - 16
        last = told(ask(ws, 1))
    with opened() as engine, engine.workspace() as ws:
        read(3, 9)(ws)
        ws.read_tokens(other).result()
        assert last == told(ask(ws, 1))


def test_a_journal_that_fails_leaves_the_step_undone(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as engine, engine.workspace("notes") as ws:
        read(1501)(ws)
        journal = ws._opened.journal  # type: ignore[union-attr]

        def full(*_: object, **__: object) -> None:
            raise StoreFull("disk", 1, 0)

        before = ws.history()
        for name, act in (
            ("commit", lambda: ask(ws, 1)),
            ("read_ahead", lambda: read(1000, 4)(ws)),
            ("truncate", lambda: ws.truncate(13)),
            ("pin", lambda: ws.pin(100, 120)),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(journal, name, full)
                with pytest.raises(StoreFull):
                    act()
            assert np.array_equal(ws.history(), before) and ws.stats().pins == ()
        last = told(ask(ws, 2))
    with opened() as engine, engine.workspace("notes") as ws:
        assert ws.n_tokens == 1501 + 50
    assert last == never_closed(opened, read(1501), asking(2))[1]


# -- rows that are lost


def test_blocks_in_the_tokens_tier_are_computed_again(opened: Open) -> None:
    record = fake_model.FakeModel(8, 8, 8).layout.nbytes
    # Not by words: the first answer is made over blocks that were computed again, and may have others.
    options = {"disk_budget": 100 * record, "host_budget": 4 * record, "score": "mean_k"}
    expected = never_closed(opened, read(1501), asking(1), asking(2), score="mean_k")
    with opened(**options) as engine, engine.workspace("notes") as ws:
        read(1501)(ws)
        assert asking(1)(ws)[2] and ws.n_tokens == 1551
    with opened(**options) as engine, engine.workspace("notes") as ws:
        stats = ws.stats()
        assert stats.tiers is not None and stats.tiers.n_tokens >= 80
        result = ask(ws, 2)
        assert ws.stats().n_recomputed > 0
        assert any(b.recomputed for r in result.recalls for b in r.blocks)
        assert told(result)[2][0] == expected[2][2][0]  # the selection is the same
        assert ws.n_tokens == 1601


def test_damaged_records_are_computed_again(opened: Open, tmp_path: Path) -> None:
    expected = never_closed(opened, read(1501), asking(1))
    with opened(sound=False) as engine, engine.workspace("notes") as ws:
        read(1501)(ws)
    for path in tmp_path.glob("data/*/segments/*.gguf"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :] = bytes(0xFF ^ b for b in data[len(data) // 2 :])
        path.write_bytes(data)
    with opened(sound=False) as engine, engine.workspace("notes") as ws:
        result = ask(ws, 1)
        assert ws.stats().n_recomputed > 0 and ws.stats().tiers.n_damaged > 0  # type: ignore[union-attr]
        assert result.recalls and told(result)[2] == expected[1][2]
    with opened(sound=False) as engine, engine.workspace("notes") as ws:
        assert ws.n_tokens == 1551


def test_an_index_that_is_lost_is_made_again(opened: Open, tmp_path: Path) -> None:
    expected = never_closed(opened, read(1501), asking(1))
    with opened(sound=False) as engine, engine.workspace("notes") as ws:
        read(1501)(ws)
    for path in tmp_path.glob("data/*/index/*"):
        path.unlink()
    with opened(sound=False) as engine, engine.workspace("notes") as ws:
        assert asking(1)(ws) == expected[1]
    for path in [*tmp_path.glob("data/*/index/*"), *tmp_path.glob("data/*/segments/*.gguf")]:
        path.unlink()
    with opened(sound=False) as engine, engine.workspace("notes") as ws:
        assert told(ask(ws, 2))[0]
        assert ws.stats().n_recomputed >= 1551 // 8
