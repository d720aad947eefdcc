"""Durable workspaces on the real library: closed, opened in a new engine, and asked again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, WorkspaceEngine, open_engine

pytestmark = pytest.mark.usefixtures("checked")
GREEDY = SamplingParams(temp=0)


def ids(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 250, n).astype(np.int32)


def exact(folder: Path, **options: Any) -> Settings:
    given = {"n_ctx": 512, "n_threads": 1, "exact": True, "raw_k_type": "f32", "data_dir": str(folder)}
    return Settings(**(given | options))


class Logits:
    """Keeps the logits that answers are sampled from, and counts evaluated tokens."""

    def __init__(self, engine: WorkspaceEngine) -> None:
        self.seen: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        self.n_tokens = 0
        decoder = engine.core.decoder
        logits, decode = decoder.logits, decoder.decode

        def keep(index: int) -> Any:
            found = logits(index)
            self.seen.append(found.copy())
            return found

        def count(batch: Any) -> int:
            self.n_tokens += batch.n
            return decode(batch)

        decoder.logits, decoder.decode = keep, count  # type: ignore[method-assign]


def ask(ws: Workspace, seed: int) -> tuple[Any, ...]:
    result = ws.step(ids(20, 10_000 + seed), sampling=GREEDY, max_tokens=6).result()
    recalls = [[(b.start, b.rank, b.score, b.why, b.position) for b in r.blocks] for r in result.recalls]
    return result.tokens, recalls, result.n_read


@contextmanager
def opened(model: Path, settings: Settings, name: str | None) -> Iterator[tuple[Workspace, Logits]]:
    with open_engine(model, settings) as engine:
        logits = Logits(engine)
        with engine.workspace(name) as ws:
            yield ws, logits


# Which blocks are in the host pool when a step begins; the others are on disk only.
PLACEMENTS = {"disk only": 0, "mixed": 2, "host only": 1}
N_TINY_RECORD = 2 * 32 * 2 * 64 * (4 + 2)  # bytes: layers, tokens, KV heads, d, raw K in f32 and V in f16


def place(ws: Workspace, placement: str) -> None:
    """Reads every block, every second one or none into the host pool."""
    assert ws._opened is not None
    every, store = PLACEMENTS[placement], ws._opened.store
    refs = [block.ref for block in ws._policy._session.history.table]  # type: ignore[attr-defined]
    if every:
        store.get_many(refs[::every])
    found = [store.where(ref) for ref in refs]
    assert found == ["host" if every and i % every == 0 else "disk" for i in range(len(refs))]


def host_budget(placement: str) -> int:
    """For disk only the smallest that there can be: two records."""
    return 2 * N_TINY_RECORD if placement == "disk only" else 64 * 2**20


STEPS: list[Callable[[Workspace, int], Any]] = [
    lambda ws, n: ws.read_tokens(ids(n, 1)).result().n_read,
    lambda ws, n: ask(ws, 1),
    lambda ws, n: ask(ws, 2),
]


@pytest.fixture(scope="module")
def never_stopped(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """n -> what the steps told, and the logits they sampled from, in a workspace that stayed open."""

    @cache
    def run(n: int) -> Any:
        with opened(tiny, exact(tmp_path_factory.mktemp("none")), None) as (ws, logits):
            return [step(ws, n) for step in STEPS], logits.seen

    return run


@pytest.mark.parametrize("n", [100, 700, 1504, 2001, 3000])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_restored_after_restart_equals_never_stopped(
    tiny: Path, tmp_path: Path, never_stopped: Callable[[int], Any], n: int, placement: str
) -> None:
    """In exact mode: the same tokens, blocks, scores, ranks and positions, and the same logits to the bit."""
    settings = exact(tmp_path, host_budget=host_budget(placement))
    told, expected = never_stopped(n)
    seen: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for step, wanted in zip(STEPS, told, strict=True):
        with opened(tiny, settings, "notes") as (ws, logits):
            assert logits.n_tokens == 0
            place(ws, placement)
            assert step(ws, n) == wanted
        seen += logits.seen
    assert len(seen) == len(expected)
    for one, other in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def kl(logits: Any, other: Any) -> float:
    """KL divergence of two distributions over the vocabulary, from their logits, in nats."""
    p, q = (
        x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (logits.astype("f8"), other.astype("f8"))
    )
    return float(np.sum(np.exp(p) * (p - q)))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_restored_with_f16_keys_differs_no_more_than_with_permuted_cells(
    tiny: Path, tmp_path: Path, placement: str
) -> None:
    """Normal mode, raw K in f16: the same tokens, blocks and positions; the logits differ as those of a
    workspace that was never stopped do when its tokens lie in other cells.

    Prompts whose selection depends on the cells alone (a tie at the cut) say nothing about blocks.
    """
    n, prompts = 1504, range(24)
    settings = exact(tmp_path, exact=False, raw_k_type="f16", host_budget=host_budget(placement))

    def answer(ws: Workspace, logits: Logits, prompt: int) -> tuple[Any, Any]:
        result = ws.step(ids(20, 10_000 + prompt), sampling=GREEDY, max_tokens=1).result()
        blocks = [[(b.start, b.count, b.why, b.position) for b in r.blocks] for r in result.recalls]
        assert ws.history()[: n + 20].tolist() == [*ids(n, 1).tolist(), *ids(20, 10_000 + prompt).tolist()]
        ws.truncate(n)
        return blocks, logits.seen[-1]

    def never(permute: bool) -> list[tuple[Any, Any]]:
        with open_engine(tiny, settings) as engine, engine.workspace() as ws:
            logits, pool = Logits(engine), engine.core.pool
            if permute:
                rng, alloc = np.random.default_rng(1), pool.alloc_above
                pool.alloc_above = lambda n, cell: rng.permutation(alloc(n, cell))  # type: ignore[method-assign]
            ws.read_tokens(ids(n, 1)).result()
            return [answer(ws, logits, prompt) for prompt in prompts]

    plain, permuted = never(permute=False), never(permute=True)
    with opened(tiny, settings, "notes") as (ws, _):
        ws.read_tokens(ids(n, 1)).result()
    restored = []
    for prompt in prompts:
        with opened(tiny, settings, "notes") as (ws, logits):
            place(ws, placement)
            restored.append(answer(ws, logits, prompt))
    clear = [run for run in zip(plain, permuted, restored, strict=True) if run[0][0] == run[1][0]]
    assert len(clear) >= 16
    for (blocks, _), _, (found, _) in clear:
        assert found == blocks
    noise = np.median([kl(a, b) for (_, a), (_, b), _ in clear])
    found_kl = np.median([kl(a, b) for (_, a), _, (_, b) in clear])
    assert 0 < noise < 1e-2 and found_kl <= 4 * noise, (found_kl, noise)


def test_a_block_that_was_read_and_is_computed_again_has_the_same_rows(tiny: Path, tmp_path: Path) -> None:
    settings = exact(tmp_path, disk_budget=0)
    with opened(tiny, settings, "notes") as (ws, _):
        ws.read_tokens(ids(2000, 1)).result()
    with opened(tiny, settings, "notes") as (ws, logits):
        whole = ask(ws, 1)
    answers = logits.seen
    with opened(tiny, settings, "notes") as (ws, _):
        ws.truncate(2000)
    for path in tmp_path.glob("*/segments/*.gguf"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(size // 2)
            file.write(bytes(size - size // 2))
    with opened(tiny, settings, "notes") as (ws, logits):
        again = ask(ws, 1)
        assert ws.stats().n_recomputed > 0
    assert again == whole
    # What a lost block attended to may be lost as well, so its rows may differ where they come from it.
    assert np.max(np.abs(logits.seen[0] - answers[0])) < 1.0


def test_the_command_goes_on_where_another_process_stopped(tiny: Path, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    story.write_text("The key is under the mat. " * 60)

    def kvmem(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvmem_llama.cli.main", *arguments]
        env = os.environ | {"KVMEM_DATA_DIR": str(tmp_path / "data"), "KVMEM_N_THREADS": "1"}
        return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def finished(*arguments: str) -> dict[str, Any]:
        done = kvmem("ask", "-m", str(tiny), "-c", "512", "--temp", "0", "-n", "4", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        return {"recalls": [e for e in events if e["event"] == "recall"], **events[-1]}

    assert kvmem("ask", "--continue", "why?").returncode == 2
    first = finished("-w", "my notes", "-f", str(story), "Where is the key?")
    assert first["n_read"] > 500
    second = finished("--continue", "And the mat?")
    # Only the template's own tokens between the turns are read, nothing of the history.
    assert second["n_read"] < 12 and second["n_reused"] == 0 and second["recalls"]
    third = finished("-w", "my notes", "Why?")
    assert third["n_read"] < 12
    listed = json.loads(kvmem("workspace", "ls", "--json").stdout)["workspaces"]
    assert [w["name"] for w in listed] == ["my notes"]
    shown = json.loads(kvmem("workspace", "show", "my notes", "--json").stdout)
    assert shown["steps"] == {"ask": 3} and shown["tokens"] == listed[0]["tokens"]
