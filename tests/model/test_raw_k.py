"""Types of raw K on disk, on the real library: written, opened in a new engine, put back into cells."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_models import SHAPES, write_model

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InvalidOption, WorkspaceMismatch
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, open_engine

N = 700  # tokens
BOUND = {"f32": 1e-3, "bf16": 4e-3, "q8_0": 1.2e-2}  # relative L2 error against f16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "llama.gguf", "llama")


def ids(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 250, n).astype(np.int32)


def settings(folder: Path, raw_k_type: str, **options: Any) -> Settings:
    return Settings(n_ctx=512, n_threads=1, raw_k_type=raw_k_type, data_dir=str(folder), **options)


def ask(ws: Workspace) -> tuple[Any, ...]:
    result = ws.step(ids(20, 9), sampling=SamplingParams(temp=0), max_tokens=6).result()
    return result.tokens, [[(b.start, b.score, b.why, b.position) for b in r.blocks] for r in result.recalls]


def rows_of(ws: Workspace) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Raw K of the complete blocks."""
    session = ws._policy._session  # type: ignore[attr-defined]
    hooks, store = session.hooks, session.history.store
    blocks = list(session.history.table)[: N // 32]
    return np.array(
        [
            hooks.layout.raw_k(record, i, layer, 32).astype(np.float32)
            for record in store.get_many([block.ref for block in blocks])
            for i, layer in enumerate(hooks.layers)
        ]
    )


def means_of(ws: Workspace) -> np.ndarray[Any, np.dtype[np.float16]]:
    index = ws._policy._session.history.indexes.mean_k  # type: ignore[attr-defined]
    return np.array([index.means(layer) for layer in range(len(index.layers))])


def write(model: Path, given: Settings) -> tuple[Any, ...]:
    """Reads and asks; -> raw K and Mean-K as the process that wrote them has them."""
    with open_engine(model, given) as engine, engine.workspace("notes") as ws:
        ws.read_tokens(ids(N, 1)).result()
        return rows_of(ws), means_of(ws)


@pytest.fixture(scope="module")
def in_f16(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, np.dtype[np.float32]]:
    rows, _ = write(tiny, settings(tmp_path_factory.mktemp("f16"), "f16"))
    return rows  # type: ignore[no-any-return]


@pytest.mark.parametrize("raw_k_type", ["f16", "f32", "bf16", "q8_0"])
def test_what_was_written_is_read_again_within_the_error_of_its_type(
    tiny: Path, tmp_path: Path, in_f16: np.ndarray[Any, np.dtype[np.float32]], raw_k_type: str
) -> None:
    given = settings(tmp_path, raw_k_type)
    rows, means = write(tiny, given)
    with open_engine(tiny, given) as engine, engine.workspace("notes", create=False) as ws:
        again = rows_of(ws)
        np.testing.assert_array_equal(again, rows)  # RAM and disk hold the same
        np.testing.assert_array_equal(means_of(ws), means)
        answer = ask(ws)
        assert [b for b in answer[1][0] if b[2] == "selected"]
    error = np.linalg.norm(again - in_f16) / np.linalg.norm(in_f16)
    assert error == 0 if raw_k_type == "f16" else 0 < error <= BOUND[raw_k_type]

    for path in tmp_path.glob("*/index/*"):
        path.unlink()
    with open_engine(tiny, given) as engine, engine.workspace("notes", create=False) as ws:
        ws.truncate(N)
        np.testing.assert_array_equal(means_of(ws), means)  # made again from what is stored
        assert ask(ws) == answer

    [path, *_] = sorted(tmp_path.glob("*/segments/*.gguf"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert tensors["r00000.k"].tensor_type.name.lower() == raw_k_type
    assert tensors["r00000.v"].tensor_type.name == "F16"
    stored = gguf.quants.dequantize(tensors["r00000.k"].data, tensors["r00000.k"].tensor_type)
    in_ram = stored.astype(np.float32 if raw_k_type == "f32" else np.float16).astype(np.float32)
    np.testing.assert_array_equal(in_ram.reshape(-1), again[: len(again) // (N // 32)].reshape(-1))


def test_a_workspace_belongs_to_its_type_and_a_type_to_its_keys(tiny: Path, tmp_path: Path) -> None:
    write(tiny, settings(tmp_path, "q8_0"))
    with (
        open_engine(tiny, settings(tmp_path, "f16")) as engine,
        pytest.raises(WorkspaceMismatch, match="raw K type is q8_0, given is f16"),
    ):
        engine.workspace("notes")
    odd = write_model(tmp_path / "odd.gguf", dataclasses.replace(SHAPES["llama"], d=48))
    with pytest.raises(InvalidOption, match=r"--raw-k-type.*48"):
        open_engine(odd, settings(tmp_path, "q8_0"))
    with pytest.raises(InvalidOption, match="f16, f32, bf16, q8_0"):
        settings(tmp_path, "q5_1")
