"""Fill-in-the-middle prompts (tools/server/server-common.cpp has their form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..engine.vocab import Vocab
from ..native.layout import I32
from ..native.library import import_binding
from .errors import bad_request, not_supported
from .tokens import tokenize_mixed

_SNIPPET: Final = "\n\n--- snippet ---\n\n"


def infill_prompt(body: Mapping[str, Any], vocab: Vocab, *, n_batch: int, n_predict: int, n_ctx: int) -> I32:
    """Token ids of the prompt that asks what stands between `input_prefix` and `input_suffix`.

    n_batch: tokens of prefix and suffix together, about. n_ctx: of the view; the rest of it is for
    `input_extra`. Raises ApiError: 501 for a model without the tokens, 400.
    """
    llama: Any = import_binding()
    prefix, suffix, middle, repository, separator = vocab.using(
        lambda pointer: [
            getattr(llama, f"llama_vocab_fim_{name}")(pointer) for name in ("pre", "suf", "mid", "rep", "sep")
        ]
    )
    missing = [
        f"{name} token is missing. "
        for name, token in (("prefix", prefix), ("suffix", suffix), ("middle", middle))
        if token < 0
    ]
    if missing:
        raise not_supported("Infill is not supported by this model: " + "".join(missing))
    extra = _checked(body)
    asked = vocab.tokenize(body.get("prompt") or "").tolist()
    before = tokenize_mixed(vocab, body["input_prefix"], add_special=False, parse_special=False)
    after = tokenize_mixed(vocab, body["input_suffix"], add_special=False, parse_special=False)
    n_before = min(len(before), 3 * (n_batch // 4))
    n_after = min(len(after), max(0, n_batch // 4 - (2 + len(asked))))
    more = _extra(extra, vocab, repository, separator)
    n_more = min(max(0, n_ctx - n_batch - 2 * n_predict), len(more))
    bos = [vocab.bos] if vocab.add_bos else []
    ids = [
        *more[len(more) - n_more :], *bos, prefix, *before[len(before) - n_before :], *asked,
        suffix, *after[:n_after], middle,
    ]  # fmt: skip
    return np.array(ids, dtype=np.int32)


def _checked(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    if body.get("prompt") is not None and not isinstance(body["prompt"], str):
        raise bad_request('"prompt" must be a string')
    for name in ("input_prefix", "input_suffix"):
        if body.get(name) is None:
            raise bad_request(f'"{name}" is required')
    extra = body.get("input_extra")
    extra = [] if extra is None else extra
    if not isinstance(extra, list):
        raise bad_request('"input_extra" must be an array of {"filename": string, "text": string}')
    for chunk in extra:
        if not isinstance(chunk, dict) or not isinstance(chunk.get("text"), str):
            raise bad_request('extra_context chunk must contain a "text" field with a string value')
        if not isinstance(chunk.get("filename", ""), str):
            raise bad_request('extra_context chunk\'s "filename" field must be a string')
    return extra


def _extra(extra: list[dict[str, Any]], vocab: Vocab, repository: int, separator: int) -> list[int]:
    """Other files of the repository; a token below 0: the model has none."""

    def plain(text: str) -> list[int]:
        found: list[int] = vocab.tokenize(text, parse_special=False).tolist()
        return found

    ids = [repository, *plain("myproject\n")] if repository >= 0 else []
    for chunk in extra:
        if separator >= 0:
            ids += [separator, *plain(chunk.get("filename", "tmp") + "\n")]
        else:
            ids += plain(_SNIPPET)
        ids += plain(chunk["text"])
    return [*ids, separator, *plain("filename\n")] if separator >= 0 else ids
