"""The one table of options: every name, type, unit, default, limit, help text, flag and environment name.

The fields of `Settings` are the table. The command line, the environment names (KVMEM_*) and
docs/options.md are generated from it; llama.cpp's options keep their names and meanings
(vendor/llama.cpp/common/arg.cpp). This is the only module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from .errors import InvalidOption

Value = int | float | bool | str
T = TypeVar("T", int, float, bool, str)

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_KEY: Final = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. `flags` are those of the command line, the first one is the one messages use."""

    name: str
    type: type
    unit: str
    default: Value
    help: str
    section: str
    flags: tuple[str, ...]
    choices: tuple[str, ...] = ()
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)  # words accepted in place of a number
    low: float = -math.inf
    high: float = math.inf

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return "KVMEM_" + self.name.upper()

    def parse(self, text: str, where: str = "") -> Value:
        """Value written as `text` in an environment variable or on a command line; raises InvalidOption."""
        where = where or self.flags[0]
        text = text.strip() if self.type is not str else text
        try:
            if self.type is bool:
                if text.lower() in _TRUE | _FALSE:
                    return text.lower() in _TRUE
                raise InvalidOption(where, text, "must be 1 or 0 (true/false, yes/no, on/off)")
            if self.type is int:
                return self.words[text] if text in self.words else int(text, 10)
            return float(text) if self.type is float else text
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            raise InvalidOption(where, text, f"must be {kind}{self._or_words()}") from None

    def check(self, value: object) -> None:
        """Raises InvalidOption if `value` has the wrong type or lies outside the limits."""
        flag = self.flags[0]
        if self.type is float:
            good = isinstance(value, (int, float)) and not isinstance(value, bool)
        else:
            good = type(value) is self.type
        if not good:
            raise InvalidOption(flag, value, f"must be of type {self.type.__name__}")
        if self.choices and value not in self.choices:
            raise InvalidOption(flag, value, "must be one of " + ", ".join(self.choices))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise InvalidOption(flag, value, "must be a finite number")
            if not self.low <= value <= self.high:
                raise InvalidOption(flag, value, f"must be {self.limits}{self._or_words()}")

    @property
    def limits(self) -> str:
        """The allowed range in words; empty if there is none."""
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        if math.isinf(self.low):
            return f"at most {self.high:.10g}"
        return f"from {self.low:g} to {self.high:.10g}"

    def _or_words(self) -> str:
        return f" or {', '.join(self.words)}" if self.words else ""


def _option(section: str, default: T, help: str, *flags: str, unit: str = "", **limits: Any) -> T:
    """A field of Settings that is a row of the table; without `flags` it gets one made from its name."""
    row: T = field(
        default=default, metadata={_KEY: dict(section=section, help=help, flags=flags, unit=unit, **limits)}
    )
    return row


_MODEL: Final = "Model and context (llama.cpp's names)"
_MEMORY: Final = "Memory"
_SAMPLE: Final = "Sampling (llama.cpp's names)"
_RESEARCH: Final = "Measuring and research"
_PROGRAM: Final = "Program"

_CACHE_TYPES: Final = ("f16", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Settings:
    """All options of one engine. Checked when made (also by dataclasses.replace): raises InvalidOption."""

    # fmt: off
    model: str = _option(
        _MODEL, "", "path of a GGUF file; empty: the built-in model", "-m", "--model", unit="path")
    system_prompt: str = _option(
        _MODEL, "", "system prompt of the conversation", "-sys", "--system-prompt", unit="text")
    n_ctx: int = _option(
        _MODEL, 0, "size of the execution view of one sequence; 0: the window the model was trained with",
        "-c", "--ctx-size", unit="tokens", low=0, high=2**31 - 1)
    n_ubatch: int = _option(
        _MODEL, 128, "tokens evaluated at once; cancel is checked between these",
        "-ub", "--ubatch-size", unit="tokens", low=1, high=65536)
    n_threads: int = _option(
        _MODEL, 0, "threads while generating; 0: one per physical core",
        "-t", "--threads", unit="threads", low=0, high=512, words={"-1": 0})
    n_threads_batch: int = _option(
        _MODEL, 0, "threads while reading; 0: as while generating",
        "-tb", "--threads-batch", unit="threads", low=0, high=512, words={"-1": 0})
    n_gpu_layers: int = _option(
        _MODEL, 0, "layers kept on the GPU", "-ngl", "--gpu-layers", "--n-gpu-layers",
        unit="layers", low=-2, high=65536, words={"auto": -1, "all": -2})
    cache_type_k: str = _option(
        _MODEL, "f16", "storage type of K in the cells", "-ctk", "--cache-type-k", choices=_CACHE_TYPES)
    cache_type_v: str = _option(
        _MODEL, "f16", "storage type of V in the cells", "-ctv", "--cache-type-v", choices=_CACHE_TYPES)
    n_parallel: int = _option(
        _MODEL, 1, "sequences (workspaces active at once)",
        "-np", "--parallel", unit="sequences", low=1, high=256)
    use_mmap: bool = _option(_MODEL, True, "map the model file into memory", "--mmap")
    rope_freq_base: float = _option(
        _MODEL, 0.0, "RoPE base frequency; 0: the model's", "--rope-freq-base", low=0)
    rope_freq_scale: float = _option(
        _MODEL, 0.0, "RoPE frequency scale; 0: the model's", "--rope-freq-scale", low=0)

    policy: str = _option(
        _MEMORY, "kvmem", "what the model attends to when the history outgrows the view",
        choices=("kvmem", "full_context", "sliding_window"))
    block_size: int = _option(
        _MEMORY, 32, "tokens of a block, the unit of scoring, selection and movement",
        unit="tokens", low=1, high=4096)
    n_sink: int = _option(
        _MEMORY, -1, "first tokens of the history, always in the view; whole blocks; -1: one block",
        unit="tokens", low=-1)
    n_recent: int = _option(
        _MEMORY, -1, "newest tokens, always in the view; -1: a quarter of the view", unit="tokens", low=-1)
    n_reserve: int = _option(
        _MEMORY, -1, "room kept for the answer between two recalls; -1: an eighth of the view",
        unit="tokens", low=-1)
    n_query: int = _option(
        _MEMORY, 512, "newest tokens of a step that are scored and replayed", unit="tokens", low=1)
    n_query_tail: int = _option(
        _MEMORY, 64, "newest tokens of the answer that are scored when memory is recalled in mid-answer",
        unit="tokens", low=1)
    n_prefill_view: int = _option(
        _MEMORY, 0, "size of the view while reading; 0: as -c", unit="tokens", low=0)
    position_mode: str = _option(
        _MEMORY, "auto", "positions of recalled blocks: packed, as they were, or as they were while it fits",
        choices=("auto", "compact", "original"))
    raw_k_type: str = _option(
        _MEMORY, "f16", "storage type of the K of blocks outside the cells", choices=("f16", "f32"))

    temp: float = _option(
        _SAMPLE, 0.8, "temperature; 0: always the likeliest token", "--temp", "--temperature")
    top_k: int = _option(_SAMPLE, 40, "keep the k likeliest tokens; 0: all", "--top-k", unit="tokens", low=0)
    top_p: float = _option(
        _SAMPLE, 0.95, "keep tokens up to this total probability", "--top-p", low=0, high=1)
    min_p: float = _option(
        _SAMPLE, 0.05, "least probability of a token, relative to the likeliest", "--min-p", low=0, high=1)
    seed: int = _option(
        _SAMPLE, -1, "seed of the sampler; -1: random", "-s", "--seed", low=-1, high=2**32 - 1)
    repeat_penalty: float = _option(
        _SAMPLE, 1.0, "penalty of repeated tokens; 1: none", "--repeat-penalty", low=0)
    repeat_last_n: int = _option(
        _SAMPLE, 64, "tokens looked at for the penalty; 0: none, -1: the view",
        "--repeat-last-n", unit="tokens", low=-1)
    n_predict: int = _option(
        _SAMPLE, -1, "most tokens of an answer; -1: no limit", "-n", "--predict", "--n-predict",
        unit="tokens", low=-1)

    layers_scored: str = _option(
        _RESEARCH, "all", "layers whose keys are scored: all, or numbers such as 3,7,11")
    query_tokens: str = _option(
        _RESEARCH, "text", "which tokens of a step are its query", choices=("text", "all"))
    first_pass: str = _option(
        _RESEARCH, "canonical", "view of a query's first pass: a function of history, or the last step's",
        choices=("canonical", "current"))
    scorer: str = _option(
        _RESEARCH, "cpu", "what scores blocks: native loops or the NumPy oracle",
        choices=("cpu", "reference"))
    slack: float = _option(
        _RESEARCH, 0.12, "blocks that left the view but stay in cells, as a share of the view", low=0, high=1)
    max_moves: int = _option(
        _RESEARCH, 8, "in-place moves of a block before it is rebuilt", unit="moves", low=0)
    compact_ratio: float = _option(
        _RESEARCH, 1.25, "cells are compacted when the highest used one exceeds this many times their count",
        low=1)
    exact: bool = _option(
        _RESEARCH, False, "results independent of batch shapes and cell order (reference CPU operators)")
    reuse_resident: bool = _option(_RESEARCH, True, "keep blocks that are still in cells")
    packing: bool = _option(_RESEARCH, True, "write incoming blocks in one packed transfer")
    replay_shortcut: bool = _option(_RESEARCH, True, "skip the replay when the view does not change")

    cache_dir: str = _option(
        _PROGRAM, "", "folder of unpacked models; empty: $XDG_CACHE_HOME/kvmem or ~/.cache/kvmem",
        unit="path")
    verbose: bool = _option(
        _PROGRAM, False, "show llama.cpp's messages and tracebacks", "-v", "--verbose")
    # fmt: on

    def __post_init__(self) -> None:
        for option in OPTIONS:
            option.check(getattr(self, option.name))
        if self.n_sink == -1:
            object.__setattr__(self, "n_sink", self.block_size)
        if self.n_sink % self.block_size:
            raise InvalidOption(
                "--n-sink", self.n_sink, f"must be whole blocks of {self.block_size} tokens",
                hint="Use a multiple of --block-size, or -1 for one block.",
            )  # fmt: skip
        self.scored_layers()

    def scored_layers(self) -> tuple[int, ...] | None:
        """Numbers of the scored layers, ascending; None stands for all. Raises InvalidOption."""
        if self.layers_scored == "all":
            return None
        parts = [part.strip() for part in self.layers_scored.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise InvalidOption(
                "--layers-scored", self.layers_scored, "must be all, or numbers such as 3,7,11"
            )
        return tuple(sorted({int(part) for part in parts}))

    @classmethod
    def from_sources(
        cls, cli: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None
    ) -> Settings:
        """Settings from the command line, else the environment, else the table's defaults.

        cli: values by option name; None stands for "not given"; text is parsed.
        env: by default the environment of the process; an empty variable counts as not set.
        Raises InvalidOption, naming the flag or the variable.
        """
        given = {name: value for name, value in (cli or {}).items() if value is not None}
        for name in given.keys() - BY_NAME.keys():
            raise InvalidOption(name, given[name], "there is no such option")
        environ = os.environ if env is None else env
        values: dict[str, Any] = {}
        for option in OPTIONS:
            if option.name in given:
                value = given[option.name]
                values[option.name] = option.parse(value) if isinstance(value, str) else value
            elif environ.get(option.env):
                values[option.name] = option.parse(environ[option.env], where=option.env)
                _check_from_env(option, values[option.name])
        if not values.get("cache_dir") and environ.get("XDG_CACHE_HOME"):
            values["cache_dir"] = str(Path(environ["XDG_CACHE_HOME"]) / "kvmem")
        return cls(**values)

    @property
    def cache_path(self) -> Path:
        """Folder of unpacked models."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else Path.home() / ".cache" / "kvmem"


def _check_from_env(option: Option, value: Value) -> None:
    try:
        option.check(value)
    except InvalidOption as error:
        raise InvalidOption(option.env, value, error.why) from None


def _table() -> tuple[Option, ...]:
    rows = []
    for f in dataclasses.fields(Settings):
        row = dict(f.metadata[_KEY])
        row["flags"] = row["flags"] or ("--" + f.name.replace("_", "-"),)
        default: Value = cast(Value, f.default)
        rows.append(Option(name=f.name, type=type(default), default=default, **row))
    return tuple(rows)


OPTIONS: Final[tuple[Option, ...]] = _table()
BY_NAME: Final[Mapping[str, Option]] = {option.name: option for option in OPTIONS}
