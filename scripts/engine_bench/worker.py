"""One side of a paired benchmark: rounds of prefill and decode on the stock library, the hooks or the engine.

Usage: worker.py stock|hooks|engine MODEL N_THREADS TYPE_KV
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

if TYPE_CHECKING:
    from kvmem_llama.workspace import Workspace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "model"))

from plain_loop import Plain, Scenario, prompt

N_PREFILL, N_DECODE, N_QUERY, N_CTX, N_UBATCH = 512, 16, 16, 2048, 128


class StockSide:
    """Plain llama.cpp calls."""

    def __init__(self, sc: Scenario) -> None:
        self.plain = Plain(sc)
        self.sampler = llama_cpp.llama_sampler_init_greedy()
        self.filled = False

    def call(self, tokens, start: int, last: bool) -> None:
        n = len(tokens)
        assert self.plain.decode(tokens, range(start, start + n), [0] * n, {n - 1} if last else ()) == 0

    def prefill(self) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.plain.ctx), False)
        ids = prompt(N_PREFILL, 3)
        began = time.perf_counter()
        for i in range(0, N_PREFILL, N_UBATCH):
            self.call(ids[i : i + N_UBATCH], i, i + N_UBATCH >= N_PREFILL)
        llama_cpp.llama_synchronize(self.plain.ctx)
        self.filled = True
        return time.perf_counter() - began

    def decode(self) -> float:
        """Tokens after the same prompt, which is evaluated once only: rounds are short, so that what the
        machine does beside them meets both sides alike."""
        if not self.filled:
            self.prefill()
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.plain.ctx), 0, N_PREFILL, -1)
        began = time.perf_counter()
        for i in range(N_DECODE):
            token = llama_cpp.llama_sampler_sample(self.sampler, self.plain.ctx, -1)
            self.call([token], N_PREFILL + i, True)
        llama_cpp.llama_synchronize(self.plain.ctx)
        return time.perf_counter() - began


class HooksSide(StockSide):
    """The same loop with placement, capture of raw K and, per token, the copy into records."""

    def __init__(self, sc: Scenario) -> None:
        from kvmem_llama.native.hooks import Hooks
        from kvmem_llama.native.library import load

        super().__init__(sc)
        self.hooks = Hooks(load(), self.plain.ctx_address, n_rows=N_UBATCH)
        self.records = np.zeros((N_CTX // 32, self.hooks.layout.nbytes), np.uint8)

    def call(self, tokens, start: int, last: bool) -> None:
        n = len(tokens)
        cells = np.arange(start, start + n, dtype=np.int32)
        self.hooks.capture(k=True, q=n == 1)
        self.hooks.place(cells)
        super().call(tokens, start, last)
        self.hooks.captured()
        done = 0
        while done < n:
            slot = (start + done) % 32
            m = min(32 - slot, n - done)
            rows = np.arange(done, done + m, dtype=np.int32)
            self.hooks.stage_out(self.records[(start + done) // 32], slot, rows, cells[done : done + m])
            done += m


class EngineSide:
    """The product: a workspace whose view holds everything."""

    def __init__(self, sc: Scenario) -> None:
        from kvmem_llama.settings import Settings
        from kvmem_llama.workspace import open_engine

        settings = Settings(
            n_ctx=N_CTX,
            n_ubatch=N_UBATCH,
            n_threads=sc.n_threads,
            cache_type_k=sc.type_kv,
            cache_type_v=sc.type_kv,
        )
        self.engine = open_engine(Path(sc.model), settings)
        self.base: Workspace | None = None

    def prefill(self) -> float:
        with self.engine.workspace() as ws:
            began = time.perf_counter()
            ws.read_tokens(prompt(N_PREFILL, 3)).result()
            return time.perf_counter() - began

    def decode(self) -> float:
        from kvmem_llama.engine.sampler import SamplingParams

        ids, n_read = prompt(N_PREFILL, 3), N_PREFILL - N_QUERY
        if self.base is None:
            self.base = self.engine.workspace()
            self.base.read_tokens(ids[:n_read]).result()
        with self.base.fork() as ws:
            greedy = SamplingParams(temp=0)
            result = ws.step(ids[n_read:], 0, sampling=greedy, max_tokens=N_DECODE).result()
            return result.timings["decode_s"] * N_DECODE / max(result.n_generated, 1)


def main() -> None:
    side, model, n_threads, type_kv = sys.argv[1:5]
    sc = Scenario(model=model, n_ctx=N_CTX, n_ubatch=N_UBATCH, n_threads=int(n_threads), type_kv=type_kv)
    worker = {"stock": StockSide, "hooks": HooksSide, "engine": EngineSide}[side](sc)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        seconds = getattr(worker, json.loads(line)["round"])()
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
