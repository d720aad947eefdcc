"""A plain llama.cpp loop over the low-level bindings: the same calls on the stock and on the patched library.

Run as a script it decodes a scenario on the library that LLAMA_CPP_LIB_PATH names and saves the logits.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import llama_cpp
import numpy as np

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)


@dataclass
class Scenario:
    model: str
    n_ctx: int = 1024
    n_ubatch: int = 128
    n_threads: int = 2
    type_kv: str = "f16"
    n_seq: int = 1
    exact: bool = False
    n_prompt: int = 300
    n_greedy: int = 64
    interleave: bool = False


class Plain:
    """One model and one context, and a batch to decode with."""

    def __init__(self, sc: Scenario, cb_eval=None) -> None:
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        mp = llama_cpp.llama_model_default_params()
        mp.n_gpu_layers = 0
        if sc.exact:
            mp.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(sc.model.encode(), mp)
        assert self.model, sc.model
        cp = llama_cpp.llama_context_default_params()
        cp.n_ctx = sc.n_ctx
        cp.n_ubatch = sc.n_ubatch
        cp.n_batch = max(sc.n_ubatch, sc.n_seq)  # the library asserts room for one output per sequence
        cp.n_threads = cp.n_threads_batch = sc.n_threads
        cp.n_seq_max = sc.n_seq
        cp.kv_unified = True
        cp.swa_full = True
        cp.flash_attn_type = 1
        cp.type_k = cp.type_v = GGML_TYPES[sc.type_kv]
        if cb_eval is not None:
            cp.cb_eval = cb_eval
        self.ctx = llama_cpp.llama_init_from_model(self.model, cp)
        assert self.ctx
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.batch = llama_cpp.llama_batch_init(max(sc.n_ubatch, 1), 0, 1)

    @property
    def ctx_address(self) -> int:
        return ctypes.cast(self.ctx, ctypes.c_void_p).value or 0

    def decode(self, tokens, positions, seqs, logits_at=()) -> int:
        b = self.batch
        b.n_tokens = len(tokens)
        for i, (t, p, s) in enumerate(zip(tokens, positions, seqs, strict=True)):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = int(t), int(p), 1, i in logits_at
            b.seq_id[i][0] = int(s)
        return llama_cpp.llama_decode(self.ctx, b)

    def logits(self, i: int) -> np.ndarray:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)).copy()

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.ctx)
        llama_cpp.llama_model_free(self.model)


def prompt(n: int, seed: int, n_vocab: int = 40000) -> np.ndarray:
    return np.random.default_rng(seed).integers(min(1000, n_vocab // 4), n_vocab, n).astype(np.int32)


def run(plain: Plain, sc: Scenario, before=lambda seqs, positions: None, after=lambda: None) -> np.ndarray:
    """Logits after the prompt and after every greedy token; `before` and `after` bracket each decode call."""
    out = []

    def call(tokens, positions, seqs, logits_at):
        before(seqs, positions)
        assert plain.decode(tokens, positions, seqs, logits_at) == 0
        after()

    def prefill(seq: int, ids: np.ndarray) -> np.ndarray:
        for i in range(0, len(ids), sc.n_ubatch):
            part = ids[i : i + sc.n_ubatch]
            call(part, range(i, i + len(part)), [seq] * len(part), {len(part) - 1})
        return plain.logits(len(part) - 1)

    n_seq = 2 if sc.interleave else 1
    last = [
        prefill(s, prompt(sc.n_prompt - 37 * s, seed=7 + s, n_vocab=min(40000, plain.n_vocab)))
        for s in range(n_seq)
    ]
    pos = [sc.n_prompt - 37 * s for s in range(n_seq)]
    out += last
    for _ in range(sc.n_greedy):
        ids = [int(x.argmax()) for x in last]
        if n_seq == 1 or sc.n_ubatch == 1:
            for s in range(n_seq):
                call([ids[s]], [pos[s]], [s], {0})
                last[s] = plain.logits(0)
        else:
            call(ids, pos, range(n_seq), set(range(n_seq)))
            last = [plain.logits(s) for s in range(n_seq)]
        pos = [p + 1 for p in pos]
        out += last
    return np.stack(out)


def run_stock(sc: Scenario, stock_lib: Path, save_to: Path) -> np.ndarray:
    """The same scenario in a process of its own on the unpatched library."""
    env = dict(os.environ, LLAMA_CPP_LIB_PATH=str(stock_lib))
    subprocess.run([sys.executable, __file__, json.dumps(asdict(sc)), str(save_to)], check=True, env=env)
    return np.load(save_to)


if __name__ == "__main__":
    scenario = Scenario(**json.loads(sys.argv[1]))
    p = Plain(scenario)
    np.save(sys.argv[2], run(p, scenario))
