"""What a server needs of memory beside a conversation's steps: a history that takes over another's beginning,
and news of every token (fake model)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_model import END
from fake_run import checked_sessions, faked_template, text

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.memory.report import TextPiece
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
GREEDY = SamplingParams(temp=0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_on(tmp_path / "data") as found:
        yield found


def rows(engine: Engine, ws: Workspace) -> list[tuple[int, int]]:
    """(token, fingerprint of what it had attended to) of every token."""
    history = ws._policy._session.history  # type: ignore[attr-defined]
    found: list[tuple[int, int]] = []
    for block in history.table:
        record = history.store.get(block.ref)
        tokens = engine.model.tokens_of(record, block.count)
        found += zip(tokens, engine.model.fingerprints_of(record, block.count), strict=True)
    return found


@pytest.mark.parametrize("name", [None, "notes"])
@pytest.mark.parametrize("n", [605, 100, 0])
def test_an_empty_workspace_takes_over_the_beginning_of_another(
    engine: Engine, name: str | None, n: int
) -> None:
    with engine.workspace() as old, engine.workspace(name) as new:
        old.read_tokens(text(605)).result()
        before = rows(engine, old)
        new.take_over(old, n)
        both = np.concatenate([text(605), text(20, 1)])
        result = new.step(both, query_start=605, sampling=GREEDY, max_tokens=5).result()
        assert (result.n_cached, result.n_carried, result.n_evaluated) == (0, n, 625 - n)
        assert rows(engine, new)[:n] == before[:n]
        assert rows(engine, old) == before
        more = new.step(text(10, 2), sampling=GREEDY, max_tokens=5).result()
        assert (more.n_carried, more.n_evaluated) == (0, 10)


def test_what_was_taken_over_is_durable(engine: Engine) -> None:
    with engine.workspace() as old:
        old.read_tokens(text(605)).result()
        with engine.workspace("notes") as new:
            new.take_over(old, 605)
            new.read_tokens(text(605)).result()
            expected = rows(engine, new)
    with engine.workspace("notes") as again:
        assert rows(engine, again) == expected
        assert again.step(text(10, 2), sampling=GREEDY, max_tokens=5).result().n_cached == 605


def test_a_workspace_with_a_history_takes_nothing_over(engine: Engine) -> None:
    with engine.workspace() as old, engine.workspace() as new:
        old.read_tokens(text(300)).result()
        new.read_tokens(text(40, 5)).result()
        new.take_over(old, 300)
        assert new.read_tokens(text(300)).result().n_carried == 0


@pytest.mark.parametrize("every_token", [False, True])
def test_every_token_is_told_where_that_is_asked_for(engine: Engine, every_token: bool) -> None:
    with engine.workspace() as ws:
        engine.model.forced = [40, 5, 6, 41, END]
        answer = ws.prompt(text(20), sampling=GREEDY, max_tokens=9, every_token=every_token)
        pieces: list[Any] = [event for event in answer if isinstance(event, TextPiece)]
        told = [(piece.text, piece.token) for piece in pieces]
        whole = [("H", 40), ("", 5), ("é", 6), ("I", 41), ("", END)]
        assert told == [one for one in whole if every_token or one[0]]
