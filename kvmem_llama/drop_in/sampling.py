"""llama_cpp's samplers over logits that are ours."""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import InvalidOption
from ..native.layout import F32


def choose(binding: Any, sampler: Any, candidates: Any, logits: F32) -> int:
    """As llama_cpp._internals.LlamaSampler.sample. candidates: a LlamaTokenDataArray; logits: [n_vocab]."""
    candidates.copy_logits(logits)
    array = candidates.candidates
    array.selected = -1
    binding.llama_sampler_apply(sampler.sampler, ctypes.byref(array))
    token = int(array.data[array.selected].id)
    binding.llama_sampler_accept(sampler.sampler, token)
    return token


def checked_grammar(binding: Any, model: Any, grammar: Any) -> None:
    """Raises InvalidOption for a grammar that llama.cpp cannot parse; it would end the process later."""
    if grammar is None:
        return
    text, root = grammar._grammar.encode(), grammar._root.encode()
    made = binding.llama_sampler_init_grammar(model.vocab, text, root)
    if not made:
        raise InvalidOption(
            "grammar", grammar._grammar, "llama.cpp cannot parse it", hint="Correct the grammar (GBNF)."
        )
    binding.llama_sampler_free(made)
