from __future__ import annotations

import random
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from plain_loop import Plain, Scenario
from tiny_models import write_model

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.engine import Engine
from kvmem_llama.engine.model import Model
from kvmem_llama.engine.requests import F32, I32, Decode, Decoded, Phase
from kvmem_llama.engine.resources import open_resources
from kvmem_llama.engine.scheduler import BatchReport
from kvmem_llama.errors import (
    Cancelled,
    DecodeFailed,
    EngineClosed,
    HookFailed,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
)
from kvmem_llama.settings import Settings

N_VIEW = 512
WAIT = 300.0  # seconds; only a test that fails waits as long


def opened(path: Path, settings: Settings) -> Engine:
    return Engine(lambda: open_resources(path, settings))


@dataclass
class Greedy:
    """A task: reads a prompt, then writes `n` tokens, the likeliest each time; frees its cells."""

    prompt: I32
    n: int
    phase: Phase = Phase.READ
    logits: list[F32] = field(default_factory=list)  # after the prompt and after every token
    q_rows: list[int] = field(default_factory=list)  # captured rows of every piece, if asked for
    capture_q: bool = False

    def __call__(self, core: EngineCore) -> Generator[Decode, Decoded, list[int]]:
        cells = core.pool.alloc(len(self.prompt) + self.n)
        seq, answer = core.seq, []
        try:
            done, tokens = 0, self.prompt
            while done < len(self.prompt) + self.n:
                n = len(tokens)
                positions = np.arange(done, done + n, dtype=np.int32)
                phase = self.phase if done < len(self.prompt) else Phase.DECODE
                decoded = yield Decode(
                    seq, tokens, positions, cells[done : done + n], phase, self.capture_q, logits=True
                )
                done += decoded.n
                tokens = tokens[decoded.n :]
                if self.capture_q and core.hooks is not None:
                    self.q_rows.append(len(core.hooks.read_q(decoded.rows)[0]))
                if decoded.logits is not None:
                    self.logits.append(decoded.logits.copy())
                    answer.append(int(decoded.logits.argmax()))
                    tokens = np.array(answer[-1:], dtype=np.int32)
                    assert core.current_task is not None
                    core.emit(core.current_task, answer[-1])
            return answer
        finally:
            core.decoder.remove(seq)
            core.pool.free(cells)


def prompt(n: int, seed: int, low: int = 1000, high: int = 40000) -> I32:
    """Random token ids."""
    return np.random.default_rng(seed).integers(low, high, n).astype(np.int32)


def plain_logits(model: Path, engine: Engine, ids: I32, n: int, n_ubatch: int, *, type_kv: str) -> list[F32]:
    """The same by a plain loop over llama.cpp's own calls, on the same library."""
    scenario = Scenario(str(model), n_ctx=engine.core.pool.n_cells, n_ubatch=n_ubatch, type_kv=type_kv)
    plain = Plain(scenario)
    try:
        out = []
        for i in range(0, len(ids), n_ubatch):
            part = ids[i : i + n_ubatch]
            assert plain.decode(part, range(i, i + len(part)), [0] * len(part), {len(part) - 1}) == 0
        out.append(plain.logits(len(part) - 1))
        for i in range(n):
            assert plain.decode([out[-1].argmax()], [len(ids) + i], [0], {0}) == 0
            out.append(plain.logits(0))
        return out
    finally:
        plain.close()


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
@pytest.mark.parametrize("n_ubatch", [1, 7, 128])
def test_one_task_computes_what_a_plain_loop_computes(smollm2: Path, n_ubatch: int, type_kv: str) -> None:
    ids = prompt(40 if n_ubatch == 1 else 200, seed=3)
    settings = Settings(
        n_ctx=N_VIEW, n_ubatch=n_ubatch, cache_type_k=type_kv, cache_type_v=type_kv, n_threads=2
    )
    with opened(smollm2, settings) as engine:
        assert engine.core.hooks is not None
        task = Greedy(ids, 24)
        answer = engine.submit(task).result(WAIT)
        expected = plain_logits(smollm2, engine, ids, 24, n_ubatch, type_kv=type_kv)
    assert len(task.logits) == 25
    for ours, theirs in zip(task.logits, expected, strict=True):
        assert np.array_equal(ours, theirs)
    assert answer == [int(logits.argmax()) for logits in expected]


def test_a_sliding_window_model_computes_what_a_plain_loop_computes(gemma3: Path) -> None:
    ids = prompt(150, seed=3)
    settings = Settings(n_ctx=N_VIEW, n_ubatch=64, n_threads=2)
    with opened(gemma3, settings) as engine:
        task = Greedy(ids, 6)
        engine.submit(task).result(WAIT)
        expected = plain_logits(gemma3, engine, ids, 6, 64, type_kv="f16")
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(task.logits, expected, strict=True))


def test_a_model_without_hooks_still_decodes_under_full_context(tmp_path: Path) -> None:
    model = write_model(tmp_path / "gpt2.gguf", "gpt2")
    ids = prompt(90, seed=1, low=0, high=250)
    with opened(model, Settings(policy="full_context", n_ubatch=32, n_threads=2)) as engine:
        assert engine.core.hooks is None
        assert engine.core.n_view == 256
        task = Greedy(ids, 8)
        engine.submit(task).result(WAIT)
        expected = plain_logits(model, engine, ids, 8, 32, type_kv="f16")
    assert all(np.array_equal(a, b) for a, b in zip(task.logits, expected, strict=True))


def test_a_failed_decode_ends_its_task_and_the_engine_goes_on(tmp_path: Path) -> None:
    model = write_model(tmp_path / "gpt2.gguf", "gpt2")

    def greedy_for_cells(core: EngineCore) -> Generator[Decode, Decoded, None]:
        n = core.pool.n_cells
        cells = core.pool.alloc(n)
        try:
            done = 0
            while True:  # one round more than there are cells
                tokens = np.full(n - done or 1, 5, dtype=np.int32)
                at = np.arange(done, done + len(tokens), dtype=np.int32)
                done += (yield Decode(core.seq, tokens, at, cells[: len(tokens)], Phase.READ)).n
        finally:
            core.pool.free(cells)

    ids = prompt(20, seed=1, low=0, high=250)
    settings = Settings(policy="full_context", n_ctx=64, n_ubatch=32, n_threads=2)
    with opened(model, settings) as engine:
        assert engine.core.pool.n_cells == 256  # as many as the model has learned positions
        before = engine.submit(Greedy(ids, 4)).result(WAIT)
        reports: list[BatchReport] = []
        engine.observe(reports.append)
        with pytest.raises(DecodeFailed, match="code 1"):
            engine.submit(greedy_for_cells).result(WAIT)
        assert reports[-1].rc == 1
        assert engine.submit(Greedy(ids, 4)).result(WAIT) == before


def test_a_cell_in_use_is_refused_by_name_and_the_engine_goes_on(smollm2: Path) -> None:
    ids = prompt(10, seed=2)

    def twice(core: EngineCore) -> Generator[Decode, Decoded, None]:
        cells = core.pool.alloc(10)
        try:
            for start in (0, 10):
                yield Decode(core.seq, ids, np.arange(start, start + 10, dtype=np.int32), cells, Phase.READ)
        finally:
            core.decoder.remove(core.seq)
            core.pool.free(cells)

    with opened(smollm2, Settings(n_ctx=N_VIEW)) as engine:
        before = engine.submit(Greedy(ids, 4)).result(WAIT)
        with pytest.raises(HookFailed):
            engine.submit(twice).result(WAIT)
        assert engine.submit(Greedy(ids, 4)).result(WAIT) == before


def test_sequences_together_compute_what_each_does_alone_in_exact_mode(smollm2: Path) -> None:
    prompts = [prompt(150, seed=1), prompt(90, seed=2), prompt(33, seed=3)]
    settings = Settings(n_ctx=N_VIEW, n_parallel=3, n_ubatch=64, exact=True)
    with opened(smollm2, settings) as engine:
        alone = [Greedy(ids, 16) for ids in prompts]
        for task in alone:
            engine.submit(task).result(WAIT)
        mixed: list[int] = []
        engine.observe(lambda report: mixed.append(len(report.pieces)))
        together = [Greedy(ids, 16) for ids in prompts]
        handles = [engine.submit(task) for task in together]
        for handle in handles:
            handle.result(WAIT)
    assert max(mixed) > 1
    for a, b in zip(alone, together, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))


def test_raw_q_is_there_for_every_token_that_asked_for_it(smollm2: Path) -> None:
    with opened(smollm2, Settings(n_ctx=N_VIEW, n_parallel=2, n_ubatch=32)) as engine:
        tasks = [Greedy(prompt(50, seed=1), 3, capture_q=True), Greedy(prompt(70, seed=2), 3)]
        for handle in [engine.submit(task) for task in tasks]:
            handle.result(WAIT)
    assert sum(tasks[0].q_rows) == 53


def test_random_cancels_leave_the_engine_usable_and_the_other_sequence_right(smollm2: Path) -> None:
    rng = random.Random(11)
    ids, other_ids = prompt(100, seed=4), prompt(30, seed=5)
    settings = Settings(n_ctx=N_VIEW, n_parallel=2, n_ubatch=32, exact=True)
    with opened(smollm2, settings) as engine:
        expected = engine.submit(Greedy(ids, 6)).result(WAIT)
        other_expected = engine.submit(Greedy(other_ids, 60)).result(WAIT)
        other = engine.submit(Greedy(other_ids, 60))
        n_cancelled = 0
        for _ in range(20):
            left = rng.randrange(12)
            phase = rng.choice([Phase.READ, Phase.QUERY, Phase.REPLAY])
            victim = engine.submit(_cancelled_after(left, Greedy(ids, 9, phase)))
            try:
                victim.result(WAIT)
            except Cancelled:
                n_cancelled += 1
        assert n_cancelled >= 15
        assert other.result(WAIT) == other_expected
        assert engine.submit(Greedy(ids, 6)).result(WAIT) == expected
        positions, _ = engine.call(lambda core: core.hooks.cells() if core.hooks else ([], []))
        assert np.all(np.asarray(positions) == -1)
        assert engine.call(lambda core: core.pool.n_used) == 0


def _cancelled_after(n: int, task: Greedy):  # type: ignore[no-untyped-def]
    """The task, which cancels itself after n batches of its own."""

    def make(core: EngineCore) -> Generator[Decode, Decoded, list[int]]:
        assert core.current_task is not None
        me, left, steps = core.current_task, n, task(core)
        request = next(steps)
        try:
            while True:
                if left == 0:
                    me.cancel()
                left -= 1
                request = steps.send((yield request))
        except StopIteration as stop:
            return list(stop.value)
        finally:
            steps.close()

    return make


def test_tokens_stream_as_events(smollm2: Path) -> None:
    with opened(smollm2, Settings(n_ctx=N_VIEW)) as engine:
        task = engine.submit(Greedy(prompt(20, seed=1), 10))
        assert list(task.events()) == task.result(WAIT)


def test_without_a_view_size_the_trained_window_is_used_and_a_larger_one_is_cut(smollm2: Path) -> None:
    for n_ctx in (0, 100_000):
        with opened(smollm2, Settings(n_ctx=n_ctx)) as engine:
            assert engine.core.n_view == 8192
            assert engine.core.pool.n_cells >= 8192 * 1.12
            assert engine.core.pool.n_cells % 256 == 0


def test_the_least_view_and_batch_work(smollm2: Path) -> None:
    with opened(smollm2, Settings(n_ctx=32, n_ubatch=1, n_parallel=4)) as engine:
        handles = [engine.submit(Greedy(prompt(3, seed=i), 2)) for i in range(6)]
        assert all(len(handle.result(WAIT)) == 3 for handle in handles)


def test_closing_while_a_task_runs_ends_it(smollm2: Path) -> None:
    engine = opened(smollm2, Settings(n_ctx=N_VIEW))
    started = threading.Event()
    task = engine.submit(Greedy(prompt(20, seed=1), 400), on_event=lambda event: started.set())
    started.wait(WAIT)
    engine.close()
    with pytest.raises(EngineClosed):
        task.result(WAIT)
    with pytest.raises(EngineClosed, match="model is closed"):
        engine.core.model.vocab.tokenize("text")
    engine.close()


def test_two_engines_run_side_by_side(smollm2: Path) -> None:
    ids = prompt(30, seed=1)
    with (
        opened(smollm2, Settings(n_ctx=N_VIEW)) as first,
        opened(smollm2, Settings(n_ctx=N_VIEW)) as second,
    ):
        handles = [engine.submit(Greedy(ids, 8)) for engine in (first, second)]
        assert handles[0].result(WAIT) == handles[1].result(WAIT)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda folder: folder / "none.gguf", ModelNotFound, "no such file"),
        (lambda folder: folder, ModelNotFound, "folder"),
        (lambda folder: _bytes(folder / "x.gguf", b"not a model"), ModelCorrupt, "GGUF"),
        (lambda folder: write_model(folder / "x.gguf", "frobnicate"), ModelUnsupported, "frobnicate"),
        (lambda folder: write_model(folder / "x.gguf", "bert"), ModelUnsupported, "encoder"),
        (lambda folder: write_model(folder / "x.gguf", "gpt2"), ModelUnsupported, "learned"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_name(
    tmp_path: Path, make, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        opened(make(tmp_path), Settings(n_ctx=64))
    assert raised.value.hint  # type: ignore[attr-defined]


def _bytes(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_an_architecture_of_the_header_only_is_named_by_llama_cpps_own_message(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="unknown model architecture") as raised:
        Model.load(write_model(tmp_path / "x.gguf", "frobnicate"), Settings())
    assert raised.value.arch == "frobnicate"


def test_cells_that_do_not_fit_into_memory_are_refused_before_they_are_made(smollm2: Path) -> None:
    from kvmem_llama.engine import context as context_module
    from kvmem_llama.engine.model import OutOfMemory

    patch = pytest.MonkeyPatch()
    patch.setattr(context_module, "free_memory", lambda: 50 << 20)
    with patch.context(), pytest.raises(OutOfMemory, match=r"9216 cells .* 50 MiB are free"):
        opened(smollm2, Settings())
    patch.undo()
