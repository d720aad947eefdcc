"""Block scores of 1M tokens' worth of index against BLAS sgemm of the same shape plus exp, and a plain read;
the token index of calibrated heads likewise, at 1M and 10M tokens.

As a program it is one side of the pair: scoring.py kernels|blas|heads|heads_blas N_THREADS N_BLOCKS
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

N_LAYER, N_HEAD, N_HEAD_KV, D = 30, 9, 3, 64  # SmolLM2-135M
N_BLOCKS, BLOCK = 31_250, 32
CHUNK_SHIFT = 10
PIECE = 65_536  # tokens that BLAS multiplies at once: their products stay in memory that is used again
QUERY_TOKENS = (64, 16, 2, 1)
HEADS = ((10, 0, 2), (14, 1, 2), (18, 0, 2), (21, 2, 2))  # of a token index: layer, KV head, query heads
BLAS_VARIABLES = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
)  # either would choose another kernel than this CPU's


class KernelsSide:
    """The scorer over an index of random means."""

    def __init__(self, n_threads: int, n_blocks: int) -> None:
        from kvmem_llama.native.kernels import ScoreLayer, load

        self.kernels, self.n_threads = load(), n_threads
        self.name = f"libkvmem_kernels {self.kernels.isa}"
        rng = np.random.default_rng(0)
        size = N_LAYER * N_HEAD_KV * D << CHUNK_SHIFT
        means = (0.5 * rng.standard_normal(size + 4096, dtype=np.float32)).astype(np.float16)
        n_chunks = -(-n_blocks >> CHUNK_SHIFT)
        self.chunks = [means[i : i + size].copy() for i in range(n_chunks)]
        self.candidates = np.arange(n_blocks, dtype=np.int64)
        self.layers = {
            m: [
                ScoreLayer(
                    rng.standard_normal((m, N_HEAD, D), dtype=np.float32),
                    D**-0.5,
                    il * N_HEAD_KV * D,
                    N_HEAD_KV,
                )
                for il in range(N_LAYER)
            ]
            for m in QUERY_TOKENS
        }

    def round(self, n_query: int) -> float:
        began = time.perf_counter()
        scores = self.kernels.score(
            self.layers[n_query], self.chunks, CHUNK_SHIFT, self.candidates, n_threads=self.n_threads
        )
        seconds = time.perf_counter() - began
        assert abs(scores.sum() / n_query - 1) < 1e-5
        return seconds


class BlasSide:
    """The same products and exponentials without the softmax; for 0 query tokens a read of the index."""

    def __init__(self, n_threads: int, n_blocks: int) -> None:
        self.pool, self.n_threads = ThreadPoolExecutor(n_threads), n_threads
        self.name = f"OpenBLAS {blas_kernel()}"
        rng = np.random.default_rng(0)
        # more than a cache holds, less than all: 8 KV heads in turn
        self.means = [rng.standard_normal((n_blocks, D), dtype=np.float32) for _ in range(8)]
        self.q = {
            m: rng.standard_normal((m * N_HEAD // N_HEAD_KV, D), dtype=np.float32) for m in QUERY_TOKENS
        }
        self.out = np.empty((max(QUERY_TOKENS) * N_HEAD // N_HEAD_KV, n_blocks), np.float32)
        self.index = np.ones(
            N_LAYER * N_HEAD_KV * n_blocks * D // 4, np.uint64
        )  # as many bytes as float16 means

    def round(self, n_query: int) -> float:
        began = time.perf_counter()
        if n_query == 0:
            list(self.pool.map(np.bitwise_xor.reduce, np.array_split(self.index, self.n_threads)))
            return time.perf_counter() - began
        q = self.q[n_query]
        out = self.out[: len(q)]
        parts = np.array_split(out.reshape(-1), self.n_threads)
        for i in range(N_LAYER * N_HEAD_KV):
            np.matmul(q, self.means[i % len(self.means)].T, out=out)
            list(self.pool.map(lambda part: np.exp(part, out=part), parts))
        return time.perf_counter() - began


class HeadsSide:
    """The scorer of calibrated heads over a token index of random keys, q4_0."""

    def __init__(self, n_threads: int, n_blocks: int) -> None:
        from store_bench.synthetic import LAYERS, LAYOUT

        from kvmem_llama.memory.scoring.tokens import HeadRows, TokenScorer
        from kvmem_llama.memory.token_index import TokenIndex
        from kvmem_llama.native.kernels import load

        kernels = load()
        self.name = f"libkvmem_kernels {kernels.isa}, token index q4_0"
        rng = np.random.default_rng(0)
        index = TokenIndex(LAYERS, LAYOUT, [(il, head) for il, head, _ in HEADS], kernels=kernels)
        for _ in range(1 << index.chunk_shift):
            record = np.zeros(LAYOUT.nbytes, np.uint8)
            raw_k = record[: LAYOUT.k_nbytes].view(np.float16)
            raw_k[:] = rng.standard_normal(len(raw_k), dtype=np.float32)
            index.append(record, BLOCK)
        n_chunks = -(-n_blocks >> index.chunk_shift)
        chunks = [index.chunks[0].copy() for _ in range(n_chunks)]  # the same bytes at places of their own
        index.truncate(0)
        index.restore(chunks, np.full(n_blocks, BLOCK, np.int32))
        self.scorer, self.index = TokenScorer(kernels, n_threads=n_threads), index
        self.candidates = np.arange(n_blocks, dtype=np.int64)
        self.rows = {
            m: [HeadRows(rng.standard_normal((m, n, D), dtype=np.float32), D**-0.5) for _, _, n in HEADS]
            for m in QUERY_TOKENS
        }

    def round(self, n_query: int) -> float:
        began = time.perf_counter()
        scores = self.scorer.score(self.rows[n_query], self.index, self.candidates)
        seconds = time.perf_counter() - began
        assert abs(scores.sum() / n_query - 1) < 1e-4
        return seconds


class HeadsBlasSide:
    """For every KV head of the token index the products of its float32 keys and their exponentials: without
    the softmax, and without the work of widening what is stored in 4 bits."""

    def __init__(self, n_threads: int, n_blocks: int) -> None:
        self.pool, self.n_threads = ThreadPoolExecutor(n_threads), n_threads
        self.name = f"OpenBLAS {blas_kernel()}"
        rng = np.random.default_rng(0)
        # All keys of 1M tokens are 1 GiB; one KV head is more than a cache holds, and is read again for each.
        self.n_tokens = n_blocks * BLOCK
        self.keys = rng.standard_normal((min(self.n_tokens, PIECE), D), dtype=np.float32)
        self.q = {m: rng.standard_normal((m * HEADS[0][2], D), dtype=np.float32) for m in QUERY_TOKENS}
        self.out = np.empty((max(QUERY_TOKENS) * HEADS[0][2], len(self.keys)), np.float32)

    def round(self, n_query: int) -> float:
        began = time.perf_counter()
        q = self.q[n_query]
        for _ in HEADS:
            for first in range(0, self.n_tokens, PIECE):
                n = min(PIECE, self.n_tokens - first)
                out = self.out[: len(q), :n]
                np.matmul(q, self.keys[:n].T, out=out)
                parts = np.array_split(out, self.n_threads)
                list(self.pool.map(lambda part: np.exp(part, out=part), parts))
        return time.perf_counter() - began


SIDES = {"kernels": KernelsSide, "blas": BlasSide, "heads": HeadsSide, "heads_blas": HeadsBlasSide}


def blas_kernel() -> str:
    """Name of the kernel that NumPy's own OpenBLAS chose."""
    for path in (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas*"):
        for name in ("scipy_openblas_get_corename64_", "openblas_get_corename64_"):
            function = getattr(ctypes.CDLL(str(path)), name, None)
            if function is not None:
                function.restype = ctypes.c_char_p
                return function().decode("ascii")
    return "of an unknown kernel"


class Side:
    """A process of its own: the threads of one side must not sleep in the other's rounds."""

    def __init__(self, kind: str, n_threads: int, n_blocks: int) -> None:
        env = {name: value for name, value in os.environ.items() if name not in BLAS_VARIABLES}
        env["OPENBLAS_NUM_THREADS"] = str(n_threads)
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, str(n_threads), str(n_blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.name = str(self._read()["name"])

    def round(self, kind: str) -> float:
        """Seconds of a round with `kind` query tokens."""
        assert self._process.stdin is not None
        print(json.dumps({"n_query": int(kind)}), file=self._process.stdin, flush=True)
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, float | str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a benchmark process ended early with status {self._process.wait()}")
        return json.loads(line)


class Reading:
    """The reading side under the name of a query size, so that it pairs with the scorer's rounds."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def round(self, kind: str) -> float:
        return self._side.round("0")


def bench(n_threads: int, n_pairs: int, n_blocks: int = N_BLOCKS) -> list[str]:
    """Lines of the report. A ratio above 1 says that the scorer is the faster one."""
    from .pairs import alternate, paired_ratio

    ours, blas = Side("kernels", n_threads, n_blocks), Side("blas", n_threads, n_blocks)
    lines = [f"{ours.name} against {blas.name}, {n_threads} threads, {n_blocks * BLOCK:,} tokens of index"]
    for m in QUERY_TOKENS:
        theirs = blas if m > 2 else Reading(blas)  # few rows: the time is that of reading the index
        a, b = alternate(theirs, ours, str(m), n_pairs)
        what = "sgemm of the same shape + exp" if m > 2 else "reading the index"
        lines.append(
            f"{m:3} query tokens: {1e3 * np.median(b):6.1f} ms, speed / {what} "
            f"({1e3 * np.median(a):.1f} ms): {paired_ratio(a, b)}"
        )
    ours.close()
    blas.close()
    return lines


def bench_heads(n_threads: int, n_pairs: int, sizes: Sequence[int] = (N_BLOCKS, 10 * N_BLOCKS)) -> list[str]:
    """As `bench`, for the token index; of more than 1M tokens only a few rounds."""
    from .pairs import alternate, paired_ratio

    lines = []
    for n_blocks in sizes:
        ours, blas = Side("heads", n_threads, n_blocks), Side("heads_blas", n_threads, n_blocks)
        lines.append(f"{ours.name} against {blas.name}, {n_threads} threads, {n_blocks * BLOCK:,} tokens")
        a, b = alternate(blas, ours, "64", n_pairs if n_blocks <= N_BLOCKS else min(n_pairs, 5))
        lines.append(
            f" 64 query tokens, {sum(n for _, _, n in HEADS)} query heads of {len(HEADS)} KV heads: "
            f"{1e3 * np.median(b):.0f} ms, speed / sgemm of the same shape + exp "
            f"({1e3 * np.median(a):.0f} ms): {paired_ratio(a, b)}"
        )
        ours.close()
        blas.close()
    return lines


def bench_words(n_rounds: int, n_blocks: int = N_BLOCKS) -> list[str]:
    """The other part of the default score: BM25 of a question of 12 words, over blocks of 24 words each whose
    frequencies are those of a language. In this process, one thread."""
    from kvmem_llama.lexical import WordIndex, terms

    rng = np.random.default_rng(0)
    letters = rng.integers(ord("a"), ord("z") + 1, (20_000, 7), np.uint8)
    names = [bytes(row).decode("ascii") for row in letters]
    vocabulary = np.concatenate([terms(name) for name in names])
    numbers = np.minimum(rng.zipf(1.2, (n_blocks, 24)), len(vocabulary)) - 1
    index = WordIndex()
    index.add(list(vocabulary[numbers]))
    seconds = []
    for i in range(n_rounds + 1):
        question = " ".join(names[j] for j in rng.choice(2000, 12, replace=False))
        began = time.perf_counter()
        found = index.search(question).numbers
        seconds.append(time.perf_counter() - began)
        assert len(found), i
    return [
        f"words of {n_blocks * BLOCK:,} tokens, BM25 of 12: {1e3 * np.median(seconds[1:]):.1f} ms, "
        f"{index.nbytes / n_blocks / BLOCK:.1f} bytes per token"
    ]


def main() -> None:
    kind, n_threads, n_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    side = SIDES[kind](n_threads, n_blocks)
    print(json.dumps({"name": side.name}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": side.round(json.loads(line)["n_query"])}), flush=True)


if __name__ == "__main__":
    main()
