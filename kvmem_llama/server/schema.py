"""The fields of a request that generates, as llama-server reads them (tools/server/server-schema.cpp).

A value outside of a soft limit is clamped, one outside of a hard limit is refused; null is absent, and fields
that nobody knows are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

import numpy as np

from ..engine.grammar import AnswerGrammar, GrammarTrigger, ReasoningLimit
from ..engine.sampling_params import SamplingParams
from ..engine.templates import json_schema_to_grammar
from ..engine.vocab import Vocab, single_tokens
from ..errors import InvalidOption, InvalidRequest
from ..sampling_text import LETTERS, sampler_name
from .errors import ApiError, bad_request

_INT_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_FLOAT_MAX: Final = float(np.finfo(np.float32).max)
REASONING_FORMATS: Final = ("none", "auto", "deepseek", "deepseek-legacy")
TRIGGERS: Final = ("token", "word", "pattern", "pattern_full")  # enum common_grammar_trigger_type

Kind = Literal["bool", "int", "long", "seed", "float"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request asks of its answers."""

    sampling: SamplingParams
    stream: bool = False
    include_usage: bool = False
    verbose: bool = False
    timings_per_token: bool = False
    cache_prompt: bool = True
    return_tokens: bool = False
    return_progress: bool = False
    sse_ping_interval: int = 30  # seconds
    n_predict: int = -1  # tokens; -1: no limit
    n_indent: int = 0  # characters
    n_keep: int = 0
    n_discard: int = 0
    n_cmpl: int = 1  # answers to each prompt
    n_cache_reuse: int = 0
    t_max_predict_ms: int = -1
    response_fields: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    preserved: frozenset[int] = frozenset()
    reasoning_format: str = "auto"
    generation_prompt: str = ""
    echo: bool = False
    id_slot: int = -1

    @property
    def n_max(self) -> int:
        """Most tokens to sample; -1: no limit. The first token comes with the prompt, and llama-server looks
        at the limit after it."""
        return max(self.n_predict, 1) if self.n_predict >= 0 else -1


@dataclass(frozen=True, slots=True)
class Field:
    """One number or switch."""

    name: str
    kind: Kind
    target: str = ""  # of Generation, or of SamplingParams; empty: `name`
    low: float = -math.inf
    high: float = math.inf
    is_hard: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def _hard(name: str, low: float, high: float = _INT_MAX, *aliases: str, kind: Kind = "int") -> Field:
    return Field(name, kind, low=low, high=high, is_hard=True, aliases=aliases)


def _real(name: str, target: str = "", low: float = -_FLOAT_MAX, high: float = _FLOAT_MAX) -> Field:
    return Field(name, "float", target, low, high)


FIELDS: Final = (
    Field("verbose", "bool"),
    Field("timings_per_token", "bool"),
    Field("stream", "bool"),
    Field("cache_prompt", "bool"),
    Field("return_tokens", "bool"),
    Field("return_progress", "bool"),
    _hard("sse_ping_interval", -1),
    _hard("n_predict", -1, _INT_MAX, "max_completion_tokens", "max_tokens"),
    _hard("n_indent", 0),
    _hard("n_keep", -1),
    _hard("n_discard", 0),
    _hard("n_cmpl", 1, _INT_MAX, "n"),
    _hard("n_cache_reuse", 0),
    _hard("t_max_predict_ms", -1, _INT64_MAX, kind="long"),
    Field("top_k", "int", low=0, high=_INT_MAX),
    _real("top_p", low=0, high=1),
    _real("min_p", low=0, high=1),
    _real("top_n_sigma"),
    _real("xtc_probability", low=0, high=1),
    _real("xtc_threshold", low=0, high=1),
    _real("typical_p"),
    _real("temperature", "temp", low=0),
    _real("dynatemp_range"),
    _real("dynatemp_exponent"),
    _hard("repeat_last_n", 0),
    _real("repeat_penalty"),
    _real("frequency_penalty"),
    _real("presence_penalty"),
    _real("dry_multiplier"),
    _real("dry_base"),
    _hard("dry_allowed_length", 0),
    _hard("dry_penalty_last_n", 0),
    Field("mirostat", "int", low=0, high=2),
    _real("mirostat_tau"),
    _real("mirostat_eta"),
    _real("adaptive_target", high=1),
    _hard("adaptive_decay", 0, float(np.float32(0.99)), kind="float"),
    Field("seed", "seed"),
    Field("n_probs", "int", aliases=("logprobs",)),
    _hard("min_keep", 0),
    Field("post_sampling_probs", "bool"),
    Field("echo", "bool"),
)
"""In the order in which they are looked at; what is not a number or a switch follows them."""

_OF_SAMPLING: Final = frozenset(field.name for field in fields(SamplingParams))


def read_generation(
    body: Mapping[str, Any],
    defaults: Generation,
    vocab: Vocab,
    *,
    n_parallel: int,
    is_chat: bool = False,
) -> Generation:
    """What `body` asks for. n_parallel: slots, which n cannot exceed.

    is_chat: grammar, stop strings and whatever else the chat template decides on are left as they are.
    Raises ApiError: 400, `Field 'name': why`.
    """
    values: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    for field in FIELDS:
        for name in field.names:
            if body.get(name) is not None:
                value = _number(field, name, body[name], n_parallel)
                target = field.target or field.name
                (chosen if target in _OF_SAMPLING else values)[target] = value
                break
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") is not None:
        values["include_usage"] = _boolean("include_usage", options["include_usage"])
    if chosen.get("dry_base", 1.0) < 1:
        del chosen["dry_base"]
    chosen["n_probs"] = max(chosen.get("n_probs", defaults.sampling.n_probs), 0)
    for name, read in _OTHERS:
        if body.get(name) is not None:
            with _named(name):
                read(body[name], values, chosen, vocab)
    if not is_chat:
        _constraints(body, values, chosen, vocab)
    try:
        return replace(defaults, sampling=replace(defaults.sampling, **chosen), **values)
    except InvalidOption as error:
        raise bad_request(f"Failed to initialize samplers: {error.name.lstrip('-')} {error.why}") from None


# -- numbers and switches


def _number(field: Field, name: str, value: Any, n_parallel: int) -> Any:
    if field.kind == "bool":
        return _boolean(name, value)
    if not isinstance(value, (int, float)):
        raise _wrong(name, "number", value)
    high = min(field.high, n_parallel) if field.name == "n_cmpl" else field.high
    number: float = float(np.float32(_clamped(value))) if field.kind == "float" else _whole(field, value)
    if field.name == "n_predict":  # as many as anybody could mean are no mistake
        number = min(number, _INT_MAX)
    if field.is_hard and not field.low <= number <= high:
        low, most, given = (_shown(field, limit) for limit in (field.low, high, number))
        raise bad_request(f"Field '{name}': Value must be between {low} <= value <= {most}, but got {given}")
    return (
        number if field.is_hard or field.kind == "seed" else type(number)(max(field.low, min(high, number)))
    )


def _clamped(value: float) -> float:
    return max(-_FLOAT_MAX, min(_FLOAT_MAX, float(value)))


def _whole(field: Field, value: float) -> int:
    number = int(value)
    if field.kind == "seed":
        return number % 2**32
    if field.is_hard:
        return number
    return max(-_INT_MAX - 1, min(_INT_MAX, number))


def _shown(field: Field, number: float) -> str:
    return f"{number:.6f}" if field.kind == "float" else str(int(number))


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "boolean", value)
    return value


def json_type(value: Any) -> str:
    """What nlohmann's JSON library, and so llama-server's messages, call the type of a value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    return "array" if isinstance(value, list) else "object"


def type_error(wanted: str, value: Any) -> str:
    """The message of that library."""
    return f"[json.exception.type_error.302] type must be {wanted}, but is {json_type(value)}"


def _wrong(name: str, wanted: str, value: Any) -> ApiError:
    return bad_request(f"Field '{name}': {type_error(wanted, value)}")


# -- all other fields


class _named:
    """Within: what is wrong is told with the name of the field."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _Wrong):
            raise bad_request(f"Field '{self._name}': {error}") from None


class _Wrong(Exception):
    pass


Values = dict[str, Any]
Read = Callable[[Any, Values, Values, Vocab], None]


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _Wrong(type_error("array", value))
    for item in value:
        if not isinstance(item, str):
            raise _Wrong(type_error("string", item))
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(type_error("string", value))
    return value


def _response_fields(value: Any, values: Values, _chosen: Values, _vocab: Vocab) -> None:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        values["response_fields"] = tuple(value)


def _lora(value: Any, _values: Values, _chosen: Values, _vocab: Vocab) -> None:
    if not isinstance(value, list):
        raise _Wrong("Error: 'lora' must be an array of objects with 'id' and 'scale' fields")


def _breakers(value: Any, _values: Values, chosen: Values, _vocab: Vocab) -> None:
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not is_list or not value:
        raise _Wrong("Error: dry_sequence_breakers must be a non-empty array of strings")
    chosen["dry_sequence_breakers"] = tuple(value)


def _reasoning_format(value: Any, values: Values, _chosen: Values, _vocab: Vocab) -> None:
    name = _text(value)
    if name not in REASONING_FORMATS:
        raise _Wrong(f"Unknown reasoning format: {name:.100}")
    values["reasoning_format"] = name


def _logit_bias(value: Any, _values: Values, chosen: Values, vocab: Vocab) -> None:
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = [(int(key) if _is_id(key) else key, bias) for key, bias in value.items()]
    elif isinstance(value, list):
        pairs = [(item[0], item[1]) for item in value if isinstance(item, list) and len(item) == 2]
    found: list[tuple[int, float]] = []
    for what, bias in pairs:
        if bias is False:
            number = -math.inf
        elif isinstance(bias, (int, float)) and not isinstance(bias, bool):
            number = _clamped(bias)
        else:
            continue
        if isinstance(what, str):
            found += [(token, number) for token in vocab.tokenize(what, parse_special=False).tolist()]
        elif isinstance(what, int) and not isinstance(what, bool) and 0 <= what < vocab.n_tokens:
            found.append((what, number))
    chosen["logit_bias"] = tuple(found)


def _is_id(key: str) -> bool:
    digits = key.strip().removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) < 12


def _ignore_eos(value: Any, _values: Values, chosen: Values, _vocab: Vocab) -> None:
    if not isinstance(value, bool):
        raise _Wrong(type_error("boolean", value))
    chosen["ignore_eos"] = value


def _stop(value: Any, values: Values, _chosen: Values, _vocab: Vocab) -> None:
    found = (value,) if isinstance(value, str) else _texts(value) if isinstance(value, list) else ()
    if found:
        values["stop"] = found


def _samplers(value: Any, _values: Values, chosen: Values, _vocab: Vocab) -> None:
    if isinstance(value, str):
        chosen["samplers"] = tuple(LETTERS[letter] for letter in value if letter in LETTERS)
    elif isinstance(value, list):
        names = [sampler_name(name) for name in _texts(value)]
        chosen["samplers"] = tuple(name for name in names if name is not None)


def _id_slot(value: Any, values: Values, _chosen: Values, _vocab: Vocab) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        values["id_slot"] = int(value)


_OTHERS: Final[tuple[tuple[str, Read], ...]] = (
    ("response_fields", _response_fields),
    ("lora", _lora),
    ("dry_sequence_breakers", _breakers),
    ("reasoning_format", _reasoning_format),
    ("logit_bias", _logit_bias),
    ("ignore_eos", _ignore_eos),
    ("stop", _stop),
    ("samplers", _samplers),
    ("id_slot", _id_slot),
)


# -- grammar and reasoning of a prompt without a template


def _constraints(body: Mapping[str, Any], values: Values, chosen: Values, vocab: Vocab) -> None:
    preserved = _preserved(body, vocab)
    values["preserved"] = preserved
    prefill = body.get("generation_prompt")
    values["generation_prompt"] = prefill if isinstance(prefill, str) else ""
    grammar = _grammar(body)
    if grammar:
        is_lazy = body.get("grammar_lazy") is True
        chosen["grammar"] = AnswerGrammar(
            grammar,
            lazy=is_lazy,
            triggers=_triggers(body, vocab, preserved, is_lazy=is_lazy),
            preserved_tokens=tuple(_preserved_texts(body)),
        )
    start, ends = body.get("reasoning_budget_start_tag"), _end_tags(body)
    budget = body.get("reasoning_budget_tokens", -1)
    if isinstance(budget, (int, float)) and budget < -1:
        raise bad_request(
            "Field 'reasoning_budget_tokens': Value must be between -1 <= value <= 2147483647, "
            f"but got {int(budget)}"
        )
    if isinstance(start, str) and start and ends and isinstance(budget, (int, float)) and budget >= 0:
        message = body.get("reasoning_budget_message")
        chosen["reasoning"] = ReasoningLimit(
            start, ends, int(budget), message if isinstance(message, str) else "",
            values["generation_prompt"],
        )  # fmt: skip


def _grammar(body: Mapping[str, Any]) -> str:
    schema, grammar = body.get("json_schema"), body.get("grammar")
    if schema is not None and "grammar" not in body:
        return schema_grammar(schema)
    return grammar if isinstance(grammar, str) else ""


def schema_grammar(schema: Any) -> str:
    """The grammar of what a JSON schema allows. Raises ApiError (400) for one that is none."""
    try:
        return json_schema_to_grammar({"type": "object"} if schema == {} else schema)
    except InvalidRequest as error:
        raise bad_request(f"Field 'json_schema': \"json_schema\": {error.why}") from None


def _preserved_texts(body: Mapping[str, Any]) -> list[str]:
    texts = body.get("preserved_tokens")
    if texts is None:
        return []
    with _named("preserved_tokens"):
        return list(_texts(texts))


def _preserved(body: Mapping[str, Any], vocab: Vocab) -> frozenset[int]:
    return single_tokens(vocab, _preserved_texts(body))


def _triggers(
    body: Mapping[str, Any], vocab: Vocab, preserved: frozenset[int], *, is_lazy: bool
) -> tuple[GrammarTrigger, ...]:
    found: list[GrammarTrigger] = []
    triggers = body.get("grammar_triggers")
    if triggers is not None and not isinstance(triggers, list):
        raise bad_request("Field 'grammar_triggers': must be a list")
    for item in triggers or []:
        kind = item.get("type") if isinstance(item, dict) else None
        if not isinstance(kind, int) or not 0 <= kind < len(TRIGGERS):
            raise bad_request("Field 'grammar_triggers': each needs a type from 0 to 3 and a value")
        word = str(item.get("value", ""))
        ids = vocab.tokenize(word) if TRIGGERS[kind] == "word" else np.empty(0, np.int32)
        if len(ids) == 1:
            if int(ids[0]) not in preserved:
                raise bad_request(
                    "Field 'grammar_triggers': Grammar trigger word should be marked as preserved token: "
                    + word
                )
            found.append(GrammarTrigger("token", word, int(ids[0])))
        else:
            token = item.get("token", -1)
            found.append(GrammarTrigger(TRIGGERS[kind], word, token if isinstance(token, int) else -1))
    if is_lazy and not found:
        raise bad_request("Field 'grammar_triggers': Error: no triggers set for lazy grammar!")
    return tuple(found)


def _end_tags(body: Mapping[str, Any]) -> tuple[str, ...]:
    tags = body.get("reasoning_budget_end_tags")
    if tags is None:
        tag = body.get("reasoning_budget_end_tag")
        tags = [tag] if isinstance(tag, str) else []
    with _named("reasoning_budget_end_tags"):
        return tuple(tag for tag in _texts(tags) if tag)
