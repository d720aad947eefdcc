"""A model with SmolLM2's vocabulary and template and tiny random weights: fast where words do not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

_N_EMBD: Final = 128
_N_HEAD: Final = 2
_N_FF: Final = 256
_N_LAYER: Final = 2
_SPARE: Final = ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id")
_FIRST_SPARE: Final = 8  # tokens of SmolLM2 for files of code; here they stand around what is to be filled in


def write_tiny_smol(smollm2: Path, path: Path) -> Path:
    """Writes the model to `path` -> path. Unlike SmolLM2 it adds a first token, 1, and can fill in.

    The first two tokens have changed places: no text of the template begins with the one that is added.
    """
    source = gguf.GGUFReader(smollm2)
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in source.fields.items():
        if key.startswith("tokenizer.") and key.rpartition(".")[2] not in ("add_bos_token", *_SPARE):
            _copy(writer, key, field)
    writer.add_add_bos_token(True)
    for i, name in enumerate(_SPARE):
        writer.add_uint32(f"tokenizer.ggml.{name}", _FIRST_SPARE + i)
    writer.add_name("tiny smol")
    writer.add_context_length(8192)
    writer.add_embedding_length(_N_EMBD)
    writer.add_block_count(_N_LAYER)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_N_EMBD // _N_HEAD)
    writer.add_rope_freq_base(10000.0)
    rng = np.random.default_rng(0)
    for name, dims in _tensors(len(source.fields["tokenizer.ggml.tokens"].data)).items():
        if len(dims) == 1:
            writer.add_tensor(name, np.ones(dims, np.float32))
            continue
        scale = 1.0 if name.startswith("token_embd") else dims[-1] ** -0.5
        data = (scale * rng.standard_normal(dims)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1  # products do not depend on the shape of a batch
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy(writer: Any, key: str, field: Any) -> None:
    kind = field.types[0]
    value = field.contents()
    if key == "tokenizer.ggml.tokens":
        value[:2] = value[1::-1]
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_key_value(key, value, kind, sub_type=field.types[-1])
    else:
        writer.add_key_value(key, value, kind)


def _tensors(n_vocab: int) -> dict[str, tuple[int, ...]]:
    n_kv = _N_EMBD // _N_HEAD
    out: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_vocab, _N_EMBD),
        "output_norm.weight": (_N_EMBD,),
        "output.weight": (n_vocab, _N_EMBD),
    }
    for i in range(_N_LAYER):
        out |= {
            f"blk.{i}.attn_norm.weight": (_N_EMBD,),
            f"blk.{i}.attn_q.weight": (_N_EMBD, _N_EMBD),
            f"blk.{i}.attn_k.weight": (n_kv, _N_EMBD),
            f"blk.{i}.attn_v.weight": (n_kv, _N_EMBD),
            f"blk.{i}.attn_output.weight": (_N_EMBD, _N_EMBD),
            f"blk.{i}.ffn_norm.weight": (_N_EMBD,),
            f"blk.{i}.ffn_gate.weight": (_N_FF, _N_EMBD),
            f"blk.{i}.ffn_up.weight": (_N_FF, _N_EMBD),
            f"blk.{i}.ffn_down.weight": (_N_EMBD, _N_FF),
        }
    return out
