"""The shapes of a prompt (tools/server/server-common.cpp): text, token ids, both mixed, or many of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..engine.vocab import Vocab
from ..native.layout import I32
from .errors import bad_request
from .schema import json_type

_SHAPES: Final = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt string, '
    "or a list of mixed strings & tokens."
)


def read_prompts(body: Mapping[str, Any], vocab: Vocab) -> list[I32]:
    """Token ids of each prompt of a completion, [n] each. Raises ApiError (400)."""
    if "prompt" not in body:
        raise bad_request("[json.exception.out_of_range.403] key 'prompt' not found")
    prompt = body["prompt"]
    if isinstance(prompt, list) and not any(_is_id(part) for part in prompt):
        found = [_one(part, vocab) for part in prompt]
    else:
        found = [_one(prompt, vocab)]
    if not found:
        raise bad_request('"prompt" must not be empty')
    return found


def _one(prompt: Any, vocab: Vocab) -> I32:
    if isinstance(prompt, dict) and "prompt_string" in prompt:
        if "multimodal_data" in prompt:
            raise bad_request("Multimodal data provided, but model does not support multimodal requests.")
        prompt = prompt["prompt_string"]
    if isinstance(prompt, str):
        return vocab.tokenize(prompt, add_bos=True)
    if not isinstance(prompt, list) or not all(_is_id(part) or isinstance(part, str) for part in prompt):
        raise bad_request(_SHAPES)
    if prompt and all(isinstance(part, str) for part in prompt):
        raise bad_request(_SHAPES)
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            ids += vocab.tokenize(part, add_bos=not i).tolist()
        elif 0 <= part < vocab.n_tokens:
            ids.append(part)
        else:
            raise bad_request("Prompt contains invalid tokens")
    return np.array(ids, dtype=np.int32)


def _is_id(part: Any) -> bool:
    return json_type(part) == "number" and isinstance(part, int)
