"""llama.cpp's chain of samplers: the same parts in the same order as common/sampling.cpp puts together."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from ..errors import InvalidOption
from .sampling_params import SamplingParams
from .vocab import Vocab

_MIROSTAT_M: Final = 100  # tokens that Mirostat 1 estimates from
_MOST_LAST: Final = 2**20  # tokens; the samplers set aside memory for all they are told to look at


def parts(llama: Any, vocab: Vocab, params: SamplingParams, seed: int) -> list[Any]:
    """The samplers that `params` asks for, each a llama_sampler * that its caller owns.

    Those that have nothing to do are in it: libllama makes an empty sampler of them. Raises InvalidOption for
    a bias of a token that is not in the vocabulary.
    """
    biases = _biases(llama, vocab, params)
    out = [llama.llama_sampler_init_logit_bias(vocab.n_tokens, len(biases), biases)] if len(biases) else []
    if params.mirostat:
        out.append(llama.llama_sampler_init_temp(params.temp))
        tau, eta = params.mirostat_tau, params.mirostat_eta
        if params.mirostat == 1:
            args = vocab.n_tokens, seed, tau, eta, _MIROSTAT_M
            return [*out, llama.llama_sampler_init_mirostat(*args)]
        return [*out, llama.llama_sampler_init_mirostat_v2(seed, tau, eta)]
    out += [_part(llama, vocab, params, seed, name) for name in params.samplers if name != "adaptive_p"]
    if "adaptive_p" in params.samplers:  # chooses a token itself, so it is the last one wherever it stands
        target, decay = params.adaptive_target, params.adaptive_decay
        return [*out, llama.llama_sampler_init_adaptive_p(target, decay, seed)]
    return [*out, llama.llama_sampler_init_dist(seed)]


def _part(llama: Any, vocab: Vocab, params: SamplingParams, seed: int, name: str) -> Any:
    keep = params.min_keep
    match name:
        case "penalties":
            return llama.llama_sampler_init_penalties(
                vocab.n_tokens,
                min(params.repeat_last_n, _MOST_LAST),
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        case "dry":
            breakers = [text.encode(errors="replace") for text in params.dry_sequence_breakers]
            return llama.llama_sampler_init_dry(
                vocab.pointer,
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                min(params.dry_penalty_last_n, _MOST_LAST),
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        case "top_n_sigma":
            return llama.llama_sampler_init_top_n_sigma(params.top_n_sigma)
        case "top_k":
            return llama.llama_sampler_init_top_k(params.top_k)
        case "typ_p":
            return llama.llama_sampler_init_typical(params.typical_p, keep)
        case "top_p":
            return llama.llama_sampler_init_top_p(params.top_p, keep)
        case "min_p":
            return llama.llama_sampler_init_min_p(params.min_p, keep)
        case "xtc":
            probability, threshold = params.xtc_probability, params.xtc_threshold
            return llama.llama_sampler_init_xtc(probability, threshold, keep, seed)
        case "temperature":
            spread, exponent = params.dynatemp_range, params.dynatemp_exponent
            return llama.llama_sampler_init_temp_ext(params.temp, spread, exponent)
        case "infill":
            return llama.llama_sampler_init_infill(vocab.pointer)
    raise ValueError(name)


def _biases(llama: Any, vocab: Vocab, params: SamplingParams) -> Any:
    """[n] llama_logit_bias, those of the caller first."""
    for token, _ in params.logit_bias:
        if not 0 <= token < vocab.n_tokens:
            why = f"must be the id of a token, from 0 to {vocab.n_tokens - 1}"
            raise InvalidOption("--logit-bias", token, why)
    never = (*vocab.eogs, *vocab.suppressed) if params.ignore_eos else vocab.suppressed
    pairs = [*params.logit_bias, *((token, float("-inf")) for token in never)]
    return (llama.llama_logit_bias * len(pairs))(*pairs)
