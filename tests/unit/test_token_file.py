"""The token index on disk: rows that fit their blocks come back, all others are named."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from power_cut import PowerCut

from kvmem_llama.native.layout import U8
from kvmem_llama.store.content import END, Span
from kvmem_llama.store.files import Files
from kvmem_llama.store.rows import BlockRow, new_block
from kvmem_llama.store.token_file import TokenChunks, TokenFile, TokenFiles, TokenShape

SHAPE = TokenShape(4, "q4_0", ((0, 1, 64), (3, 0, 32)), (4 * 36, 4 * 18))
OTHER = replace(SHAPE, heads=((0, 0, 64), (3, 0, 32)))
N = 12


def make_rows(n: int = N, seed: int = 0) -> U8:
    return np.random.default_rng(seed).integers(0, 256, (n, SHAPE.row_nbytes), np.uint8)


def blocks(n: int = N, lineage: int = 1) -> list[BlockRow]:
    return [new_block(lineage, i, 4 * i, 4, None, bytes([i + 1]) * 16) for i in range(n)]


def facts(of: list[BlockRow]) -> list[tuple[int, bytes]]:
    return [(block.count, block.mean_xxh) for block in of]


def part(lineage: int, first: int, end: int = END) -> Span:
    return Span(lineage, (0, END), (first, end), (0, END))


@pytest.fixture
def files(tmp_path: Path) -> TokenFiles:
    return TokenFiles(tmp_path, "family", "layout", Files())


def loaded(files: TokenFiles, of: list[BlockRow], parts: list[Span] | None = None) -> tuple[U8, list[int]]:
    """-> (rows, numbers of those that are missing)"""
    into = TokenChunks(SHAPE, len(of), 4)
    missing = files.load(SHAPE, parts or [part(1, 0)], of, into)
    rows = np.zeros((len(of), SHAPE.row_nbytes), np.uint8)
    for number in range(len(of)):
        chunk, at = into.chunks[number // 4], number % 4
        first, second = (chunk[: 4 * 144].reshape(4, 144), chunk[4 * 144 :].reshape(4, 72))
        rows[number] = np.concatenate([first[at], second[at]])
    return rows, missing


def test_rows_come_back_as_the_scorer_reads_them_from_all_lineages(files: TokenFiles) -> None:
    rows, of = make_rows(), blocks()
    files.put(SHAPE, 1, 0, 0, rows[:3], facts(of)[:3])
    files.put(SHAPE, 1, 0, 3, rows[3:8], facts(of)[3:8])
    files.put(SHAPE, 2, 6, 6, rows[6:], facts(of)[6:])
    found, missing = loaded(files, of, [part(1, 0, 6), part(2, 6)])
    assert missing == []
    np.testing.assert_array_equal(found, rows)


def test_only_a_row_of_the_same_tokens_and_the_same_mean_fits(files: TokenFiles) -> None:
    rows, of = make_rows(), blocks()
    files.put(SHAPE, 1, 0, 0, rows, facts(of))
    changed = list(of)
    changed[2], changed[5] = replace(of[2], count=3), replace(of[5], mean_xxh=bytes(16))
    changed[7] = replace(of[7], checksum=b"c" * 16, origin=1)  # its record is another one, its keys are not
    assert loaded(files, changed)[1] == [2, 5]


def test_every_flipped_bit_is_noticed_and_told_from_what_was_never_written(files: TokenFiles) -> None:
    rows, of = make_rows(), blocks()
    files.put(SHAPE, 1, 0, 2, rows[2:], facts(of)[2:])
    assert loaded(files, of)[1] == [0, 1] and files.check([part(1, 0)], of) == []
    path = files.path(1)
    whole = path.read_bytes()
    size = SHAPE.row_nbytes + 36
    n_header = len(whole) - N * size
    for bit in np.random.default_rng(1).integers(0, len(whole) * 8, 200).tolist():
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        number = (bit // 8 - n_header) // size
        if bit // 8 < n_header:
            assert loaded(files, of)[1] == list(range(N)) and files.describe([part(1, 0)], of) is None
        else:
            assert loaded(files, of)[1] == sorted({0, 1, number})
            assert files.check([part(1, 0)], of) == ([number] if number > 1 else [])
    path.write_bytes(whole)
    files.erase(1, 0, 4)
    assert loaded(files, of)[1] == [0, 1, 4] and files.check([part(1, 0)], of) == []


def test_rows_that_a_power_cut_left_half_written_are_missing_not_damaged(tmp_path: Path) -> None:
    n_torn = 0
    for seed in range(80):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        system = PowerCut()
        files = TokenFiles(folder, "family", "layout", Files(system))
        n, n_old = rng.randrange(40, 70), rng.randrange(20, 40)
        rows, of = make_rows(n, seed), blocks(n)
        last = rows[n_old - 1].copy()  # when the block was partial
        last[:144].reshape(4, 36)[2:], last[144:].reshape(4, 18)[2:] = 0, 0
        files.put(SHAPE, 1, 0, 0, rows[: n_old - 1], facts(of)[: n_old - 1])
        files.put(SHAPE, 1, 0, n_old - 1, last[np.newaxis], [(2, bytes([255]) * 16)])
        if seed % 4:
            fd = system.open(files.path(1), os.O_RDWR, 0)
            system.fsync(fd)
            os.close(fd)
        files.put(SHAPE, 1, 0, n_old - 1, rows[n_old - 1 :], facts(of)[n_old - 1 :])
        system.cut(rng)
        if not files.path(1).exists():
            continue
        assert files.check([part(1, 0)], of) == []
        found = np.frombuffer(files.path(1).read_bytes()[4096:], np.uint8)
        whole = found[: len(found) // 252 * 252].reshape(-1, 252)
        n_torn += sum(r.any() and xxhash.xxh3_128_digest(r[:-16].data) != r[-16:].tobytes() for r in whole)
        sound = {i for i, row in enumerate(loaded(files, of)[0]) if np.array_equal(row, rows[i])}
        assert sound | set(loaded(files, of)[1]) == set(range(n))
    assert n_torn > 10


def test_the_row_of_a_block_with_another_mean_is_stamped_anew(files: TokenFiles) -> None:
    rows, of = make_rows(), blocks()
    files.put(OTHER, 1, 0, 0, rows, facts(of))
    now = replace(of[3], mean_xxh=b"new" + bytes(13))
    files.restamp(0, of[3], now.mean_xxh)
    files.restamp(0, replace(of[4], count=3), now.mean_xxh)  # it has no such row
    changed = [*of[:3], now, *of[4:]]
    assert files.describe([part(1, 0)], changed) == TokenFile("q4_0", OTHER.heads, N, 0)
    assert files.describe([part(1, 0)], of) == TokenFile("q4_0", OTHER.heads, N - 1, 1)
    files.restamp(0, replace(of[3], lineage=7), bytes(16))  # there is no such file


def test_other_heads_begin_the_file_anew(files: TokenFiles) -> None:
    rows, of = make_rows(), blocks()
    files.put(OTHER, 1, 0, 0, rows, facts(of))
    assert loaded(files, of)[1] == list(range(N))
    assert files.describe([part(1, 0)], of) == TokenFile("q4_0", OTHER.heads, N, 0)
    files.put(SHAPE, 1, 0, 3, rows[3:], facts(of)[3:])
    assert loaded(files, of)[1] == [0, 1, 2]
    assert files.describe([part(1, 0)], of) == TokenFile("q4_0", SHAPE.heads, N - 3, 3)


def test_a_copied_block_has_a_row_in_its_own_lineage(files: TokenFiles) -> None:
    rows, of = make_rows(), blocks()
    files.put(SHAPE, 1, 0, 0, rows, facts(of))
    files.copy(SHAPE, (1, 0), (5, N - 1), N - 1)
    found, missing = loaded(files, of, [part(1, 0, N - 1), part(5, N - 1)])
    assert missing == []
    np.testing.assert_array_equal(found, rows)


def test_cutting_and_dropping_give_the_space_back(files: TokenFiles) -> None:
    files.cut(1, 0, 3)
    files.put(SHAPE, 1, 0, 0, make_rows(), facts(blocks()))
    files.cut(1, 0, 5)
    assert files.path(1).stat().st_size == files.nbytes(SHAPE, 5)
    files.drop(1)
    files.drop(1)
    assert not files.path(1).exists() and files.describe([part(1, 0)], blocks()) is None
