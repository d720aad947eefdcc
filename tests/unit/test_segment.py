"""Segments: GGUF files at every moment, whose damage is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from power_cut import PowerCut
from store_data import BF16, F16, F32, FORMAT, Q8_0, assert_gguf, disk_store, record
from store_faults import FaultySystem, Killed, Stops, flip

from kvmem_llama.errors import RecordDamaged, StoreError, StoreFailed, StoreFull
from kvmem_llama.gguf_header import read_header
from kvmem_llama.store.files import Files
from kvmem_llama.store.segment import (
    SegmentFormat,
    SegmentRow,
    check_segment,
    create_segment,
    repair_segment,
    row_of,
    segment_path,
)
from kvmem_llama.store.system import System


def check(folder: Path, row: SegmentRow, format: SegmentFormat = FORMAT) -> None:
    files = Files()
    fd = files.open(segment_path(folder, row.number), os.O_RDONLY)
    try:
        check_segment(files, fd, row, format)
    finally:
        files.close(fd)


@pytest.mark.parametrize(("k_type", "k_nbytes"), [(F32, 12288), (F16, 6144), (BF16, 6144), (Q8_0, 3264)])
@pytest.mark.parametrize(("v_type", "v_nbytes"), [(F16, 2048), (Q8_0, 1088)])
def test_the_gguf_package_reads_records_of_every_type(
    tmp_path: Path, k_type: int, k_nbytes: int, v_type: int, v_nbytes: int
) -> None:
    format = SegmentFormat("family é", "layout", k_type, k_nbytes, v_type, v_nbytes)
    row = create_segment(Files(), tmp_path, 7, 3, format)
    data = record(1, format.record_nbytes)
    path = tmp_path / "000007.gguf"
    with path.open("r+b") as file:
        file.seek(format.offset(row, 1))
        file.write(data[:k_nbytes].tobytes())
        file.seek(format.offset(row, 1) + format.v_shift)
        file.write(data[k_nbytes:].tobytes())
    reader = assert_gguf(path)
    assert [tensor.name for tensor in reader.tensors] == [
        f"r{i:05}.{kind}" for i in range(3) for kind in "kv"
    ]
    k, v = reader.tensors[2], reader.tensors[3]
    assert np.array_equal(k.data.view(np.uint8), data[:k_nbytes])
    assert np.array_equal(v.data.view(np.uint8), data[k_nbytes:])
    assert (int(k.tensor_type), int(v.tensor_type)) == (k_type, v_type)
    assert all(tensor.data_offset % 4096 == 0 for tensor in reader.tensors)
    values = {name: field.contents() for name, field in reader.fields.items() if name.startswith("kvmem")}
    assert values == {
        "kvmem.format": 1, "kvmem.family": "family é", "kvmem.layout": "layout", "kvmem.segment": 7,
        "kvmem.records": 3,
    }  # fmt: skip


def test_our_own_reader_of_model_headers_agrees(tmp_path: Path) -> None:
    row = create_segment(Files(), tmp_path, 1, 64, FORMAT)
    header = read_header(tmp_path / row.file)
    assert header.data_start == FORMAT.data_start(row)
    assert header.file_size == FORMAT.file_nbytes(row)
    assert [entry.nbytes for entry in header.tensors[:2]] == [FORMAT.k_nbytes, FORMAT.v_nbytes]


def test_an_empty_segment_takes_hardly_any_space(tmp_path: Path) -> None:
    create_segment(Files(), tmp_path, 1, 5000, FORMAT)
    found = (tmp_path / "000001.gguf").stat()
    assert found.st_size > 60_000_000
    assert found.st_blocks * 512 < 1_000_000
    assert found.st_mode & 0o777 == 0o600


class Watching(System):
    """After every call, every segment in the folder is whole."""

    folder: Path
    n_checked = 0

    def _watch(self) -> None:
        for path in self.folder.glob("*.gguf"):
            assert_gguf(path)
            self.n_checked += 1

    def pwritev(self, fd: int, buffers: list[np.ndarray], offset: int) -> int:  # type: ignore[override]
        n = super().pwritev(fd, [buffers[0][: buffers[0].nbytes // 2 + 1]], offset)
        self._watch()
        return n

    def ftruncate(self, fd: int, nbytes: int) -> None:
        super().ftruncate(fd, nbytes)
        self._watch()

    def fsync(self, fd: int) -> None:
        self._watch()
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._watch()


def test_a_segment_is_a_gguf_file_at_every_moment(tmp_path: Path) -> None:
    system = Watching()
    system.folder = tmp_path
    store = disk_store(tmp_path, Files(system))
    written = store.write([record(i) for i in range(6)])
    store.sync()
    for location in written.locations[:3]:
        store.erase(location)
        system._watch()
        store.release(location)
    store.write([record(i) for i in range(3)])
    store.close()
    assert system.n_checked > 50


@pytest.mark.parametrize("point", ["segment.before", "segment.named", "segment.after"])
def test_an_end_while_a_segment_is_made_leaves_nothing_half_made(tmp_path: Path, point: str) -> None:
    files = Stops()

    def kill() -> None:
        raise Killed

    files.on[point] = kill
    with pytest.raises(Killed):
        create_segment(files, tmp_path, 1, 3, FORMAT)
    names = {path.name for path in tmp_path.iterdir()}
    expected = {
        "segment.before": set(),
        "segment.named": {"000001.gguf.tmp"},
        "segment.after": {"000001.gguf"},
    }
    assert names == expected[point]
    if names == {"000001.gguf"}:
        check(tmp_path, SegmentRow(1, 3))
    else:
        check(tmp_path, create_segment(Files(), tmp_path, 1, 3, FORMAT))


@pytest.mark.parametrize("skip_syncs", [False, True])
def test_a_new_segment_survives_a_power_cut(tmp_path: Path, skip_syncs: bool) -> None:
    system = PowerCut()
    system.skip = "all" if skip_syncs else None
    row = create_segment(Files(system), tmp_path, 1, 3, FORMAT)
    system.cut()
    if skip_syncs:
        assert not (tmp_path / row.file).exists()
    else:
        check(tmp_path, row)


@pytest.mark.parametrize(("call", "what"), [("pwritev", "ENOSPC"), ("ftruncate", "EIO"), ("fsync", "EIO")])
def test_a_segment_that_cannot_be_made_leaves_no_file(tmp_path: Path, call: str, what: str) -> None:
    system = FaultySystem()
    system.fail(call, what)
    with pytest.raises(StoreError) as caught:
        create_segment(Files(system), tmp_path, 1, 3, FORMAT)
    assert isinstance(caught.value, StoreFull if what == "ENOSPC" else StoreFailed)
    assert list(tmp_path.iterdir()) == []


def test_a_segment_never_replaces_another(tmp_path: Path) -> None:
    create_segment(Files(), tmp_path, 1, 3, FORMAT)
    with pytest.raises(StoreFailed, match="replace"):
        create_segment(Files(), tmp_path, 1, 3, FORMAT)


def test_every_flipped_bit_of_a_header_is_noticed_and_repaired(tmp_path: Path) -> None:
    row = create_segment(Files(), tmp_path, 1, 2, FORMAT)
    path = tmp_path / row.file
    original = path.read_bytes()
    for byte in range(0, FORMAT.data_start(row), 61):
        flip(path, byte, byte % 8)
        with pytest.raises(RecordDamaged, match=f"byte {byte}"):
            check(tmp_path, row)
        repair_segment(Files(), tmp_path, row, FORMAT)
        check(tmp_path, row)
    assert path.read_bytes() == original


@pytest.mark.parametrize("n_more", [-5000, -1, 1])
def test_a_wrong_length_is_noticed_and_repaired(tmp_path: Path, n_more: int) -> None:
    row = create_segment(Files(), tmp_path, 1, 2, FORMAT)
    os.truncate(tmp_path / row.file, FORMAT.file_nbytes(row) + n_more)
    with pytest.raises(RecordDamaged, match="bytes"):
        check(tmp_path, row)
    repair_segment(Files(), tmp_path, row, FORMAT)
    check(tmp_path, row)


def test_a_segment_of_another_family_or_layout_is_noticed(tmp_path: Path) -> None:
    row = create_segment(Files(), tmp_path, 1, 2, FORMAT)
    for family, layout in (("familz", "layout"), ("family", "layouu")):
        with pytest.raises(RecordDamaged, match="header differs"):
            check(tmp_path, row, SegmentFormat(family, layout, F16, 6144, F16, 1000))
    with pytest.raises(RecordDamaged):
        check(tmp_path, SegmentRow(1, 3))


def test_the_number_of_slots_is_found_in_the_header(tmp_path: Path) -> None:
    files = Files()
    row = create_segment(files, tmp_path, 9, 5, FORMAT)
    fd = files.open(tmp_path / row.file, os.O_RDWR)
    assert row_of(files, fd, 9) == row
    files.pwrite(fd, b"X", 0)
    with pytest.raises(RecordDamaged):
        row_of(files, fd, 9)
    files.close(fd)


@pytest.mark.parametrize(("k_type", "k_nbytes"), [(F16, 3), (F16, 0), (Q8_0, 33), (99, 4)])
def test_sizes_that_no_type_has_are_refused(k_type: int, k_nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"bytes|type"):
        SegmentFormat("f", "l", k_type, k_nbytes, F16, 2)
