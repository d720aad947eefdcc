"""Tiny GGUF files with random weights, and damaged ones, for tests that need no real model.

The vocabulary is byte-level (one token for each byte, a few merges and the ChatML tokens), so any text can be
tokenized. Weights are scaled so that attention is neither flat nor one-hot, and logits differ between tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""It knows no system prompt: llama.cpp puts that into the first message of the user."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t")


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; n_embd = n_head * d."""

    arch: str = "llama"
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    d: int = 64
    n_ff: int = 256
    n_ctx_train: int = 2048
    n_swa: int = 64  # gemma3 only

    @property
    def n_embd(self) -> int:
        return self.n_head * self.d


SHAPES = {
    "llama": Shape("llama"),
    "qwen2": Shape("qwen2"),
    "qwen3": Shape("qwen3"),
    "gemma3": Shape("gemma3", n_layer=6, n_head=2, n_head_kv=1),  # layer 5 is global, the others slide
    "lfm2": Shape("lfm2", n_layer=4),  # every second layer keeps a recurrent state instead of K and V
    "gpt2": Shape("gpt2", n_head_kv=4, n_ctx_train=256),
    "bert": Shape("bert", n_head_kv=4, n_ctx_train=128),
    "frobnicate": Shape("frobnicate"),  # an architecture no library knows, with llama's tensors
}


def write_model(
    path: Path,
    shape: Shape | str = "llama",
    *,
    seed: int = 0,
    dtype: type[np.floating] = np.float32,
    quantization: gguf.GGMLQuantizationType | None = None,
    template: str | None = CHATML,
    vocabulary: bool = True,
) -> Path:
    """Writes a model file and returns its path; the same arguments give the same bytes.

    quantization: of the matrices. Products of float matrices depend on the batch's shape, also in exact mode.
    """
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    writer = gguf.GGUFWriter(path, shape.arch)
    _write_sizes(writer, shape)
    tokens = byte_tokens() + [left + right for left, right in (m.split() for m in MERGES)] + list(SPECIAL)
    if vocabulary:
        _write_vocabulary(writer, tokens)
        if template is not None:
            writer.add_chat_template(template)
    rng = np.random.default_rng(seed)
    for name, dims in _tensors(shape, len(tokens)).items():
        data = _weights(rng, name, dims)
        if quantization is not None and len(dims) > 1:
            writer.add_tensor(name, gguf.quants.quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, data.astype(dtype) if len(dims) > 1 else data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def truncate(source: Path, target: Path, keep: float) -> Path:
    """Writes the first `keep` (0..1) of `source` to `target`."""
    data = source.read_bytes()
    target.write_bytes(data[: int(len(data) * keep)])
    return target


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _write_sizes(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_type("model")
    writer.add_name(f"tiny {shape.arch}")
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    if shape.arch == "lfm2":
        writer.add_head_count_kv([shape.n_head_kv * (i % 2) for i in range(shape.n_layer)])
        writer.add_uint32("lfm2.shortconv.l_cache", 3)
    else:
        writer.add_head_count_kv(shape.n_head_kv)
    if shape.arch in ("gpt2", "bert"):
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(shape.d)
        writer.add_rope_freq_base(10000.0)
    if shape.arch in ("qwen3", "gemma3"):
        writer.add_key_length(shape.d)
        writer.add_value_length(shape.d)
    if shape.arch == "gemma3":
        writer.add_sliding_window(shape.n_swa)
    if shape.arch == "bert":
        writer.add_causal_attention(False)


def _write_vocabulary(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)


def _tensors(shape: Shape, n_vocab: int) -> dict[str, tuple[int, ...]]:
    """Name -> NumPy shape (rows first: a matrix is [out, in])."""
    n_embd, n_kv, n_ff = shape.n_embd, shape.n_head_kv * shape.d, shape.n_ff
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, n_embd)}
    learned = shape.arch in ("gpt2", "bert")
    if learned:
        out["position_embd.weight"] = (shape.n_ctx_train, n_embd)
    out["token_embd_norm.weight" if shape.arch == "lfm2" else "output_norm.weight"] = (n_embd,)
    if learned:
        out["output_norm.bias"] = (n_embd,)
    out["output.weight"] = (n_vocab, n_embd)
    for i in range(shape.n_layer):
        layer = _gpt2_layer(n_embd, n_kv, n_ff) if learned else _rope_layer(shape, n_embd, n_kv, n_ff)
        if shape.arch == "lfm2" and i % 2 == 0:
            layer = {name: dims for name, dims in layer.items() if not name.startswith("attn_")}
            layer |= {
                "attn_norm.weight": (n_embd,),
                "shortconv.conv.weight": (n_embd, 3),
                "shortconv.in_proj.weight": (3 * n_embd, n_embd),
                "shortconv.out_proj.weight": (n_embd, n_embd),
            }
        out |= {f"blk.{i}.{name}": dims for name, dims in layer.items()}
    return out


def _rope_layer(shape: Shape, n_embd: int, n_kv: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (n_embd,),
        "attn_q.weight": (n_embd, n_embd),
        "attn_k.weight": (n_kv, n_embd),
        "attn_v.weight": (n_kv, n_embd),
        "attn_output.weight": (n_embd, n_embd),
        "ffn_norm.weight": (n_embd,),
        "ffn_gate.weight": (n_ff, n_embd),
        "ffn_up.weight": (n_ff, n_embd),
        "ffn_down.weight": (n_embd, n_ff),
    }
    if shape.arch == "qwen2":
        layer |= {"attn_q.bias": (n_embd,), "attn_k.bias": (n_kv,), "attn_v.bias": (n_kv,)}
    if shape.arch in ("qwen3", "gemma3", "lfm2"):
        layer |= {"attn_q_norm.weight": (shape.d,), "attn_k_norm.weight": (shape.d,)}
    if shape.arch == "gemma3":
        layer |= {"post_attention_norm.weight": (n_embd,), "post_ffw_norm.weight": (n_embd,)}
    return layer


def _gpt2_layer(n_embd: int, n_kv: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    wide = n_embd + 2 * n_kv
    return {
        "attn_norm.weight": (n_embd,), "attn_norm.bias": (n_embd,),
        "attn_qkv.weight": (wide, n_embd), "attn_qkv.bias": (wide,),
        "attn_output.weight": (n_embd, n_embd), "attn_output.bias": (n_embd,),
        "ffn_norm.weight": (n_embd,), "ffn_norm.bias": (n_embd,),
        "ffn_up.weight": (n_ff, n_embd), "ffn_up.bias": (n_ff,),
        "ffn_down.weight": (n_embd, n_ff), "ffn_down.bias": (n_embd,),
    }  # fmt: skip


def _weights(rng: np.random.Generator, name: str, dims: tuple[int, ...]) -> NDArray[np.float32]:
    if "norm" in name and name.endswith(".weight"):
        return (1.0 + 0.1 * rng.standard_normal(dims)).astype(np.float32)
    if name.endswith(".bias"):
        return (0.1 * rng.standard_normal(dims)).astype(np.float32)
    scale = 1.0 if name.startswith(("token_embd", "position_embd")) else dims[-1] ** -0.5
    if name.startswith("output"):
        scale *= 2.0
    return (scale * rng.standard_normal(dims)).astype(np.float32)
