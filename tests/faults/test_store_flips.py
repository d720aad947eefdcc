"""Bits that flip on disk: whatever is opened after that is right, or says that it is not."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durable_run import Memory, index_rows, make_memory, make_root, mean_of, record_of

from kvmem_llama.errors import KvmemError, RecordDamaged, StoreError
from kvmem_llama.store.repair import verify_family
from kvmem_llama.store.root import Root

N_FLIPS = 240

Content = dict[str, Any]


def content(root: Root) -> Content:
    """What all workspaces hold; records that are said to be damaged are left out."""
    found: Content = {}
    for item in root.list():
        if item.row is None:
            assert isinstance(item.error, StoreError)
            continue
        try:
            memory = Memory(root, item.place)
        except KvmemError as error:
            assert isinstance(error, StoreError), repr(error)
            continue
        try:
            for block in memory.blocks:
                expected = record_of(memory.tokens[: block.start + block.count], block.count)
                try:
                    np.testing.assert_array_equal(memory.store.get(block.ref), expected)
                except RecordDamaged:
                    continue
            rows = index_rows(memory.restored)
            for number in set(range(len(rows))) - set(memory.restored.unscored):
                block = memory.blocks[number]
                end = block.start + block.count
                expected = mean_of(record_of(memory.tokens[:end], block.count), block.count)
                np.testing.assert_array_equal(rows[number], expected)
            steps = [(s.start, s.end, s.answer, s.closed) for s in memory.restored.steps]
            found[item.row.name] = (memory.tokens, steps, memory.restored.pins, memory.restored.system)
        finally:
            memory.close()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Content]:
    """A closed store with two workspaces of one family and one of another."""
    folder = tmp_path_factory.mktemp("whole")
    root = make_root(folder)
    memory = make_memory(root, "notes", 30)
    memory.step([1] * 5, kind="ask", answer="an answer")
    memory.journal.pin([(0, 4)])
    fork = memory.fork("fork")
    fork.step([2] * 9, kind="ask", answer="another answer")
    make_memory(root, "other", 11).close()
    memory.close()
    fork.close()
    return folder, content(root)


def test_no_flipped_bit_changes_what_is_served(whole: tuple[Path, Content], folder: Path) -> None:
    source, expected = whole
    rng = random.Random(0)
    outcomes: Counter[str] = Counter()
    for number in range(N_FLIPS):
        shutil.copytree(source, folder)
        files = sorted(
            p for p in folder.rglob("*") if p.is_file() and p.suffix in (".sqlite", ".mk", ".gguf")
        )
        kind = (".sqlite", ".mk", ".gguf")[number % 3]
        path = rng.choice([p for p in files if p.suffix == kind])
        data = bytearray(path.read_bytes())
        bit = 8 * rng.randrange(len(data)) + rng.randrange(8)
        if number % 4:  # most in bytes that hold something
            bit = 8 * int(rng.choice(np.flatnonzero(np.frombuffer(bytes(data), np.uint8)))) + bit % 8
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        root = make_root(folder)
        found = content(root)
        for name, held in found.items():
            assert held == expected[name], (path.name, bit, name)
        outcomes["refused" if len(found) < len(expected) else "served"] += 1
        if kind == ".sqlite" and len(found) == len(expected):
            for family in root.family_ids():
                verify_family(root, family)
        shutil.rmtree(folder)
    assert outcomes["refused"] > 10 and outcomes["served"] > 100


@pytest.mark.parametrize("kind", [".mk", ".gguf"])
def test_verify_finds_a_flip_wherever_something_is_kept(
    whole: tuple[Path, Content], folder: Path, kind: str
) -> None:
    """In all bytes that mean something: headers, rows of the index, slots in use."""
    source, _ = whole
    rng = random.Random(1)
    n_found = n_bits = 0
    for _ in range(40):
        shutil.copytree(source, folder)
        path = rng.choice(sorted(folder.rglob(f"*{kind}")))
        data = bytearray(path.read_bytes())
        used = np.flatnonzero(np.frombuffer(bytes(data), np.uint8))
        at = int(rng.choice(used))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        root = make_root(folder)
        findings = [f for family in root.family_ids() for f in verify_family(root, family).findings]
        n_bits += 1
        n_found += bool(findings)
        shutil.rmtree(folder)
    # What is not found lies in a slot that was used before and is free now.
    assert n_found >= 0.8 * n_bits
