"""Names are data: whatever they hold, they never become a path."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path

import pytest
from durable_run import Memory, make_binding, make_root
from hypothesis import given
from hypothesis import strategies as st

from kvmem_llama.errors import CatalogDamaged, InvalidName, StoreFailed, WorkspaceExists, WorkspaceNotFound
from kvmem_llama.store.deleting import delete_workspace
from kvmem_llama.store.files import Files
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.names import Place, checked_name, is_id, new_id
from kvmem_llama.store.root import Root
from kvmem_llama.store.schema import FORMAT

ODD = [
    "notes", "my notes", " ", "..", ".", "/", "../../etc/passwd", "/tmp/x", "a/b", "C:\\x", "ünïcödé",
    "日本語",
    "👩‍👩‍👧", "-rf", "--help", "con", "x" * 200, "'; DROP TABLE workspaces; --", '"', "%00", "%s",
    "names.json", "last",
    "\u202etxt.exe", "a\u00a0b",
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return make_root(tmp_path)


def test_any_printable_name_works_and_none_leaves_the_folder(root: Root) -> None:
    places = {name: root.create(name, make_binding()) for name in ODD}
    for name, place in places.items():
        assert root.find(name) == place
        Memory(root, place).close()
    assert {item.row.name for item in root.list() if item.row} == set(ODD)
    for path in root.folder.rglob("*"):
        assert path.resolve().is_relative_to(root.folder.resolve())
        assert path.name.isascii()
    for name, place in places.items():
        root.rename(place, name[:190] + " again")
        assert root.find(name[:190] + " again") == place


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("x" * 201, "201 characters"),
        ("é" * 300, "300 characters"),
        ("a\0b", r"U\+0000"),
        ("a\nb", r"U\+000A"),
        ("\x7f", r"U\+007F"),
        ("\x1b[31m", r"U\+001B"),
        ("a\u2028b", r"U\+2028"),
        ("\ud800", r"U\+D800"),
    ],
)
def test_a_name_that_cannot_be_shown_is_refused(root: Root, name: str, why: str) -> None:
    for use in (root.find, lambda n: root.create(n, make_binding())):
        with pytest.raises(InvalidName, match=why):
            use(name)


@given(st.text(max_size=210))
def test_any_text_is_a_name_or_invalid(text: str) -> None:
    try:
        name = checked_name(text)
    except InvalidName:
        return
    assert checked_name(name) == name and 1 <= len(name) <= 200


def test_both_ways_to_write_an_accent_are_one_name(root: Root) -> None:
    place = root.create("caf\u00e9", make_binding())
    assert root.find("cafe\u0301") == place
    with pytest.raises(WorkspaceExists):
        root.create("cafe\u0301", make_binding())


def test_ids_sort_by_time_and_do_not_repeat() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000 and all(is_id(id) for id in ids)
    assert [id[:9] for id in ids] == sorted(id[:9] for id in ids)
    assert not is_id("../x") and not is_id("x" * 26)


def test_a_name_is_taken_until_it_is_given_up(root: Root) -> None:
    one = root.create("one", make_binding())
    two = root.create("two", make_binding())
    with pytest.raises(WorkspaceExists):
        root.rename(two, "one")
    root.rename(one, "one")
    root.rename(one, "three")
    root.rename(two, "one")
    assert root.find("one") == two and root.find("three") == one
    with pytest.raises(WorkspaceNotFound):
        root.find("two")
    delete_workspace(root, two)
    with pytest.raises(WorkspaceNotFound):
        root.find("one")
    root.create("one", make_binding())
    with pytest.raises(WorkspaceNotFound):
        root.rename(two, "four")


@pytest.mark.parametrize("spoil", ["nothing", "missing", "garbage", "flipped", "stale"])
def test_the_cache_of_names_is_never_believed_when_it_is_wrong(root: Root, spoil: str) -> None:
    one = root.create("one", make_binding())
    path = root.folder / "names.json"
    old = path.read_bytes()
    two = root.create("two", make_binding())
    match spoil:
        case "missing":
            path.unlink()
        case "garbage":
            path.write_bytes(b"{}\nx")
        case "flipped":
            path.write_bytes(path.read_bytes().replace(b"one", b"two", 1))
        case "stale":
            path.write_bytes(old)
    assert root.find("one") == one and root.find("two") == two
    with pytest.raises(WorkspaceExists):
        root.create("two", make_binding())


def test_a_name_is_found_without_opening_every_catalog(root: Root) -> None:
    for i in range(5):
        root.create(f"name {i}", make_binding())
    opened: list[str] = []
    place = root.find("name 3")
    original = Root.open_family

    def spy(self: Root, id: str, *, read_only: bool = False) -> object:
        opened.append(id)
        return original(self, id, read_only=read_only)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Root, "open_family", spy)
        assert root.find("name 3") == place
    assert opened == [place.family]


def test_a_catalog_that_cannot_be_read_hides_no_other_and_is_listed(root: Root) -> None:
    one = root.create("one", make_binding())
    two = root.create("two", make_binding())
    (root.folder / two.family / "catalog.sqlite").write_bytes(b"rubbish" * 1000)
    (root.folder / "names.json").unlink()
    assert root.find("one") == one
    with pytest.raises(WorkspaceNotFound, match="cannot be read"):
        root.find("two")
    listed = root.list()
    assert [item.row.name if item.row else type(item.error) for item in listed] == ["one", CatalogDamaged]
    root.create("three", make_binding())
    assert root.find("three") and root.find("one") == one


@pytest.mark.parametrize("version", [FORMAT + 1, 1])
def test_a_family_of_another_format_keeps_its_names_and_no_others(root: Root, version: int) -> None:
    old = root.create("old", make_binding())
    path = root.folder / old.family / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"PRAGMA user_version={version}")
    (root.folder / "names.json").unlink()
    with pytest.raises(WorkspaceNotFound) as missing:
        root.find("new")
    assert not missing.value.may_exist
    with pytest.raises(WorkspaceNotFound, match="format") as missing:
        root.find("old")
    assert missing.value.may_exist
    new = root.create("new", make_binding())
    assert root.find("new") == new
    for take in (lambda: root.create("old", make_binding()), lambda: root.rename(new, "old")):
        with pytest.raises(WorkspaceExists):
            take()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE workspaces RENAME TO others")
    with pytest.raises(WorkspaceNotFound) as missing:
        root.find("newer")
    assert missing.value.may_exist  # nobody knows


def test_two_of_one_name_are_told_apart_by_their_ids(root: Root) -> None:
    one = root.create("one", make_binding())
    two = root.create("two", make_binding())
    with root.family(two.family) as family:
        from dataclasses import replace

        from kvmem_llama.store.tables import WORKSPACES

        def clash(db: object) -> None:
            row = WORKSPACES.one(db, "id=?", (two.workspace,))  # type: ignore[arg-type]
            assert row is not None
            WORKSPACES.insert(db, [replace(row, name="one")], replace=True)  # type: ignore[arg-type]

        family.catalog.write(clash)
    (root.folder / "names.json").unlink()
    with pytest.raises(CatalogDamaged, match=two.workspace):
        root.find("one")
    assert root.find_id(two.workspace) == two
    root.rename(two, "two again")
    assert root.find("one") == one
    with pytest.raises(WorkspaceNotFound):
        root.find_id(new_id())


# -- folders


def test_a_root_that_does_not_exist_is_empty_and_made_when_needed(tmp_path: Path) -> None:
    root = Root(tmp_path / "ä ö" / "x" / "workspaces")
    assert root.list() == [] and root.last() is None
    with pytest.raises(WorkspaceNotFound):
        root.find("notes")
    with pytest.raises(WorkspaceNotFound):
        Holding.open(root, Place(new_id(), new_id()))
    assert not root.folder.exists()
    place = root.create("notes", make_binding())
    assert root.folder.stat().st_mode & 0o777 == 0o700
    Memory(root, place).close()


def test_a_root_that_is_no_folder_or_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StoreFailed):
        Root(file / "workspaces").create("notes", make_binding())
    with pytest.raises(StoreFailed):
        Root(file).create("notes", make_binding())

    class ReadOnly(Files):
        def mkdir(self, path: Path) -> None:
            raise StoreFailed(path, "Read-only file system")

    with pytest.raises(StoreFailed, match="Read-only"):
        Root(tmp_path / "new", ReadOnly()).create("notes", make_binding())


def test_what_a_crash_left_behind_is_swept_with_the_next_name(root: Root) -> None:
    place = root.create("notes", make_binding())
    for name in (".new-" + new_id(), ".old-" + new_id(), ".import-" + new_id()):
        (root.folder / name / "segments").mkdir(parents=True)
        (root.folder / name / "locks").mkdir()
        (root.folder / name / "segments" / "000001.gguf").write_bytes(b"x")
    (root.folder / ".last.7.tmp").write_bytes(b"x")
    (root.folder / "my own file").write_bytes(b"x")
    root.create("more", make_binding())
    names = {path.name for path in root.folder.iterdir()}
    assert {name for name in names if name.startswith(".")} == set()
    assert "my own file" in names and place.family in names


def test_the_last_one_opened_is_remembered(root: Root) -> None:
    assert root.last() is None
    one = root.create("one", make_binding())
    two = root.create("two", make_binding())
    Memory(root, two).close()
    Memory(root, one).close()
    assert root.last() == one
    Memory(root, two, read_only=True).close()
    assert root.last() == one
    delete_workspace(root, one)
    assert root.last() == two
    (root.folder / "last").write_bytes(b"\xff\x00../..")
    assert root.last() == two
    delete_workspace(root, two)
    assert root.last() is None


def test_the_names_file_is_plain_json(root: Root) -> None:
    place = root.create("notes", make_binding())
    line = (root.folder / "names.json").read_bytes().split(b"\n")[0]
    assert json.loads(line)["names"] == {"notes": [place.family, place.workspace]}
    assert os.listdir(root.folder / place.family / "segments") == []
