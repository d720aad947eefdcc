"""One flipped bit under everything that stands on the store: the workspace is opened on the fake model and
asked a question that recalls all of it. What the model is served is compared with what was computed first."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import fake_model
import numpy as np
import pytest
from fake_model import fake_resources, make_model
from fake_run import FakeTemplate, text
from numpy.typing import NDArray

from kvmem_llama.engine import core
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import StoreError
from kvmem_llama.memory import answering
from kvmem_llama.memory.invariants import check
from kvmem_llama.memory.session import Session
from kvmem_llama.native.layout import BlockWrite
from kvmem_llama.settings import Settings
from kvmem_llama.store.append import workspace_row
from kvmem_llama.store.content import iter_blocks, lineage_row
from kvmem_llama.store.index_file import IndexFiles
from kvmem_llama.store.location import Origin
from kvmem_llama.store.root import Root
from kvmem_llama.store.segment import SegmentRow
from kvmem_llama.store.tables import SEGMENTS
from kvmem_llama.workspace import Workspace, WorkspaceEngine

N_QUESTION, N_ANSWER = 12, 3
KINDS = ("record", "header", "catalog", "index", "anywhere")

Rows = NDArray[np.float32]
Files = dict[Path, bytes | None]  # path in the folder -> content; None: a folder


@contextmanager
def fakes() -> Iterator[list[int]]:
    """The fake model answers from here on, and index rows that had to be made again are collected."""
    remade: list[int] = []
    load = IndexFiles.load

    def spy(*args: Any) -> list[int]:
        missing = load(*args)
        remade.extend(missing)
        return missing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "ChatTemplate", FakeTemplate)
        patch.setattr(answering, "Sampler", fake_model.FakeSampler)
        patch.setattr(Session, "after_step", staticmethod(check))
        patch.setattr(IndexFiles, "load", spy)
        yield remade


@contextmanager
def opened(folder: Path) -> Iterator[tuple[WorkspaceEngine, fake_model.FakeModel]]:
    settings = Settings(
        n_ctx=256, block_size=8, n_ubatch=16, scorer="reference", n_parallel=2, data_dir=str(folder),
        segment_records=8, host_budget=2**18,
    )  # fmt: skip
    model = make_model(settings)
    with WorkspaceEngine(lambda: fake_resources(model, settings)) as engine:
        yield engine, model


@dataclass
class Served:
    """Rows that the model was given: where they begin in the history, K and V [layers][tokens][..]."""

    history: list[int]
    rows: list[tuple[int, Rows, Rows]] = field(default_factory=list)

    def watch(self, model: fake_model.FakeModel) -> None:
        write = model.write_blocks

        def keep(seq: int, blocks: list[BlockWrite]) -> None:
            write(seq, blocks)
            for block in blocks:
                start = self._find(block.tokens.tolist())
                if start is not None:
                    self.rows.append((start, model.k[:, block.cells].copy(), model.v[:, block.cells].copy()))

        model.write_blocks = keep  # type: ignore[method-assign,assignment]

    def _find(self, tokens: list[int]) -> int | None:
        for start in range(len(self.history) - len(tokens) + 1):
            if self.history[start : start + len(tokens)] == tokens:
                return start
        return None  # of the question itself


@dataclass(frozen=True)
class Whole:
    """A closed store, and what asking it tells while it is whole."""

    name: str
    files: Files
    spans: dict[str, list[tuple[Path, int, int]]]  # kind -> (path, first byte, bytes) that a question needs
    tokens: list[int]
    answer: Any
    k: Rows
    v: Rows

    def restore(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for path, data in self.files.items():
            if data is None:
                (folder / path).mkdir(parents=True)
            else:
                (folder / path).write_bytes(data)

    def needs(self, path: Path, byte: int) -> bool:
        """Whether the question reads this byte, and has to notice if it is another."""
        return any(
            path == p and first <= byte < first + n for found in self.spans.values() for p, first, n in found
        )


def told(result: Any) -> Any:
    recalls = [
        [(b.start, b.count, b.rank, b.score, b.why, b.position) for b in r.blocks] for r in result.recalls
    ]
    return result.tokens, result.text, recalls


def ask(ws: Workspace) -> Any:
    tokens = text(N_QUESTION, 1)
    return ws.step(tokens, sampling=SamplingParams(temp=0), max_tokens=N_ANSWER).result()


def marked_tokens(ws: Workspace) -> set[int]:
    """Those whose rows were lost and have been computed again, as the catalog says."""
    assert ws._opened is not None
    holding = ws._opened.holding
    with holding.family.catalog.snapshot() as db:
        blocks = [b for b in iter_blocks(db, holding.row().lineage) if b.origin == Origin.RECOMPUTED]
    return {at for b in blocks for at in range(b.start, b.start + b.count)}


def make_whole(folder: Path, seed: int, *, forked: bool) -> Whole:
    """A workspace of some 130 tokens, or a fork that shares a part of them. To be called within `fakes`."""
    name = "notes"
    with opened(folder) as (engine, _), engine.workspace(name) as ws:
        ws.read_tokens(text(101 + seed % 3, seed)).result()
        ws.step(text(9, seed + 1), sampling=SamplingParams(temp=0), max_tokens=5).result()
        if forked:
            name = "branch"
            with ws.fork(name) as fork:
                fork.read_tokens(text(17, seed + 2)).result()
            ws.read_tokens(text(10, seed + 3)).result()
    files: Files = {folder.relative_to(folder): None}
    for path in sorted(folder.rglob("*")):
        files[path.relative_to(folder)] = None if path.is_dir() else path.read_bytes()
    spans = needed(folder, name)
    with opened(folder) as (engine, model), engine.workspace(name, create=False) as ws:
        tokens = ws.history().tolist()
        served = Served(tokens)
        served.watch(model)
        result = ask(ws)
    n = len(tokens)
    k, v = (np.full((model.k.shape[0], n, m.shape[2]), np.nan, np.float32) for m in (model.k, model.v))
    for start, k_rows, v_rows in served.rows:
        k[:, start : start + k_rows.shape[1]], v[:, start : start + k_rows.shape[1]] = k_rows, v_rows
    assert not np.isnan(k).any() and not np.isnan(v).any(), "the question does not recall everything"
    return Whole(name, files, spans, tokens, told(result), k, v)


def needed(folder: Path, name: str) -> dict[str, list[tuple[Path, int, int]]]:
    """What a question reads of segments and index, by kind: (path in the folder, first byte, bytes)."""
    root = Root(folder)
    place = root.find(name)
    spans: dict[str, list[tuple[Path, int, int]]] = {"record": [], "header": [], "index": []}
    with root.family(place.family, read_only=True) as family, family.catalog.snapshot() as db:
        format, index = family.segment_format, family.index
        segments = {row.number: SegmentRow(row.number, row.n_slots) for row in SEGMENTS.rows(db)}
        used = set()
        for block in iter_blocks(db, workspace_row(db, place.workspace).lineage):
            assert block.location is not None
            row = segments[block.location.segment]
            path = (family.paths.segments / row.file).relative_to(folder)
            at = format.offset(row, block.location.slot)
            spans["record"].append((path, at, format.k_nbytes))
            spans["record"].append((path, at + format.v_shift, format.v_nbytes))
            used.add((path, 0, format.data_start(row)))
            first = lineage_row(db, block.lineage).parent_blocks
            at = index.nbytes(block.number - first)
            spans["index"].append(
                (index.path(block.lineage).relative_to(folder), at, index.nbytes(1) - index.nbytes(0))
            )
        spans["header"] = sorted(used)
    return spans


class Flipper:
    """Flips bits of whole stores, one at a time, and asks. To be used within `fakes`."""

    def __init__(self, folder: Path, wholes: list[Whole], remade: list[int], seed: int) -> None:
        self._folder: Final = folder
        self._wholes: Final = wholes
        self._remade: Final = remade
        self._rng: Final = random.Random(seed)
        self.outcomes: Final[Counter[tuple[str, str]]] = Counter()

    def flip_one(self, number: int) -> None:
        """Raises AssertionError if a wrong row, token or answer is served, or damage goes unnoticed."""
        whole, kind = self._wholes[number % len(self._wholes)], KINDS[number % len(KINDS)]
        path, byte = self._choose(whole, kind)
        bit = self._rng.randrange(8)
        whole.restore(self._folder)
        data = bytearray(whole.files[path] or b"")
        data[byte] ^= 1 << bit
        (self._folder / path).write_bytes(data)
        outcome = self._asked(whole, f"{path.name}, byte {byte}, bit {bit}")
        assert outcome != "right" or not whole.needs(path, byte), f"{path}, byte {byte}, bit {bit}: unnoticed"
        self.outcomes[kind, outcome] += 1

    # -- private

    def _choose(self, whole: Whole, kind: str) -> tuple[Path, int]:
        if kind in whole.spans:
            path, first, n = self._rng.choice(whole.spans[kind])
            return path, first + self._rng.randrange(n)
        paths = [
            p for p, data in whole.files.items() if data and (kind == "anywhere" or p.suffix == ".sqlite")
        ]
        path = self._rng.choice(paths)
        data = np.frombuffer(whole.files[path] or b"", np.uint8)
        if self._rng.random() < 0.75:  # most in bytes that hold something
            return path, int(self._rng.choice(np.flatnonzero(data)))
        return path, self._rng.randrange(len(data))

    def _asked(self, whole: Whole, where: str) -> str:
        """-> "refused", "recomputed", "index made again" or "right"."""
        self._remade.clear()
        served = Served(whole.tokens)
        try:
            with opened(self._folder) as (engine, model):
                served.watch(model)
                with engine.workspace(whole.name, create=False) as ws:
                    assert ws.history().tolist() == whole.tokens, f"{where}: other tokens"
                    result = ask(ws)
                    stats, marked = ws.stats(), marked_tokens(ws)
        except StoreError:
            self._check_rows(whole, served, set(), where)
            return "refused"
        self._check_rows(whole, served, marked, where)
        assert stats.tiers is not None
        if stats.n_recomputed or stats.tiers.n_damaged:
            assert marked, f"{where}: what was computed again is not marked"
            return "recomputed"
        assert told(result) == whole.answer, f"{where}: another answer"
        return "index made again" if self._remade else "right"

    def _check_rows(self, whole: Whole, served: Served, marked: set[int], where: str) -> None:
        for start, k, v in served.rows:
            for i in range(k.shape[1]):
                is_same = np.array_equal(k[:, i], whole.k[:, start + i]) and np.array_equal(
                    v[:, i], whole.v[:, start + i]
                )
                assert is_same or start + i in marked, f"{where}: a wrong row of token {start + i} is served"
