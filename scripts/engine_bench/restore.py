"""Blocks from RAM back into cells: the fused loop and the ggml graph against memcpy of the same bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "model"))

from plain_loop import Plain, Scenario

from kvmem_llama.native.hooks import Hooks
from kvmem_llama.native.layout import BlockWrite
from kvmem_llama.native.library import load

from .pairs import paired_ratio

N_BLOCKS, BLOCK = 256, 32


def bench(model: str, n_threads: int, n_rounds: int) -> list[str]:
    """Lines of the report: 256 blocks of 32 tokens, every layer, f16 cache, f16 raw K."""
    plain = Plain(Scenario(model=model, n_ctx=N_BLOCKS * BLOCK, n_threads=n_threads))
    hooks = Hooks(load(), plain.ctx_address, n_rows=128, n_threads=n_threads)
    rng = np.random.default_rng(0)
    records = rng.integers(0, 0x3C00, (N_BLOCKS, hooks.layout.nbytes // 2), dtype=np.uint16).view(np.uint8)
    copy = np.empty_like(records)
    cells = np.arange(N_BLOCKS * BLOCK, dtype=np.int32)
    order = rng.permutation(N_BLOCKS)  # selected blocks lie anywhere in memory
    writes = [
        BlockWrite(records[b], 0, cells[i * BLOCK : (i + 1) * BLOCK], i * BLOCK, cells[:BLOCK])
        for i, b in enumerate(order)
    ]

    def restore(graph: bool) -> None:
        hooks.write_blocks(0, writes, graph=graph)

    def timed(action: Callable[[], None]) -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    actions: dict[str, Callable[[], None]] = {
        "memcpy": lambda: np.copyto(copy, records),
        f"default path ({hooks.restore_path})": lambda: restore(False),
        "ggml graph": lambda: restore(True),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for i in range(n_rounds + 1):
        for name, action in actions.items():
            hooks.free(cells)
            seconds = timed(action)
            if i:
                times[name].append(seconds)
    hooks.close()
    plain.close()
    lines = []
    for name, seconds in times.items():
        ratio = "" if name == "memcpy" else f"   {paired_ratio(times['memcpy'], seconds)} x memcpy"
        lines.append(f"{name:24} {records.nbytes / np.median(seconds) / 1e9:6.2f} GB/s{ratio}")
    return lines
