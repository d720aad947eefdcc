"""Calls of the operating system that fail under one workspace: the step is refused or the loss made good, the
process goes on, and so does the other workspace."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_run import text
from stack_flips import ask, fakes, opened, told
from store_faults import NOTHING, SHORT, FaultySystem

from kvmem_llama.errors import StoreError, StoreFailed, StoreFull
from kvmem_llama.store.files import Files, install
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root
from kvmem_llama.workspace import Workspace

N_NOTES, N_OTHER = 117, 90


@dataclass
class Two:
    """A workspace whose calls fail, and another one of the same process."""

    notes: Workspace
    other: Workspace
    system: FaultySystem
    family: str  # part of the paths of the first one

    def fail(self, call: str, what: str, folder: str = "") -> None:
        self.system.fail(call, what, only=f"{self.family}/{folder}")


@pytest.fixture(autouse=True)
def faked() -> Iterator[None]:
    with fakes():
        yield


@contextmanager
def two(folder: Path) -> Iterator[Two]:
    system = FaultySystem()
    before = install(Files(system))
    try:
        with (
            opened(folder) as (engine, _),
            engine.workspace("notes") as notes,
            engine.workspace("other") as other,
        ):
            yield Two(notes, other, system, engine.shelf.root.find("notes").family)
    finally:
        install(before)


def read_both(both: Two) -> None:
    both.notes.read_tokens(text(N_NOTES, 1)).result()
    both.other.read_tokens(text(N_OTHER, 2)).result()


@pytest.fixture
def expected(tmp_path: Path) -> tuple[object, object]:
    """What the two answer where nothing fails."""
    with two(tmp_path / "sound") as both:
        read_both(both)
        return told(ask(both.notes)), told(ask(both.other))


def check_sound(folder: Path) -> None:
    root = Root(folder)
    assert len(root.family_ids()) == 2
    for family in root.family_ids():
        assert not [f for f in verify_family(root, family).findings if f.kind != "file"]


@pytest.mark.parametrize("call, what, folder_of, error", [
    ("pwritev", "ENOSPC", "", StoreFull),
    ("pwritev", "EDQUOT", "", StoreFull),
    ("pwritev", "ENOSPC", "index", StoreFull),
    ("pwritev", "EIO", "", StoreFailed),
    ("pwritev", "EIO", "index", StoreFailed),
    ("pwritev", "EROFS", "", StoreFailed),  # the file system became read-only
    ("open", "EACCES", "index", StoreFailed),  # the folder did
    ("open", "EMFILE", "index", StoreFailed),
    ("fsync", "EIO", "", StoreFailed),
    ("fsync", "EIO", "index", StoreFailed),
    ("pwritev", NOTHING, "", StoreFailed),
    ("pwritev", SHORT, "", None),
])  # fmt: skip
def test_a_step_that_cannot_be_written_is_refused_and_all_goes_on(
    folder: Path,
    expected: tuple[object, object],
    call: str,
    what: str,
    folder_of: str,
    error: type[StoreError] | None,
) -> None:
    with two(folder) as both:
        read_both(both)
        before = both.notes.history().tolist()
        both.fail(call, what, folder_of)
        if error is not None:
            with pytest.raises(error):
                ask(both.notes)
            assert both.notes.history().tolist() == before
        else:
            assert told(ask(both.notes)) == expected[0]
        assert told(ask(both.other)) == expected[1]
        both.system.heal()
        if error is not None:
            assert told(ask(both.notes)) == expected[0]
        n = both.notes.n_tokens
    with two(folder) as both:
        assert both.notes.n_tokens == n and n > N_NOTES
        ask(both.notes)
    check_sound(folder)


@pytest.mark.parametrize("what", ["EIO", NOTHING, "missing", SHORT])
def test_records_that_cannot_be_read_are_computed_again_and_all_goes_on(
    folder: Path, expected: tuple[object, object], what: str
) -> None:
    with two(folder) as both:
        read_both(both)
        family = both.family
    segments = sorted((folder / family / "segments").iterdir())
    if what == "missing":
        for path in segments:
            path.unlink()
    with two(folder) as both:
        if what != "missing":
            for path in segments:
                both.fail("preadv", what, f"segments/{path.name}")
        result = ask(both.notes)
        assert bool(both.notes.stats().n_recomputed) == (what != SHORT)
        assert (told(result) == expected[0]) or what != SHORT
        assert told(ask(both.other)) == expected[1] and not both.other.stats().n_recomputed
        ask(both.notes)
        n = both.notes.n_tokens
    with two(folder) as both:
        assert both.notes.n_tokens == n
        ask(both.notes)


def test_a_folder_that_cannot_be_written_to_refuses_new_workspaces_and_leaves_the_open_ones(
    folder: Path, expected: tuple[object, object]
) -> None:
    with two(folder) as both:
        read_both(both)
        both.system.fail("mkdir", "EROFS")
        with pytest.raises(StoreFailed):
            both.notes._engine.workspace("third")
        assert told(ask(both.notes)) == expected[0] and told(ask(both.other)) == expected[1]
        both.system.heal()
        both.notes._engine.workspace("third").close()


def test_a_clock_that_goes_backwards_is_not_noticed(
    folder: Path, expected: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(2_000_000_000, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    with two(folder) as both:
        read_both(both)
    with two(folder) as both:
        assert told(ask(both.notes)) == expected[0] and told(ask(both.other)) == expected[1]
    check_sound(folder)
