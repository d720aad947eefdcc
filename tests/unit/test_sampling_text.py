"""Sampling options as text, what is refused of them, and what a step keeps of them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from kvmem_llama.cli.options import joined
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.errors import InvalidOption
from kvmem_llama.sampling_text import (
    BREAKERS,
    LETTERS,
    SAMPLERS,
    breakers_of,
    logit_bias_of,
    sampler_name,
    samplers_of,
    samplers_of_letters,
)
from kvmem_llama.settings import BY_NAME, Settings


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("top-k", "top_k"), ("TOPK", "top_k"), ("nucleus", "top_p"), ("typ", "typ_p"),
        ("temp", "temperature"), ("top-n-sigma", "top_n_sigma"), ("xtc", "xtc"), ("beam", None),
    ],
)  # fmt: skip
def test_a_sampler_has_llama_cpps_names(text: str, name: str | None) -> None:
    assert sampler_name(text) == name


def test_samplers_come_in_the_order_they_are_written_in() -> None:
    assert samplers_of("temperature; top-k;penalties;") == ("temperature", "top_k", "penalties")
    assert samplers_of(Settings().samplers) == samplers_of_letters("edskypmxt") == SAMPLERS
    assert SamplingParams.of(Settings(samplers="top_k", sampler_seq="ia"), 9).samplers == (
        "infill",
        "adaptive_p",
    )


@pytest.mark.parametrize(
    ("text", "biases"),
    [
        ("", ()),
        ("15043+1", ((15043, 1.0),)),
        ("5-1.5, 7+.25,9-inf", ((5, -1.5), (7, 0.25), (9, -math.inf))),
        ("5+1e2,5-3", ((5, 100.0), (5, -3.0))),
    ],
)
def test_biases_are_read_as_llama_cpp_writes_them(text: str, biases: Any) -> None:
    assert logit_bias_of(text) == biases


@pytest.mark.parametrize("text", ["5", "5=1", "x+1", "5+-1", "5+nan", "-5+1"])
def test_what_is_no_bias_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="--logit-bias"):
        Settings(logit_bias=text)


def test_breakers_are_texts_with_escapes() -> None:
    assert breakers_of(Settings().dry_sequence_breakers) == BREAKERS
    assert breakers_of(r"a b;\x3b;\\n;\t") == ("a b", ";", "\\n", "\t")
    assert breakers_of("none") == ()


def test_a_flag_that_is_repeated_keeps_every_value() -> None:
    bias, breaker = BY_NAME["logit_bias"], BY_NAME["dry_sequence_breakers"]
    settings = Settings.from_sources(
        {"logit_bias": joined(bias, ["5+1", "7-2"]), "dry_sequence_breakers": joined(breaker, [";", r"\n"])}
    )
    params = SamplingParams.of(settings, 9)
    assert params.logit_bias == ((5, 1.0), (7, -2.0)) and params.dry_sequence_breakers == (";", "\n")
    assert joined(bias, None) is None and joined(bias, []) is None


@pytest.mark.parametrize(
    ("option", "value", "flag"),
    [
        ("samplers", ("top_q",), "--samplers"),
        ("mirostat", 3, "--mirostat"),
        ("repeat_penalty", 0.0, "--repeat-penalty"),
        ("repeat_penalty", 1e-45, "--repeat-penalty"),
        ("frequency_penalty", math.inf, "--frequency-penalty"),
        ("temp", math.nan, "--temp"),
        ("min_keep", -1, "min_keep"),
        ("n_probs", -1, "n_probs"),
        ("top_k", 2**31, "--top-k"),
        ("seed", 2**32, "--seed"),
        ("adaptive_decay", 1.0, "--adaptive-decay"),
        ("logit_bias", ((5, math.inf),), "--logit-bias"),
        ("logit_bias", ((5, math.nan),), "--logit-bias"),
    ],
)
def test_what_llama_cpp_cannot_use_is_refused_by_name(option: str, value: Any, flag: str) -> None:
    with pytest.raises(InvalidOption, match=flag):
        SamplingParams(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("top_k", 1.5),
        ("top_k", True),
        ("temp", "x"),
        ("temp", None),
        ("temp", 10**400),
        ("ignore_eos", 1),
        ("logit_bias", {5: 1.0}),
        ("logit_bias", ((5, "x"),)),
        ("logit_bias", ((5.5, 1.0),)),
        ("samplers", "top_k"),
        ("dry_sequence_breakers", (1,)),
        ("grammar", 5),
        ("reasoning", "yes"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=option.replace("_", "[-_]").removesuffix("s")):
        SamplingParams(**{option: value})


def test_numbers_of_numpy_become_pythons_which_json_takes() -> None:
    options: Any = {
        "seed": np.int64(5), "top_k": np.int32(7), "temp": np.float32(0.5), "ignore_eos": np.bool_(True),
        "logit_bias": [(np.int32(5), np.float32(1.5))], "samplers": ["top_k"],
    }  # fmt: skip
    params = SamplingParams(**options)
    assert params == SamplingParams(
        seed=5, top_k=7, temp=0.5, ignore_eos=True, logit_bias=((5, 1.5),), samplers=("top_k",)
    )
    stored = json.loads(json.dumps(dataclasses.asdict(params)))
    assert (stored["seed"], stored["temp"], stored["logit_bias"]) == (5, 0.5, [[5, 1.5]])
    assert SamplingParams(temp=0).temp == 0


def test_every_option_of_the_table_reaches_the_sampler() -> None:
    fields = {f.name for f in dataclasses.fields(SamplingParams)}
    rows = {name for name, option in BY_NAME.items() if option.section.startswith("Sampling")}
    elsewhere = {"grammar", "grammar_file", "json_schema", "n_predict", "sampler_seq"}
    assert rows - elsewhere <= fields
    for name in rows - elsewhere - {"samplers", "logit_bias", "dry_sequence_breakers", "ignore_eos"}:
        value = {"dry_base": 1.25}.get(name, 0.25 if BY_NAME[name].type is float else 2)
        assert getattr(SamplingParams.of(Settings(**{name: value}), 9), name) == value, name
    assert SamplingParams.of(Settings(ignore_eos=True), 9).ignore_eos
    assert SamplingParams.of(Settings(dry_penalty_last_n=-1), 9).dry_penalty_last_n == 9


def test_the_newest_tokens_that_matter_are_those_of_the_penalties_and_of_dry() -> None:
    assert SamplingParams().n_looked_at == 0
    assert SamplingParams(repeat_penalty=1.1).n_looked_at == 64
    both = SamplingParams(repeat_penalty=1.1, dry_multiplier=0.8, dry_penalty_last_n=500)
    assert both.n_looked_at == 500
    assert dataclasses.replace(both, samplers=("penalties",)).n_looked_at == 64
    assert dataclasses.replace(both, mirostat=2).n_looked_at == 0


@pytest.mark.parametrize(
    ("options", "is_argmax"),
    [
        ({}, True),
        ({"top_k": 1, "top_p": 0.1, "min_p": 0.9, "top_n_sigma": 1.0, "min_keep": 3}, True),
        ({"repeat_penalty": 1.1, "samplers": ("temperature",)}, True),
        ({"temp": 0.1}, False),
        ({"dynatemp_range": 0.5}, False),
        ({"repeat_penalty": 1.1}, False),
        ({"dry_multiplier": 0.8}, False),
        ({"xtc_probability": 0.5}, False),
        ({"typical_p": 0.5}, False),
        ({"mirostat": 1}, False),
        ({"ignore_eos": True}, False),
        ({"logit_bias": ((5, 1.0),)}, False),
        ({"samplers": ("top_k",)}, False),
        ({"samplers": ("temperature", "adaptive_p")}, False),
    ],
)
def test_the_likeliest_token_is_taken_at_once_only_where_nothing_else_can_be(
    options: dict[str, Any], is_argmax: bool
) -> None:
    assert bool(SamplingParams(**{"temp": 0.0, **options}).is_argmax) == is_argmax


def test_what_a_step_stores_of_its_sampling_can_be_read_again() -> None:
    params = SamplingParams(logit_bias=((5, -math.inf),), dry_sequence_breakers=("\n",), samplers=("top_k",))
    stored = json.loads(json.dumps(dataclasses.asdict(params)))
    assert stored["logit_bias"] == [[5, -math.inf]] and stored["samplers"] == ["top_k"]
    assert set(LETTERS.values()) >= set(SAMPLERS)
