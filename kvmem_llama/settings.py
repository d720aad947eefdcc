"""The one table of options: every name, type, unit, default, limit, help text, flag and environment name.

The fields of `Settings` are the table. The command line, the environment names (KVMEM_*) and
docs/options.md are generated from it; llama.cpp's options keep their names and meanings
(vendor/llama.cpp/common/arg.cpp). This is the only module that reads or sets the environment.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from .errors import InvalidOption
from .option import Option, Value
from .sampling_text import logit_bias_of, samplers_of, samplers_of_letters

__all__ = ["BY_NAME", "OPTIONS", "Option", "Settings", "environment", "wait_politely"]

T = TypeVar("T", int, float, bool, str)

_KEY: Final = "option"
_SPIN_COUNT: Final = "1000"  # turns; as fast as GNU's 300,000 on two idle cores


def _option(section: str, default: T, help: str, *flags: str, unit: str = "", **limits: Any) -> T:
    """A field of Settings that is a row of the table; without `flags` it gets one made from its name."""
    row: T = field(
        default=default, metadata={_KEY: dict(section=section, help=help, flags=flags, unit=unit, **limits)}
    )
    return row


_MODEL: Final = "Model and context (llama.cpp's names)"
_MEMORY: Final = "Memory"
_STORE: Final = "Store of durable workspaces"
_SAMPLE: Final = "Sampling (llama.cpp's names)"
_RESEARCH: Final = "Measuring and research"
_PROGRAM: Final = "Program"

_CACHE_TYPES: Final = ("f16", "q8_0", "q4_0")


@dataclass(frozen=True, slots=True)
class Settings:
    """All options of one engine. Checked when made (also by dataclasses.replace): raises InvalidOption."""

    # fmt: off
    model: str = _option(
        _MODEL, "", "path of a GGUF file, a name that `kvmem model ls` shows, or owner/name on the hub; "
        "empty: what `kvmem model default` has set, or the built-in model", "-m", "--model", unit="path")
    system_prompt: str = _option(
        _MODEL, "", "system prompt of the conversation", "-sys", "--system-prompt", unit="text")
    chat_template: str = _option(
        _MODEL, "", "chat template (jinja) in place of the model's own; or chatml, or with --no-jinja a name "
        "that llama.cpp knows", "--chat-template", unit="text")
    chat_template_file: str = _option(
        _MODEL, "", "file with the chat template", "--chat-template-file", unit="path")
    jinja: bool = _option(
        _MODEL, True, "render the chat template; off: llama.cpp's own code for its format makes the prompts, "
        "which hold no tools then", "--jinja")
    n_ctx: int = _option(
        _MODEL, 0, "size of the execution view of one sequence; 0: the window the model was trained with, "
        "or as much of it as fits the memory",
        "-c", "--ctx-size", unit="tokens", low=0, high=2**31 - 1)
    n_ubatch: int = _option(
        _MODEL, 128, "tokens evaluated at once; cancel is checked between these; 0: chosen for this machine",
        "-ub", "--ubatch-size", unit="tokens", low=0, high=65536)
    n_threads: int = _option(
        _MODEL, 0, "threads while generating; 0: one per physical core",
        "-t", "--threads", unit="threads", low=0, high=512, words={"-1": 0})
    n_threads_batch: int = _option(
        _MODEL, 0, "threads while reading; 0: as while generating",
        "-tb", "--threads-batch", unit="threads", low=0, high=512, words={"-1": 0})
    n_gpu_layers: int = _option(
        _MODEL, 0, "layers kept on the GPU; auto: as many as fit", "-ngl", "--gpu-layers", "--n-gpu-layers",
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
        choices=("kvmem", "full_context", "sliding_window", "compaction", "compaction_retrieval"))
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
    query_long: str = _option(
        _MEMORY, "ends", "what of a step with more text than --n-query is scored: the newest text of a user "
        "with both ends of the rest, or the newest tokens", choices=("ends", "newest"))
    query_ends: int = _option(
        _MEMORY, 64, "tokens that --query-long ends takes of each end", unit="tokens", low=1)
    query_user: int = _option(
        _MEMORY, 128, "tokens that are scored of a user's text before a long result of a tool, or before "
        "a step without any; 0: none", unit="tokens", low=0)
    n_query_tail: int = _option(
        _MEMORY, 64, "newest tokens of the answer that are scored when memory is recalled in mid-answer",
        unit="tokens", low=1)
    n_prefill_view: int = _option(
        _MEMORY, 0, "size of the view while reading; 0: as -c", unit="tokens", low=0)
    score: str = _option(
        _MEMORY, "fused", "how blocks are found: by their mean key, by calibrated attention heads, by words "
        "(BM25), or by words and heads (words and mean key where a model is not calibrated)",
        choices=("mean_k", "heads", "lexical", "fused"))
    calibration: str = _option(
        _MEMORY, "", "file that `kvmem calibrate` wrote for this model; empty: the one found for it, if any; "
        "none: as if there were none", unit="path")
    position_mode: str = _option(
        _MEMORY, "auto", "positions of recalled blocks: packed, as they were, or as they were while it fits",
        choices=("auto", "compact", "original"))
    scan_limit: int = _option(
        _MEMORY, 32768, "most blocks whose every token is scored for every token of a query; of a longer "
        "history a coarser score chooses them; 0: no limit", unit="blocks", low=0)
    stickiness: float = _option(
        _MEMORY, 0.0, "share of its score that a block selected by the last recall gets on top; above 0 what "
        "is recalled depends on earlier questions", low=0, high=1)
    refresh: int = _option(
        _MEMORY, 0, "recalled tokens that are evaluated anew in the view, the best blocks first, in place of "
        "their stored KV; 0: none", unit="tokens", low=0)
    reuse: str = _option(
        _MEMORY, "spans", "what an edited history keeps: its unchanged beginning, or also equal spans after "
        "it (of 64 tokens or more, with the K and V they have)", choices=("spans", "prefix"))
    raw_k_type: str = _option(
        _MEMORY, "f16",
        "storage type of the K of blocks outside the cells; bf16 and q8_0 on disk only, in RAM these are f16",
        choices=("f16", "f32", "bf16", "q8_0"))

    data_dir: str = _option(
        _STORE, "", "folder of durable workspaces; empty: $XDG_DATA_HOME/kvmem/workspaces or "
        "~/.local/share/kvmem/workspaces", unit="path")
    host_budget: int = _option(
        _STORE, 0, "RAM for records of blocks, by all workspaces together; 0: a quarter of the RAM, or "
        "what is free",
        unit="bytes", low=0)
    disk_budget: int = _option(
        _STORE, 0, "disk space for records of one workspace; what is recalled least falls to its tokens; "
        "0: no limit", unit="bytes", low=0)
    durability: str = _option(
        _STORE, "full", "what an acknowledged step survives: a power cut, or only the end of the program",
        choices=("full", "relaxed"))
    segment_records: int = _option(
        _STORE, 64, "records per segment file", unit="records", low=1, high=65536)
    commit_blocks: int = _option(
        _STORE, 128, "a long read is made durable every so many blocks", unit="blocks", low=1)

    temp: float = _option(
        _SAMPLE, 0.8, "temperature; 0: always the likeliest token", "--temp", "--temperature")
    top_k: int = _option(_SAMPLE, 40, "keep the k likeliest tokens; 0: all", "--top-k", unit="tokens", low=0)
    top_p: float = _option(
        _SAMPLE, 0.95, "keep tokens up to this total probability", "--top-p", low=0, high=1)
    min_p: float = _option(
        _SAMPLE, 0.05, "least probability of a token, relative to the likeliest", "--min-p", low=0, high=1)
    seed: int = _option(
        _SAMPLE, -1, "seed of the sampler; -1: random", "-s", "--seed", low=-1, high=2**32 - 1)
    typical_p: float = _option(
        _SAMPLE, 1.0, "keep tokens about as likely as one expects, up to this total probability; 1: all",
        "--typical", "--typical-p")
    top_n_sigma: float = _option(
        _SAMPLE, -1.0, "keep tokens whose logit is within this many standard deviations of the highest; "
        "0 or less: all", "--top-nsigma", "--top-n-sigma")
    xtc_probability: float = _option(
        _SAMPLE, 0.0, "how often the likeliest tokens are left out (XTC); 0: never", "--xtc-probability",
        low=0, high=1)
    xtc_threshold: float = _option(
        _SAMPLE, 0.1, "least probability of a token that XTC may leave out; above 0.5: none",
        "--xtc-threshold", low=0, high=1)
    dynatemp_range: float = _option(
        _SAMPLE, 0.0, "the temperature follows how sure the model is, by at most this much; 0: off",
        "--dynatemp-range")
    dynatemp_exponent: float = _option(
        _SAMPLE, 1.0, "how it follows: exponent of the normalised entropy", "--dynatemp-exp")
    repeat_penalty: float = _option(
        _SAMPLE, 1.0, "penalty of repeated tokens; 1: none", "--repeat-penalty", low=0)
    repeat_last_n: int = _option(
        _SAMPLE, 64, "tokens looked at for the penalties; 0: none, -1: the view",
        "--repeat-last-n", unit="tokens", low=-1)
    presence_penalty: float = _option(
        _SAMPLE, 0.0, "taken off the logit of tokens that were there before; 0: none", "--presence-penalty")
    frequency_penalty: float = _option(
        _SAMPLE, 0.0, "taken off the logit of a token for each time it was there before; 0: none",
        "--frequency-penalty")
    dry_multiplier: float = _option(
        _SAMPLE, 0.0, "penalty of tokens that go on with a repeated sequence (DRY); 0: none",
        "--dry-multiplier")
    dry_base: float = _option(
        _SAMPLE, 1.75, "it grows by this factor with each token of the sequence", "--dry-base", low=1)
    dry_allowed_length: int = _option(
        _SAMPLE, 2, "longest repeated sequence that is not penalised", "--dry-allowed-length",
        unit="tokens", low=0)
    dry_penalty_last_n: int = _option(
        _SAMPLE, 64, "tokens looked at for repeated sequences; 0: none, -1: the view",
        "--dry-penalty-last-n", unit="tokens", low=-1)
    dry_sequence_breakers: str = _option(
        _SAMPLE, '\\n;:;";*', "texts that end a repeated sequence, between semicolons (\\x3b is one); may "
        "be repeated; none: no such texts", "--dry-sequence-breaker", unit="text", separator=";")
    adaptive_target: float = _option(
        _SAMPLE, -1.0, "probability near which the sampler adaptive_p chooses tokens; below 0: off",
        "--adaptive-target", high=1)
    adaptive_decay: float = _option(
        _SAMPLE, 0.9, "how slowly adaptive_p forgets what it has chosen", "--adaptive-decay",
        low=0, high=0.99)
    mirostat: int = _option(
        _SAMPLE, 0, "version of Mirostat, which takes the place of the other samplers; 0: off", "--mirostat",
        low=0, high=2)
    mirostat_eta: float = _option(
        _SAMPLE, 0.1, "learning rate of Mirostat", "--mirostat-lr")
    mirostat_tau: float = _option(
        _SAMPLE, 5.0, "surprise that Mirostat aims at", "--mirostat-ent", unit="bits")
    logit_bias: str = _option(
        _SAMPLE, "", "added to the logits of tokens: 15043+1, or 15043-inf (never); commas between them; "
        "may be repeated", "-l", "--logit-bias", unit="token+bias", separator=",")
    ignore_eos: bool = _option(
        _SAMPLE, False, "no token that ends the answer is chosen", "--ignore-eos")
    samplers: str = _option(
        _SAMPLE, "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature",
        "samplers that are used, in this order; adaptive_p and infill are others", "--samplers",
        unit="names")
    sampler_seq: str = _option(
        _SAMPLE, "", "the same in letters, such as edskypmxt; i is infill, a adaptive_p; empty: --samplers",
        "--sampler-seq", "--sampling-seq", unit="letters")
    grammar: str = _option(
        _SAMPLE, "", "grammar (GBNF) that answers follow", "--grammar", unit="text")
    grammar_file: str = _option(
        _SAMPLE, "", "file with the grammar that answers follow", "--grammar-file", unit="path")
    json_schema: str = _option(
        _SAMPLE, "", "JSON schema that answers follow; {}: any JSON object",
        "-j", "--json-schema", unit="text")
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
        _RESEARCH, "cpu", "what computes Mean-K scores: native loops or the NumPy oracle",
        choices=("cpu", "reference"))
    slack: float = _option(
        _RESEARCH, 0.12, "blocks that left the view but stay in cells, as a share of the view", low=0, high=1)
    max_moves: int = _option(
        _RESEARCH, 8, "in-place moves of a block before it is rebuilt", unit="moves", low=0)
    compact_ratio: float = _option(
        _RESEARCH, 1.25, "cells are compacted when the highest used one exceeds this many times their count",
        low=1)
    exact: bool = _option(
        _RESEARCH, False, "results independent of cell order and, with quantised weights, of batch shapes "
        "and neighbours (reference CPU operators); F16 and F32 weights still differ in the last bits")
    reuse_resident: bool = _option(_RESEARCH, True, "keep blocks that are still in cells")
    packing: bool = _option(_RESEARCH, True, "write incoming blocks in one packed transfer")
    replay_shortcut: bool = _option(_RESEARCH, True, "skip the replay when the view does not change")
    stage_out: bool = _option(
        _RESEARCH, True, "write blocks to disk while the next tokens are computed; off: when a step commits")

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
        samplers_of(self.samplers)
        samplers_of_letters(self.sampler_seq)
        logit_bias_of(self.logit_bias)

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
        _refuse_unknown(given)
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
        if not values.get("data_dir") and environ.get("XDG_DATA_HOME"):
            values["data_dir"] = str(Path(environ["XDG_DATA_HOME"]) / "kvmem" / "workspaces")
        return cls(**values)

    def with_options(self, options: Mapping[str, Value]) -> Settings:
        """These settings with other values of some options, by name. Raises InvalidOption, also for one that
        does not exist."""
        _refuse_unknown(options)
        return dataclasses.replace(self, **cast("dict[str, Any]", options))

    @property
    def cache_path(self) -> Path:
        """Folder of unpacked models."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else Path.home() / ".cache" / "kvmem"

    @property
    def data_path(self) -> Path:
        """Folder of durable workspaces."""
        if self.data_dir:
            return Path(self.data_dir).expanduser()
        return Path.home() / ".local" / "share" / "kvmem" / "workspaces"

    @property
    def calibration_path(self) -> Path:
        """Folder of calibrations, one for each model: beside the workspaces."""
        return self.data_path.parent / "calibrations"


def environment() -> Mapping[str, str]:
    """The environment of the process; an empty variable counts as not set."""
    return os.environ


def wait_politely() -> None:
    """Lets threads that wait for each other spin for some microseconds, then sleep. GNU's OpenMP, which reads
    this when it is loaded, spins for a millisecond: most of the time, where a core has other work, too."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def _refuse_unknown(given: Mapping[str, object]) -> None:
    for name in given.keys() - BY_NAME.keys():
        raise InvalidOption(name, given[name], "there is no such option")


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
