"""A workspace as one file, and back: all of it, or nothing."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from durable_run import BLOCK, Memory, make_binding, make_memory, make_root, open_records, reopened
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvmem_llama.errors import (
    ExportDamaged,
    FormatTooNew,
    StoreError,
    StoreFailed,
    StoreFull,
    WorkspaceExists,
    WorkspaceMismatch,
)
from kvmem_llama.store.export import Exported, export_workspace
from kvmem_llama.store.files import Files
from kvmem_llama.store.holding import Holding
from kvmem_llama.store.importing import import_workspace
from kvmem_llama.store.names import Place
from kvmem_llama.store.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return make_root(tmp_path)


def filled(root: Root) -> Memory:
    """A workspace with something of everything, closed."""
    parent = make_memory(root, "parent", 14)
    memory = parent.fork("notes")
    parent.close()
    memory.step([5] * 9, kind="ask", answer="é")
    memory.journal.pin([(0, 4), (0, 4), (8, 9)])
    location = memory.store.locate(memory.blocks[1].ref)
    assert location is not None
    memory.journal.fall([location])
    memory.close()
    return memory


def export(root: Root, place: Place, path: Path, **options: bool) -> Exported:
    with Holding.open(root, place) as holding:
        records = open_records(holding)
        try:
            return export_workspace(holding, records, path, **options)
        finally:
            records.close()


@pytest.fixture
def bundle(root: Root, tmp_path: Path) -> Path:
    path = tmp_path / "notes.kvmem"
    export(root, filled(root).place, path)
    return path


def test_everything_comes_back_in_another_place(root: Root, tmp_path: Path) -> None:
    before = filled(root)
    path = tmp_path / "notes.kvmem"
    done = export(root, before.place, path)
    assert (done.n_tokens, done.n_blocks, done.n_records, done.n_damaged) == (23, 6, 5, 0)
    assert done.nbytes == path.stat().st_size and path.stat().st_mode & 0o777 == 0o600
    elsewhere = make_root(tmp_path / "elsewhere")
    memory = Memory(elsewhere, import_workspace(elsewhere, path, segment_records=2))
    old = Memory(root, before.place)
    assert memory.tokens == old.tokens and memory.restored.pins == old.restored.pins
    strip = lambda step: (step.kind, step.start, step.end, step.answer, step.closed, step.time)  # noqa: E731
    assert [strip(s) for s in memory.restored.steps] == [strip(s) for s in old.restored.steps]
    assert [b.origin for b in memory.blocks] == [b.origin for b in old.blocks]
    for ours, theirs in zip(memory.blocks, old.blocks, strict=True):
        assert memory.store.where(ours.ref) == old.store.where(theirs.ref)
        if ours.number != 1:
            np.testing.assert_array_equal(memory.store.get(ours.ref), old.store.get(theirs.ref))
    memory.check_index()
    memory.step([1] * 6)
    memory = reopened(memory)
    assert memory.tokens == [*old.tokens, *[1] * 6]
    memory.close()
    old.close()


def test_an_imported_workspace_stands_beside_its_original(root: Root, bundle: Path) -> None:
    with pytest.raises(WorkspaceExists):
        import_workspace(root, bundle)
    place = import_workspace(root, bundle, "../copy")
    assert root.find("../copy") == place and place.family != root.find("notes").family
    memory = Memory(root, place)
    memory.truncate(9)
    memory.close()
    old = Memory(root, root.find("notes"))
    assert len(old.tokens) == 23
    old.close()


def test_the_file_is_a_tar_of_plain_members(bundle: Path) -> None:
    with tarfile.open(bundle) as tar:
        names = tar.getnames()
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        facts = json.load(manifest)
    assert names[:3] == ["manifest.json", "tokens.i32", "records/00000000"]
    assert names[-4:] == ["index.f16", "blocks.jsonl", "steps.jsonl", "checksums.json"]
    assert "records/00000001" not in names  # its KV is gone
    assert facts["name"] == "notes" and facts["binding"]["block_size"] == BLOCK


def test_an_empty_workspace_can_be_exported(root: Root, tmp_path: Path) -> None:
    memory = make_memory(root, "empty")
    memory.close()
    path = tmp_path / "empty"
    assert export(root, memory.place, path).n_blocks == 0
    again = Memory(root, import_workspace(root, path, "again"))
    again.check([])
    again.step([1, 2, 3, 4, 5])
    again = reopened(again)
    again.check([1, 2, 3, 4, 5])
    again.close()


def test_a_damaged_record_is_left_out_and_counted(root: Root, tmp_path: Path) -> None:
    memory = make_memory(root, n_tokens=12)
    location = memory.store.locate(memory.blocks[1].ref)
    memory.close()
    assert location is not None
    segment = root.folder / memory.place.family / "segments" / f"{location.segment:06}.gguf"
    data = bytearray(segment.read_bytes())
    data[
        memory.disk.format.data_start(row_of(location.segment))
        + location.slot * memory.disk.format.slot_nbytes
    ] ^= 1
    segment.write_bytes(data)
    done = export(root, memory.place, tmp_path / "x")
    assert (done.n_records, done.n_damaged) == (2, 1)
    again = Memory(root, import_workspace(root, tmp_path / "x", "again"))
    assert [again.store.where(block.ref) for block in again.blocks] == ["disk", "tokens", "disk"]
    again.check_index()
    again.close()


def row_of(number: int):  # type: ignore[no-untyped-def]
    from kvmem_llama.store.segment import SegmentRow

    return SegmentRow(number, 4)


def test_another_model_and_a_newer_format_are_refused(root: Root, bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkspaceMismatch, match="cache type of V"):
        import_workspace(root, bundle, "copy", binding=make_binding(cache_type_v="q4_0"))
    data = bundle.read_bytes().replace(b'{"format": 1', b'{"format": 2', 1)
    (tmp_path / "newer").write_bytes(data)
    with pytest.raises(FormatTooNew, match="format 2"):
        import_workspace(root, tmp_path / "newer", "copy")
    assert visible(root) == {"notes", "parent"}


def visible(root: Root) -> set[str]:
    names = {item.row.name for item in root.list() if item.row is not None}
    assert not [path for path in root.folder.iterdir() if path.name.startswith(".")]
    assert len(root.family_ids()) == len({item.place.family for item in root.list()})
    return names


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Root, bytes]:
    folder = tmp_path_factory.mktemp("shared")
    root = make_root(folder)
    export(root, filled(root).place, folder / "x")
    return root, (folder / "x").read_bytes()


@hypothesis_settings(max_examples=60)
@given(data=st.data())
def test_a_file_with_a_flipped_bit_a_missing_end_or_another_order_is_refused_whole(
    tmp_path_factory: pytest.TempPathFactory, shared: tuple[Root, bytes], data: st.DataObject
) -> None:
    """Or what was changed did not matter: the padding of the tar."""
    root, whole = shared
    broken = bytearray(whole)
    kind = data.draw(st.sampled_from(["flip", "cut", "zero", "swap"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    match kind:
        case "flip":
            broken[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del broken[min(at, len(whole) - 2048) :]
        case "zero":
            start = at // 512 * 512
            broken[start : start + 512] = bytes(512)
        case "swap":
            start = at // 1024 * 1024
            one, two = broken[start : start + 512], broken[start + 512 : start + 1024]
            broken[start : start + 1024] = two + one
    path = tmp_path_factory.mktemp("broken") / "x"
    path.write_bytes(broken)
    try:
        place = import_workspace(root, path, "copy")
    except StoreError as error:
        assert isinstance(error, ExportDamaged), error
        assert visible(root) == {"notes", "parent"}
        return
    copy, original = Memory(root, place), Memory(root, root.find("notes"))
    assert copy.tokens == original.tokens
    for one, two in zip(copy.blocks, original.blocks, strict=True):
        if one.number != 1:
            np.testing.assert_array_equal(copy.store.get(one.ref), original.store.get(two.ref))
    copy.close()
    original.close()
    from kvmem_llama.store.deleting import delete_workspace

    delete_workspace(root, place)


@pytest.mark.parametrize("content", [b"", b"x" * 511, b"\0" * 2048, b"GGUF" + bytes(9000)])
def test_something_else_than_an_export_is_refused(root: Root, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ExportDamaged):
        import_workspace(root, path)
    with pytest.raises(StoreFailed, match="No such file"):
        import_workspace(root, tmp_path / "none")


def test_a_member_that_would_leave_the_folder_is_never_written(
    root: Root, bundle: Path, tmp_path: Path
) -> None:
    data = bundle.read_bytes().replace(b"tokens.i32", b"../../evil", 1)
    path = tmp_path / "evil"
    path.write_bytes(data)
    with pytest.raises(ExportDamaged):
        import_workspace(root, path, "copy")


@pytest.mark.parametrize("point", ["export.before", "export.record", "export.written"])
def test_an_export_that_fails_leaves_no_file(root: Root, tmp_path: Path, point: str) -> None:
    place = filled(root).place
    folder = tmp_path / "out"
    folder.mkdir()

    class Full(Files):
        def at(self, name: str) -> None:
            if name == point:
                raise StoreFull("x", 1)

    with pytest.raises(StoreFull):
        export(Root(root.folder, Full()), place, folder / "x")
    assert list(folder.iterdir()) == []
    (folder / "x").write_text("mine")
    with pytest.raises(StoreFailed, match="there is a file"):
        export(root, place, folder / "x")
    assert (folder / "x").read_text() == "mine"
    export(root, place, folder / "x", replace=True)
    assert [path.name for path in folder.iterdir()] == ["x"]


@pytest.mark.parametrize("point", ["import.record", "import.filled", "import.statements"])
def test_an_import_that_fails_leaves_nothing(root: Root, bundle: Path, point: str) -> None:
    class Full(Files):
        def at(self, name: str) -> None:
            if name == point:
                raise StoreFull("x", 1)

    with pytest.raises(StoreFull):
        import_workspace(Root(root.folder, Full()), bundle, "copy")
    assert visible(root) == {"notes", "parent"}
