"""Long durable histories over the fake model, made through the journal without evaluating a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import fake_model
import numpy as np
from fake_durable import Engine, engine_on
from fake_model import FakeModel
from fake_run import text

from kvmem_llama.durable import Opened
from kvmem_llama.memory.index import mean_of
from kvmem_llama.store.files import Buffer, Files
from kvmem_llama.store.steps import NewBlock, StepFacts

BLOCK = 32


class CountingFiles(Files):
    """Counts bytes by the suffix of the file they are read from or written to."""

    def __init__(self) -> None:
        super().__init__()
        self.n_read: Counter[str] = Counter()
        self.n_written: Counter[str] = Counter()

    def read_into(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        n = super().read_into(fd, buffers, offset)
        self.n_read[self.path_of(fd).suffix] += n
        return n

    def write_from(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        super().write_from(fd, buffers, offset)
        self.n_written[self.path_of(fd).suffix] += sum(buffer.nbytes for buffer in buffers)


def fake_engine(folder: Path) -> AbstractContextManager[Engine]:
    """An engine with a view of 16 blocks, whose workspaces lie in `folder`."""
    return engine_on(
        folder, n_ctx=16 * BLOCK, block_size=BLOCK, scorer="cpu", segment_records=64, commit_blocks=128,
        durability="relaxed",
    )  # fmt: skip


def write_history(folder: Path, name: str, n_tokens: int) -> None:
    """A workspace of `n_tokens` tokens that was read in one step, as far as its files say."""
    with fake_engine(folder) as engine:
        opened = engine.shelf.open(name, create=True, policy="kvmem", system=None)
        _commit(opened, engine.model, text(n_tokens))
        engine.shelf.close_one(opened)


def _commit(opened: Opened, model: FakeModel, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    mean = mean_of(model.layers, model.layout)
    blocks, means = [], []
    for start in range(0, len(tokens), BLOCK):
        ids = tokens[start : start + BLOCK]
        record = _record(model, ids, start)
        means.append(mean(record, len(ids)))
        text_of = "word" if len(ids) == BLOCK else None
        ref = opened.store.put(record)
        blocks.append(NewBlock(start // BLOCK, start, len(ids), ref, text=text_of))
    assert opened.journal is not None
    opened.journal.commit(tokens, blocks, np.stack(means), StepFacts("read", len(tokens)))


def _record(
    model: FakeModel, ids: np.ndarray[Any, np.dtype[np.int32]], seed: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows of these tokens; what they would have attended to is made up."""
    record = np.zeros(model.layout.nbytes, np.uint8)
    fingerprints = (np.arange(len(ids)) * 7 + seed) % 2039
    for i in range(len(model.layers)):
        k, v = model._record_k(record, i), model._record_v(record, i)
        k[: len(ids), :6] = fake_model._MEANING[ids] + i
        k[: len(ids), 6] = v[: len(ids), 0] = ids
        k[: len(ids), 7] = v[: len(ids), 1] = fingerprints
    return record


def bytes_of_process(direction: str) -> int:
    """Bytes that the process has read ("rchar") or written ("wchar") by system calls, SQLite's included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(direction)))
