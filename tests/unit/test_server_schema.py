"""Fields of a request that generates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvmem_llama.engine.grammar import AnswerGrammar
from kvmem_llama.engine.sampling_params import SamplingParams
from kvmem_llama.server.errors import ApiError
from kvmem_llama.server.prompts import read_prompts
from kvmem_llama.server.schema import Generation, read_generation


class Letters:
    """A vocabulary of bytes; 0 is BOS, and `<x>` is one token, 1."""

    n_tokens = 256
    bos = 0

    def tokenize(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> Any:
        if text == "<x>" and parse_special:
            return np.array([1], np.int32)
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return np.concatenate([np.zeros(1, np.int32), ids]) if add_bos else ids


VOCAB: Any = Letters()


def read(n_parallel: int = 2, *, is_chat: bool = False, **body: Any) -> Generation:
    defaults = Generation(SamplingParams(temp=0.5, dry_base=1.5), n_predict=7)
    return read_generation(body, defaults, VOCAB, n_parallel=n_parallel, is_chat=is_chat)


def refusal(**body: Any) -> str:
    with pytest.raises(ApiError) as caught:
        read(**body)
    assert caught.value.code == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value.message


def test_nothing_given_means_the_defaults() -> None:
    assert read() == Generation(SamplingParams(temp=0.5, dry_base=1.5), n_predict=7)


def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    assert read(temperature=None, stream=None, stop=None, n=None, user="me", foo={"a": 1}) == read()


def test_soft_limits_clamp() -> None:
    found = read(top_k=-5, top_p=7, min_p=-1, temperature=-2, mirostat=9, adaptive_target=3)
    sampling = found.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temp) == (0, 1.0, 0.0, 0.0)
    assert (sampling.mirostat, sampling.adaptive_target) == (2, 1.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n_predict": -5}, "Field 'n_predict': Value must be between -1 <= value <= 2147483647, but got -5"),
        (
            {"max_tokens": -2},
            "Field 'max_tokens': Value must be between -1 <= value <= 2147483647, but got -2",
        ),
        ({"n": 5}, "Field 'n': Value must be between 1 <= value <= 2, but got 5"),
        (
            {"adaptive_decay": 1.5},
            "Field 'adaptive_decay': Value must be between 0.000000 <= value <= 0.990000, but got 1.500000",
        ),
        (
            {"temperature": "x"},
            "Field 'temperature': [json.exception.type_error.302] type must be number, but is string",
        ),
        (
            {"stream": 1},
            "Field 'stream': [json.exception.type_error.302] type must be boolean, but is number",
        ),
        ({"stop": [1]}, "Field 'stop': [json.exception.type_error.302] type must be string, but is number"),
        (
            {"dry_sequence_breakers": []},
            "Field 'dry_sequence_breakers': Error: "
            "dry_sequence_breakers must be a non-empty array of strings",
        ),
        ({"lora": 5}, "Field 'lora': Error: 'lora' must be an array of objects with 'id' and 'scale' fields"),
        ({"reasoning_format": "bad"}, "Field 'reasoning_format': Unknown reasoning format: bad"),
    ],
)
def test_hard_limits_and_wrong_types_are_refused_by_name(body: dict[str, Any], message: str) -> None:
    assert refusal(**body) == message


def test_as_many_tokens_as_anybody_could_mean_are_no_mistake() -> None:
    assert read(max_tokens=10**12).n_predict == 2**31 - 1
    assert read(n_predict=1e300).n_predict == 2**31 - 1


def test_the_first_name_of_a_field_goes_first() -> None:
    assert read(n_predict=1, max_completion_tokens=2, max_tokens=3).n_predict == 1
    assert read(max_completion_tokens=2, max_tokens=3).n_predict == 2
    assert read(logprobs=3).sampling.n_probs == 3
    assert read(n_probs=1, logprobs=3).sampling.n_probs == 1


def test_without_tokens_there_is_still_the_one_that_comes_with_the_prompt() -> None:
    assert (read(n_predict=0).n_max, read(n_predict=-1).n_max, read(n_predict=4).n_max) == (1, -1, 4)


def test_numbers_of_the_wrong_kind_are_converted() -> None:
    assert read(top_k=3.9).sampling.top_k == 3
    assert read(temperature=True).sampling.temp == 1.0
    assert read(seed=-1).sampling.seed == 2**32 - 1
    assert read(temperature=0.8).sampling.temp == float(np.float32(0.8))


def test_a_dry_base_below_one_is_the_default() -> None:
    assert read(dry_base=0.5).sampling.dry_base == 1.5
    assert read(dry_base=2).sampling.dry_base == 2.0


def test_a_bias_is_a_list_of_pairs_or_an_object_and_false_forbids() -> None:
    pairs = read(logit_bias=[[65, 1.5], ["BC", False], [999, 1], ["x"], [1, "2"]]).sampling.logit_bias
    assert pairs == ((65, 1.5), (66, -math.inf), (67, -math.inf))
    assert read(logit_bias={"65": -3, "B": False, "-1": 2}).sampling.logit_bias == (
        (65, -3.0),
        (66, -math.inf),
    )


def test_samplers_are_names_or_letters_and_unknown_ones_are_left_out() -> None:
    assert read(samplers=["top-k", "nucleus", "what"]).sampling.samplers == ("top_k", "top_p")
    assert read(samplers="kt?").sampling.samplers == ("top_k", "temperature")
    assert read(samplers=5).sampling.samplers == read().sampling.samplers


def test_stop_is_one_text_or_many() -> None:
    assert read(stop="a").stop == ("a",)
    assert read(stop=["a", "b"]).stop == ("a", "b")
    assert read(stop=[]).stop == ()


def test_usage_in_a_stream_is_asked_for_in_an_object() -> None:
    assert read(stream_options={"include_usage": True}).include_usage
    assert not read(stream_options=[True]).include_usage
    assert "include_usage" in refusal(stream_options={"include_usage": 1})


def test_a_schema_becomes_a_grammar() -> None:
    grammar = read(json_schema={"type": "integer"}).sampling.grammar
    assert isinstance(grammar, AnswerGrammar)
    assert grammar.grammar.startswith("integral-part") or "root ::=" in grammar.grammar
    assert "unrecognized type foo" in refusal(json_schema={"type": "foo"})
    assert read(grammar='root ::= "a"').sampling.grammar == AnswerGrammar('root ::= "a"')
    assert read(is_chat=True, grammar='root ::= "a"').sampling.grammar == ""  # the template has a say in it


def test_a_trigger_that_is_one_token_must_be_preserved() -> None:
    body: dict[str, Any] = {
        "grammar": 'root ::= "a"',
        "grammar_lazy": True,
        "grammar_triggers": [{"type": 1, "value": "<x>"}],
    }
    assert "should be marked as preserved token: <x>" in refusal(**body)
    found = read(**body, preserved_tokens=["<x>"])
    assert found.preserved == {1}
    assert isinstance(found.sampling.grammar, AnswerGrammar)
    assert [(t.type, t.token) for t in found.sampling.grammar.triggers] == [("token", 1)]
    assert "no triggers" in refusal(**{**body, "grammar_triggers": []})
    for wrong in (5, True, "x", {"type": 1}):
        assert "must be a list" in refusal(**{**body, "grammar_triggers": wrong})


# -- prompts


def prompts(prompt: Any) -> list[list[int]]:
    return [ids.tolist() for ids in read_prompts({"prompt": prompt}, VOCAB)]


def test_a_prompt_is_a_text_ids_both_or_a_list_of_these() -> None:
    assert prompts("AB") == [[0, 65, 66]]
    assert prompts([5, 6]) == [[5, 6]]
    assert prompts(["A", 7, "B"]) == [[0, 65, 7, 66]]
    assert prompts([7, "B"]) == [[7, 66]]
    assert prompts(["A", "B"]) == [[0, 65], [0, 66]]
    assert prompts([[5], "A", {"prompt_string": "B"}]) == [[5], [0, 65], [0, 66]]
    assert prompts("") == [[0]]


@pytest.mark.parametrize("prompt", [5, None, True, {"a": 1}, [True], [[["a"]]], [{"prompt_string": 5}]])
def test_other_shapes_of_a_prompt_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        prompts(prompt)
    assert caught.value.code == 400


def test_tokens_outside_of_the_vocabulary_and_empty_lists_are_refused() -> None:
    for prompt, message in (([256], "Prompt contains invalid tokens"), ([], '"prompt" must not be empty')):
        with pytest.raises(ApiError, match=message):
            prompts(prompt)
    with pytest.raises(ApiError, match="key 'prompt' not found"):
        read_prompts({}, VOCAB)
