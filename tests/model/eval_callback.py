"""Q and K right after their ROPE nodes, as an evaluation callback of the library sees them.

Run as a script (on the library LLAMA_CPP_LIB_PATH names): MODEL N_TOKENS OUT.npz
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # not there by itself where the path is kept safe

from plain_loop import Plain, Scenario, prompt


class TensorHead(ctypes.Structure):
    """The first fields of ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
    )


def capture(model: Path, n_tokens: int) -> dict[str, np.ndarray]:
    """{'Q-<layer>' | 'K-<layer>': [n_tokens, heads, d]} of one prefill batch."""
    base = ctypes.CDLL(str(Path(llama_cpp.llama_cpp._lib._name).parent / "libggml-base.so"))
    for name, kind in (
        ("ggml_get_name", ctypes.c_char_p),
        ("ggml_op_name", ctypes.c_char_p),
        ("ggml_get_data", ctypes.c_void_p),
    ):
        getattr(base, name).restype = kind
    base.ggml_get_name.argtypes = base.ggml_get_data.argtypes = [ctypes.c_void_p]
    rows: dict[str, np.ndarray] = {}

    def is_rope(tensor: int) -> bool:
        return base.ggml_op_name(TensorHead.from_address(tensor).op) == b"ROPE"

    @llama_cpp.ggml_backend_sched_eval_callback
    def watch(tensor, ask, _data):
        if ask:
            return is_rope(tensor)
        if is_rope(tensor):
            head = TensorHead.from_address(tensor)
            assert head.type == 0  # F32
            label, layer = base.ggml_get_name(tensor).decode().split("-")
            d, heads, n, _ = head.ne
            data = (ctypes.c_float * (d * heads * n)).from_address(base.ggml_get_data(tensor))
            rows[f"{label[0]}-{layer}"] = np.array(data, np.float32).reshape(n, heads, d)
        return True

    plain = Plain(Scenario(model=str(model), n_ctx=256), cb_eval=watch)
    ids = prompt(n_tokens, 11, n_vocab=min(40000, plain.n_vocab))
    assert plain.decode(ids, range(n_tokens), [0] * n_tokens, {n_tokens - 1}) == 0
    plain.close()
    return rows


if __name__ == "__main__":
    np.savez(sys.argv[3], **capture(Path(sys.argv[1]), int(sys.argv[2])))
