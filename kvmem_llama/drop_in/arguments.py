"""The arguments of llama_cpp.Llama as settings of an engine, and the refusal of what has no counterpart."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ..engine.context import CELL_MULTIPLE
from ..errors import InvalidOption, NotOffered
from ..gguf_info import read_model_info
from ..settings import Settings

_CACHE_TYPES: Final = {1: "f16", 2: "q4_0", 8: "q8_0"}  # enum ggml_type
_HINT: Final = "Leave it out, or use llama_cpp.Llama for this."

# Arguments that are refused unless they have their default, and why.
_REFUSED: Final = {
    "split_mode": "the model is split over GPUs as llama.cpp does by itself",
    "main_gpu": "the first GPU is used",
    "tensor_split": "the model is split over GPUs as llama.cpp does by itself",
    "vocab_only": "an engine needs the weights",
    "use_mlock": "pages of the model cannot be locked",
    "kv_overrides": "the metadata of the model cannot be changed",
    "rope_scaling_type": "the model's own is used",
    "pooling_type": "no embeddings are made",
    "attention_type": "the model's own is used",
    "yarn_ext_factor": "the model's own is used",
    "yarn_attn_factor": "the model's own is used",
    "yarn_beta_fast": "the model's own is used",
    "yarn_beta_slow": "the model's own is used",
    "yarn_orig_ctx": "the model's own is used",
    "embedding": "no embeddings are made",
    "offload_kqv": "the KV cache lies where the layers are",
    "op_offload": "llama.cpp decides on it",
    "lora_base": "adapters are not loaded",
    "lora_scale": "adapters are not loaded",
    "lora_path": "adapters are not loaded",
    "numa": "memory is not bound to NUMA nodes",
    "draft_model": "there is no speculative decoding",
}


def given(signature: inspect.Signature, model_path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument by name, with llama_cpp's own defaults; names that it does not know are dropped, as it
    does. Raises InvalidOption for the first that is refused."""
    bound = signature.bind(None, model_path, **kwargs)
    bound.apply_defaults()
    values = dict(bound.arguments)
    del values["self"], values["kwargs"]
    for name, why in _REFUSED.items():
        if name in values and values[name] != signature.parameters[name].default:
            raise InvalidOption(name, values[name], why, hint=_HINT)
    if values["swa_full"] is False:
        raise InvalidOption("swa_full", False, "the whole cache is needed to recall", hint=_HINT)
    return values


def settings_of(values: Mapping[str, Any], options: Mapping[str, object]) -> tuple[Settings, int]:
    """-> settings of an engine, and its window: most tokens of which all are in the view, [tokens].

    options: of our own, by their names in docs/options.md; they win over the arguments.
    Raises ModelError or InvalidOption.
    """
    n_ctx = values["n_ctx"] or read_model_info(Path(values["model_path"])).n_ctx_train
    n_cores = os.cpu_count() or 1
    n_batch = min(n_ctx, values["n_batch"])
    n_window = -(-n_ctx // CELL_MULTIPLE) * CELL_MULTIPLE  # as llama.cpp rounds it
    ours: dict[str, object] = {
        "model": str(values["model_path"]),
        "n_ubatch": min(n_batch, values["n_ubatch"]),
        "n_threads": values["n_threads"] or max(n_cores // 2, 1),
        "n_threads_batch": values["n_threads_batch"] or n_cores,
        "n_gpu_layers": -2 if values["n_gpu_layers"] == -1 else values["n_gpu_layers"],
        "cache_type_k": _cache_type("type_k", values["type_k"]),
        "cache_type_v": _cache_type("type_v", values["type_v"]),
        "use_mmap": values["use_mmap"],
        "rope_freq_base": values["rope_freq_base"],
        "rope_freq_scale": values["rope_freq_scale"],
        "verbose": values["verbose"],
        "n_query": min(512, n_window // 2),
        **options,
    }
    block = Settings.from_sources(ours).block_size
    # The room for an answer comes on top: a prompt and its answer that fit n_ctx are never recalled from.
    n_reserve = max(n_window // 8 // block * block, block)
    return Settings.from_sources({"n_ctx": n_window + n_reserve, "n_reserve": n_reserve, **ours}), n_window


def refusal(what: str, why: str) -> Callable[..., Any]:
    """A method, or the getter of a property, that is not offered."""

    def refuse(self: object, *args: object, **kwargs: object) -> Any:
        raise NotOffered(f"Llama.{what}", why)

    return refuse


def _cache_type(name: str, value: int | None) -> str:
    if value is None:
        return "f16"
    if value not in _CACHE_TYPES:
        known = ", ".join(f"{number} ({kind})" for number, kind in _CACHE_TYPES.items())
        raise InvalidOption(name, value, f"must be one of {known}", hint="Use one of these.")
    return _CACHE_TYPES[value]
