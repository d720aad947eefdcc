"""Every argument, method and attribute of llama_cpp.Llama is there with its signature, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import llama_cpp
import pytest

from kvmem_llama import Llama
from kvmem_llama.drop_in import arguments
from kvmem_llama.drop_in.question import question_of
from kvmem_llama.errors import InvalidOption, ModelNotFound, NotOffered

STOCK = llama_cpp.Llama
CONSTRUCTOR = inspect.signature(STOCK.__init__)
OURS = ("workspace", "options", "report")
REFUSED = ("embed", "create_embedding", "ctx")
OTHER = {  # a value that is not the default, of arguments that are refused
    "split_mode": 0, "main_gpu": 1, "tensor_split": [1.0], "vocab_only": True, "use_mlock": True,
    "kv_overrides": {"a": 1}, "rope_scaling_type": 2, "pooling_type": 1, "attention_type": 1,
    "yarn_ext_factor": 1.0, "yarn_attn_factor": 2.0, "yarn_beta_fast": 1.0, "yarn_beta_slow": 2.0,
    "yarn_orig_ctx": 4096, "embedding": True, "offload_kqv": False, "op_offload": False, "swa_full": False,
    "lora_base": "a", "lora_scale": 2.0, "lora_path": "a", "numa": True, "draft_model": object(),
}  # fmt: skip
TAKEN = {
    "self", "model_path", "n_gpu_layers", "use_mmap", "seed", "n_ctx", "n_batch", "n_ubatch", "n_threads",
    "n_threads_batch", "rope_freq_base", "rope_freq_scale", "logits_all", "flash_attn", "no_perf",
    "last_n_tokens_size", "chat_format", "chat_handler", "tokenizer", "type_k", "type_v", "spm_infill",
    "verbose", "kwargs",
}  # fmt: skip


def public(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")] + ["__call__"]


@pytest.mark.parametrize("name", public(STOCK))
def test_every_public_name_is_there_with_the_same_signature_or_refused(name: str) -> None:
    theirs, ours = inspect.getattr_static(STOCK, name), inspect.getattr_static(Llama, name)
    if name in REFUSED:
        refuse: Any = ours.fget if isinstance(ours, property) else ours
        with pytest.raises(NotOffered, match=rf"Llama\.{name} is not offered"):
            refuse(object(), "text")
        return
    assert type(theirs) is type(ours)
    if not isinstance(theirs, property):
        call, stock = getattr(Llama, name), getattr(STOCK, name)
        for parameter in inspect.signature(stock).parameters.values():
            same = inspect.signature(call).parameters[parameter.name]
            assert (same.kind, same.default) == (parameter.kind, parameter.default)


def test_the_constructor_has_all_arguments_with_their_defaults_and_ours_by_keyword() -> None:
    ours = dict(inspect.signature(Llama.__init__).parameters)
    added = {name: ours.pop(name) for name in OURS}
    assert list(ours.values()) == list(CONSTRUCTOR.parameters.values())
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added.values())


@pytest.mark.parametrize("name", sorted(CONSTRUCTOR.parameters))
def test_an_argument_is_taken_or_refused_by_name(name: str) -> None:
    assert (name in TAKEN) is not (name in OTHER), "say what becomes of this argument"
    if name in OTHER:
        with pytest.raises(InvalidOption) as caught:
            Llama("model.gguf", **{name: OTHER[name]})
        assert caught.value.name == name


def test_arguments_become_settings() -> None:
    values = arguments.given(
        CONSTRUCTOR, "m.gguf",
        dict(n_ctx=300, n_batch=128, n_ubatch=512, type_k=8, n_gpu_layers=-1, verbose=False, n_parts=1),
    )  # fmt: skip
    settings, window = arguments.settings_of(values, {"block_size": 16, "n_recent": 64})
    assert window == 512, "as llama.cpp rounds it"
    assert (settings.n_ctx, settings.n_reserve) == (512 + 64, 64), "the room for an answer comes on top"
    assert (settings.n_ubatch, settings.cache_type_k, settings.cache_type_v) == (128, "q8_0", "f16")
    assert (settings.n_gpu_layers, settings.block_size, settings.n_recent) == (-2, 16, 64)


def test_a_cache_type_and_an_option_that_do_not_exist_are_refused() -> None:
    values = arguments.given(CONSTRUCTOR, "m.gguf", {"type_v": 30})
    with pytest.raises(InvalidOption, match="type_v = 30: must be one of 1"):
        arguments.settings_of(values, {})
    with pytest.raises(InvalidOption, match="no such option"):
        arguments.settings_of(arguments.given(CONSTRUCTOR, "m.gguf", {}), {"n_blocks": 3})


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        Llama("nowhere.gguf", verbose=False)


def test_the_question_is_the_newest_text_that_wants_an_answer() -> None:
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": " three "}]},
        {"role": "assistant", "content": None},
    ]
    assert question_of(talk) == b"three"
    assert question_of(talk[:2]) == b"one"
    assert question_of([*talk, {"role": "tool", "content": "42"}]) == b"42"
    assert question_of(talk[1:2]) == b""


def test_a_refused_attribute_is_absent_for_those_who_ask_first() -> None:
    assert not hasattr(object.__new__(Llama), "ctx")
