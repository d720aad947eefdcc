"""The words of blocks in the catalog: whatever was done to a workspace, a search by words finds what it would
find in words made from its token ids, and after a restart hardly any are made again."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_durable import Engine, engine_on
from fake_run import checked_sessions, faked_template, text

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import Cancelled
from kvmem_llama.lexical import terms
from kvmem_llama.memory.texts import BlockTexts
from kvmem_llama.store.content import spans
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.disk_records import DiskRecords
from kvmem_llama.store.export import export_workspace
from kvmem_llama.store.family_disk import open_disk
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.importing import import_workspace
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.store.stored_words import StoredWords
from kvmem_llama.store.tables import WORDS
from kvmem_llama.store.verify import Report
from kvmem_llama.store.words import BlockWords, source_of
from kvmem_llama.workspace import Workspace

pytestmark = pytest.mark.usefixtures("checked", "template")
checked, template = checked_sessions, faked_template
BLOCK = 8
QUERIES = ("AB cd 7", "K", "the 5Q", " ".join(chr(c) for c in range(48, 122)))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the blocks whose words were made from token ids."""
    numbers: list[int] = []
    make = BlockTexts._terms

    def spy(self: BlockTexts, tokens: Any, number: int) -> Any:
        numbers.append(number)
        return make(self, tokens, number)

    monkeypatch.setattr(BlockTexts, "_terms", spy)
    return numbers


def opened(folder: Path, **options: Any) -> contextlib.AbstractContextManager[Engine]:
    return engine_on(folder, **{"block_size": BLOCK, "score": "lexical", **options})


@contextlib.contextmanager
def workspace(folder: Path, name: str = "notes", **options: Any) -> Iterator[Workspace]:
    read_only = options.pop("read_only", False)
    with opened(folder, **options) as engine, engine.workspace(name, read_only=read_only) as ws:
        yield ws


def read(ws: Workspace, n: int, seed: int = 0) -> None:
    ws.read_tokens(text(n, seed)).result()


def scores(ws: Workspace) -> list[Any]:
    """Of the workspace, checked against words made from its tokens."""
    session = ws._policy._session  # type: ignore[attr-defined]
    history = session.history
    found = []
    for query in QUERIES:
        got = history.texts.scores(query, history.tokens, history.n_complete)
        fresh = BlockTexts(session.text_of, BLOCK).scores(query, history.tokens, history.n_complete)
        np.testing.assert_array_equal(got, fresh)
        found.append(got)
    return found


def verified(folder: Path, *, repair: bool = False) -> list[Report]:
    root = Root(folder)
    return [verify_family(root, family, repair=repair) for family in root.family_ids()]


def assert_sound(folder: Path) -> None:
    assert [report.findings for report in verified(folder)] == [[] for _ in Root(folder).family_ids()]


def rows(folder: Path) -> list[tuple[int, int]]:
    (path,) = folder.glob("*/catalog.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.execute("SELECT lineage, number FROM words ORDER BY lineage, number"))


def damage(folder: Path, statement: str) -> None:
    (path,) = folder.glob("*/catalog.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        assert db.execute(statement).rowcount


# -- lives


@pytest.mark.parametrize("seed", range(6))
def test_words_after_any_life_are_those_of_the_tokens(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(opened(tmp_path))
        names = ["w0"]
        live = {"w0": engine.workspace("w0")}
        for i in range(1, 26):
            name = rng.choice(names)
            ws = live[name]
            act = rng.choice(
                ["read", "read", "ask", "cancel", "cut", "edit", "edit", "search", "fork", "reopen", "delete"]
            )
            if act == "read":
                read(ws, rng.randrange(1, 60), i)
            elif act == "ask":
                ws.step(text(20, i), sampling=SamplingParams(temp=0), max_tokens=5).result()
            elif act == "cancel":
                stream = ws.read_tokens(text(120, i))
                stream.cancel()
                with contextlib.suppress(Cancelled):
                    stream.result()
            elif act == "edit":
                first, end = sorted(rng.randrange(ws.n_tokens + 1) for _ in range(2))
                ids = ws.history()
                stream = ws.rewrite(np.concatenate([ids[:first], text(rng.randrange(90), i), ids[end:]]))
                if rng.random() < 0.3:
                    stream.cancel()
                with contextlib.suppress(Cancelled):
                    stream.result()
            elif act == "cut":
                ws.truncate(rng.randrange(ws.n_tokens + 1))
            elif act == "search":
                scores(ws)
            elif act == "fork":
                names.append(f"w{i}")
                live[names[-1]] = ws.fork(names[-1])
            elif act == "delete" and len(names) > 1:
                ws.close()
                names.remove(name)
                del live[name]
                root = Root(tmp_path)
                delete_workspace(root, root.find(name))
            elif act == "reopen":
                for ws in live.values():
                    ws.close()
                if rng.random() < 0.5 and rows(tmp_path):
                    damage(tmp_path, f"UPDATE words SET source=x'00' WHERE number % 3 = {rng.randrange(3)}"
                           " OR number < 3")  # fmt: skip
                    if rng.random() < 0.5:
                        verified(tmp_path, repair=True)
                live = {name: engine.workspace(name, create=False) for name in names}
        for ws in live.values():
            scores(ws)
            ws.close()
        verified(tmp_path, repair=True)  # of what was damaged and not searched since
        assert_sound(tmp_path)
        for name in names:
            with engine.workspace(name, create=False) as ws:
                scores(ws)


def test_nothing_is_made_again_after_a_restart(tmp_path: Path, made: list[int]) -> None:
    with workspace(tmp_path, score="mean_k") as ws:
        read(ws, 400)
        read(ws, 30, 1)
        assert made == list(range(53)) and not ws._policy._session.history.texts.nbytes  # type: ignore[attr-defined]
    assert [number for _, number in rows(tmp_path)] == list(range(53))
    made.clear()
    with workspace(tmp_path) as ws:
        read(ws, 20, 2)
        assert made == [53, 54, 55]
        ws.search("AB")
        assert made == [53, 54, 55]
        scores(ws)
    assert_sound(tmp_path)


def test_words_of_a_long_read_are_made_on_the_way(tmp_path: Path, made: list[int]) -> None:
    with workspace(tmp_path, commit_blocks=4) as ws:
        stream = ws.read_tokens(text(400))
        n_at = [len(made) for _ in stream]
        stream.result()
    assert len(set(n_at)) > 10 and sorted(made) == list(range(50))


@pytest.mark.parametrize("searched", [False, True])
def test_a_fork_shares_words_and_adds_its_own(tmp_path: Path, searched: bool, made: list[int]) -> None:
    with workspace(tmp_path) as ws:
        read(ws, 400)
        if searched:
            scores(ws)
        with ws.fork("branch") as fork:
            read(fork, 30, 1)
            read(ws, 10, 3)
            ws.truncate(100)
            for one in (ws, fork):
                scores(one)
    made.clear()
    with workspace(tmp_path, "branch") as fork:
        history = fork._policy._session.history  # type: ignore[attr-defined]
        history.texts.scores("AB", history.tokens, history.n_complete)
        assert not made
    assert_sound(tmp_path)


def test_an_import_gets_its_words_with_the_first_search(tmp_path: Path, made: list[int]) -> None:
    folder, other, file = tmp_path / "a", tmp_path / "b", tmp_path / "notes.kvmem"
    with workspace(folder) as ws:
        read(ws, 401)
        expected = scores(ws)
    root = Root(folder)
    holding = Holding.open(root, root.find("notes"))
    records = DiskRecords(open_disk(holding.family, holding.place.workspace))
    export_workspace(holding, records, file)
    records.close()
    holding.close()
    other.mkdir()
    import_workspace(Root(other), file)
    with workspace(other, read_only=True) as ws:
        np.testing.assert_array_equal(scores(ws), expected)
    assert rows(other) == []
    with workspace(other) as ws:
        np.testing.assert_array_equal(scores(ws), expected)
    assert len(rows(other)) == 50
    made.clear()
    with workspace(other) as ws:
        history = ws._policy._session.history  # type: ignore[attr-defined]
        history.texts.scores("AB", history.tokens, history.n_complete)
        assert not made
    assert_sound(other)


# -- damage


DAMAGE = [
    ("UPDATE words SET terms=zeroblob(length(terms)) WHERE number=7", "row"),
    ("UPDATE words SET number=99 WHERE number=7", "row"),
    ("DELETE FROM words WHERE number=7", None),
    ("DROP TABLE words", "catalog"),
]


@pytest.mark.parametrize("statement, kind", DAMAGE)
def test_damaged_words_are_found_and_never_believed(tmp_path: Path, statement: str, kind: str | None) -> None:
    with workspace(tmp_path) as ws:
        read(ws, 200)
        expected = scores(ws)
    damage_or_drop(tmp_path, statement)
    (report,) = verified(tmp_path)
    assert {finding.kind for finding in report.findings} == ({kind} if kind else set())
    with workspace(tmp_path, read_only=True) as ws:
        np.testing.assert_array_equal(scores(ws), expected)
    if kind == "row":
        verified(tmp_path, repair=True)
        assert_sound(tmp_path)
        assert len(rows(tmp_path)) == 24
    with workspace(tmp_path) as ws:
        np.testing.assert_array_equal(scores(ws), expected)
    if kind != "catalog":
        assert len(rows(tmp_path)) == 25
        assert_sound(tmp_path)


def damage_or_drop(folder: Path, statement: str) -> None:
    (path,) = folder.glob("*/catalog.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


def test_words_of_other_tokens_and_of_no_block_are_found_and_mended(tmp_path: Path) -> None:
    with workspace(tmp_path) as ws:
        read(ws, 200)
        expected = scores(ws)
        assert ws._opened is not None
        catalog = ws._opened.holding.family.catalog
        with catalog.snapshot() as db:
            row = WORDS.one(db, "number=?", (7,))
        assert row is not None
        false = BlockWords(b"otherids", terms("AB"))
        strange = [false.row(row.lineage, 7), false.row(row.lineage, 25), false.row(99, 1)]
        catalog.write(lambda db: WORDS.insert(db, strange, replace=True))
        (report,) = verified(tmp_path)
        assert [finding.kind for finding in report.findings] == ["words", "words"]
    with workspace(tmp_path, read_only=True) as ws:
        np.testing.assert_array_equal(scores(ws), expected)
    for _ in range(2):  # words of no history are looked for where the rest is sound
        verified(tmp_path, repair=True)
    assert_sound(tmp_path)
    assert len(rows(tmp_path)) == 24


def test_only_words_of_committed_blocks_are_kept(tmp_path: Path) -> None:
    with workspace(tmp_path) as ws:
        read(ws, 100)
        assert ws._opened is not None
        ids = ws.history()
        stored = StoredWords(ws._opened.holding)
        damage(tmp_path, "DELETE FROM words")
        good = BlockWords(source_of(ids, 2, BLOCK), terms("good"))
        stored.keep({2: good, 3: BlockWords(b"otherids", terms("AB")), 12: good, 40: good})
        kept = stored.read()
        assert list(kept) == [2] and kept[2].terms.tolist() == good.terms.tolist()
        assert source_of(ids[8:], 2, BLOCK, 8) == good.source
        with ws._opened.holding.family.catalog.snapshot() as db:
            assert len(spans(db, 1)) == 1


# -- what is gone


@pytest.mark.parametrize("way", ["delete", "truncate"])
def test_words_go_with_their_blocks(tmp_path: Path, way: str) -> None:
    def is_there(word: str) -> bool:
        number = terms(word).astype("<u8").tobytes()
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        return any(number in data for data in files)

    said = np.array([ord(c) - 32 for c in " Zanzibar "], np.int32)
    with workspace(tmp_path) as ws:
        read(ws, 64)
        with ws.fork("branch") as fork:
            fork.read_tokens(np.concatenate([said, text(20)])).result()
            scores(fork)
            assert is_there("Zanzibar")
            if way == "truncate":
                fork.truncate(64)
    root = Root(tmp_path)
    if way == "delete":
        delete_workspace(root, root.find("branch"))
    assert not is_there("Zanzibar")
    assert_sound(tmp_path)
