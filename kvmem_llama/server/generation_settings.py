"""How an answer is generated, as /props, /slots and /completion show it (tools/server/server-task.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..engine.sampling_params import SamplingParams

_SEED: Final = 2**32 - 1  # a random one


def generation_settings(
    params: SamplingParams,
    *,
    n_predict: int = -1,
    stream: bool = False,
    chat_format: str = "Content-only",
    reasoning_format: str = "none",
    generation_prompt: str = "",
    timings_per_token: bool = False,
    n_keep: int = 0,
    n_discard: int = 0,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The object of llama-server.

    n_predict: most tokens; -1: no limit. details: what an answer shows beside the settings that /props and
    /slots show, by name; None: as these two.
    """
    found: dict[str, Any] = {
        "seed": params.seed if params.seed >= 0 else _SEED,
        "temperature": _f32(params.temp),
        "dynatemp_range": _f32(params.dynatemp_range),
        "dynatemp_exponent": _f32(params.dynatemp_exponent),
        "top_k": params.top_k,
        "top_p": _f32(params.top_p),
        "min_p": _f32(params.min_p),
        "top_n_sigma": _f32(params.top_n_sigma),
        "xtc_probability": _f32(params.xtc_probability),
        "xtc_threshold": _f32(params.xtc_threshold),
        "typical_p": _f32(params.typical_p),
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": _f32(params.repeat_penalty),
        "presence_penalty": _f32(params.presence_penalty),
        "frequency_penalty": _f32(params.frequency_penalty),
        "dry_multiplier": _f32(params.dry_multiplier),
        "dry_base": _f32(params.dry_base),
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "mirostat": params.mirostat,
        "mirostat_tau": _f32(params.mirostat_tau),
        "mirostat_eta": _f32(params.mirostat_eta),
        "adaptive_target": _f32(params.adaptive_target),
        "adaptive_decay": _f32(params.adaptive_decay),
        "stop": [],
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": n_keep,
        "n_discard": n_discard,
        "ignore_eos": params.ignore_eos,
        "stream": stream,
        "logit_bias": [],
        "n_probs": params.n_probs,
        "min_keep": params.min_keep,
        "grammar": "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": chat_format,
        "reasoning_format": reasoning_format,
        "reasoning_in_content": False,
        "generation_prompt": generation_prompt,
        "samplers": list(params.samplers),
        "speculative.types": "none",
        "timings_per_token": timings_per_token,
        "post_sampling_probs": params.post_sampling_probs,
        "backend_sampling": False,
        "lora": [],
    }
    if details is None:
        return {name: value for name, value in found.items() if name not in DETAILS}
    return found | dict(details)


DETAILS: Final = frozenset(
    {
        "dry_sequence_breakers",
        "stop",
        "logit_bias",
        "grammar",
        "grammar_lazy",
        "grammar_triggers",
        "preserved_tokens",
    }
)
"""What only an answer shows."""


def _f32(value: float) -> float:
    """llama-server's numbers are of 32 bits, and that shows in what they are as texts."""
    return float(np.float32(value))
