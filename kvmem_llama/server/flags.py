"""llama-server's flags and LLAMA_ARG_* names for what is supported, beside the table of options.

Two tables: `Settings` (kvmem_llama/settings.py) has the options of the engine, `ServerOptions` those of the
server. Names and meanings are llama.cpp's (vendor/llama.cpp/common/arg.cpp) where it has them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from ..errors import InputError, InvalidOption
from ..settings import BY_NAME, OPTIONS, Option, Settings, environment
from .ignored_flags import ignored, names_model

T = TypeVar("T", int, float, bool, str)

_KEY: Final = "option"
SERVER: Final = "Server (llama-server's names)"
CHAT: Final = "Chat (llama-server's names)"
LOG: Final = "Log (llama-server's names)"
OWN: Final = "Server (kvmem_llama's own)"


def _option(
    section: str,
    default: T,
    help: str,
    *flags: str,
    unit: str = "",
    env: str = "",
    off: str = "",
    **limits: Any,
) -> T:
    """A field of ServerOptions that is a row of its table. env: its name in llama.cpp; off: flags that switch
    it off, beside the one made from the last flag."""
    row: T = field(
        default=default,
        metadata={
            _KEY: dict(section=section, help=help, flags=flags, unit=unit, **limits), "env": env, "off": off
        },
    )  # fmt: skip
    return row


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """All options of the server. Checked when made: raises InvalidOption."""

    # fmt: off
    host: str = _option(
        SERVER, "127.0.0.1", "addresses to listen on, separated by commas; all but loopback need a key",
        "--host", unit="addresses", env="LLAMA_ARG_HOST")
    port: int = _option(
        SERVER, 8080, "port to listen on; 0: one that is free", "--port",
        unit="port", env="LLAMA_ARG_PORT", low=0, high=65535)
    alias: str = _option(
        SERVER, "", "names of the model for clients, separated by commas; empty: that of its file",
        "-a", "--alias", unit="names", env="LLAMA_ARG_ALIAS")
    tags: str = _option(
        SERVER, "", "tags of the model, separated by commas, shown by /v1/models", "--tags",
        unit="names", env="LLAMA_ARG_TAGS")
    api_key: str = _option(
        SERVER, "", "API keys that clients need, separated by commas; empty: none", "--api-key",
        unit="keys", env="LLAMA_API_KEY", separator=",")
    api_key_file: str = _option(
        SERVER, "", "file with API keys, one on a line; lines that begin with # are comments",
        "--api-key-file", unit="path", env="LLAMA_ARG_API_KEY_FILE")
    slot_save_path: str = _option(
        SERVER, "", "folder of saved slots; empty: slots cannot be saved", "--slot-save-path", unit="path")
    metrics: bool = _option(
        SERVER, False, "answer /metrics", "--metrics", env="LLAMA_ARG_ENDPOINT_METRICS")
    slots: bool = _option(SERVER, True, "answer GET /slots", "--slots", env="LLAMA_ARG_ENDPOINT_SLOTS")
    props: bool = _option(SERVER, False, "answer POST /props", "--props", env="LLAMA_ARG_ENDPOINT_PROPS")
    ui: bool = _option(
        SERVER, True, "the page at /", "--ui", env="LLAMA_ARG_UI", off="--no-webui")
    timeout: int = _option(
        SERVER, 3600, "longest wait of a request for its slot", "-to", "--timeout", unit="seconds",
        env="LLAMA_ARG_TIMEOUT", low=1)
    sse_ping_interval: int = _option(
        SERVER, 30, "a stream without news gets a ping every so often; 0 or less: never",
        "--sse-ping-interval", unit="seconds", env="LLAMA_ARG_SSE_PING_INTERVAL", low=-1)
    cors_origins: str = _option(
        SERVER, "", "origins whose pages may use the server: `localhost`, `*`, or a list with commas; "
        "empty: none", "--cors-origins", unit="origins", env="LLAMA_ARG_CORS_ORIGINS")
    cors_methods: str = _option(
        SERVER, "GET, POST, DELETE, OPTIONS", "methods that these may use", "--cors-methods", unit="methods",
        env="LLAMA_ARG_CORS_METHODS")
    cors_headers: str = _option(
        SERVER, "*", "headers that these may send", "--cors-headers", unit="headers",
        env="LLAMA_ARG_CORS_HEADERS")
    cors_credentials: bool = _option(
        SERVER, False, "whether these may send credentials", "--cors-credentials",
        env="LLAMA_ARG_CORS_CREDENTIALS")
    api_prefix: str = _option(
        SERVER, "", "path that every route begins with, without the last slash", "--api-prefix",
        unit="path", env="LLAMA_ARG_API_PREFIX")
    kv_unified: bool = _option(
        SERVER, False, "every slot has a view of all of -c; off: with -np, the slots share -c in equal parts",
        "-kvu", "--kv-unified", env="LLAMA_ARG_KV_UNIFIED")
    cache_prompt: bool = _option(
        SERVER, True, "what is stored of a prompt is not read again", "--cache-prompt",
        env="LLAMA_ARG_CACHE_PROMPT")

    chat_template_kwargs: str = _option(
        CHAT, "", "variables of the chat template, a JSON object", "--chat-template-kwargs", unit="json",
        env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS")
    reasoning_format: str = _option(
        CHAT, "auto", "where the reasoning of an answer goes", "--reasoning-format",
        env="LLAMA_ARG_THINK", choices=("auto", "none", "deepseek", "deepseek-legacy"))
    reasoning: str = _option(
        CHAT, "auto", "whether models that can reason do so", "-rea", "--reasoning",
        env="LLAMA_ARG_REASONING", choices=("on", "off", "auto"))
    reasoning_budget: int = _option(
        CHAT, -1, "most tokens of reasoning; -1: no limit, 0: none", "--reasoning-budget", unit="tokens",
        env="LLAMA_ARG_THINK_BUDGET", low=-1)
    reasoning_budget_message: str = _option(
        CHAT, "", "text that ends a reasoning at its limit", "--reasoning-budget-message", unit="text",
        env="LLAMA_ARG_THINK_BUDGET_MESSAGE")
    skip_chat_parsing: bool = _option(
        CHAT, False, "answers are content as they are, without reasoning or tool calls in parts of their own",
        "--skip-chat-parsing", env="LLAMA_ARG_SKIP_CHAT_PARSING")
    prefill_assistant: bool = _option(
        CHAT, True, "an assistant message at the end is continued", "--prefill-assistant",
        env="LLAMA_ARG_PREFILL_ASSISTANT")

    log_disable: bool = _option(LOG, False, "no request log", "--log-disable")
    log_file: str = _option(
        LOG, "", "file that the log is added to", "--log-file", unit="path", env="LLAMA_ARG_LOG_FILE")
    log_timestamps: bool = _option(
        LOG, True, "times in the log", "--log-timestamps", env="LLAMA_ARG_LOG_TIMESTAMPS")

    log_prompts: bool = _option(
        OWN, False, "the log holds the bodies of requests; off: not a word of them", "--log-prompts")
    max_body: int = _option(
        OWN, 64 << 20, "largest body of a request", "--max-body", unit="bytes", low=1024)
    max_json_depth: int = _option(
        OWN, 64, "deepest nesting of a request's JSON", "--max-json-depth", unit="levels", low=2, high=400)
    max_messages: int = _option(
        OWN, 10000, "most messages of a request", "--max-messages", unit="messages", low=1)
    max_queue: int = _option(
        OWN, 256, "most requests that wait for a slot; more are answered with 503", "--max-queue",
        unit="requests", low=0)
    auto_budget: int = _option(
        OWN, 32 << 30, "disk space of the histories that no client has named; those used longest ago are "
        "deleted; 0: no limit", "--auto-budget", unit="bytes", low=0)
    grace: int = _option(
        OWN, 30, "at the end, how long answers that run are given to be stopped and committed", "--grace",
        unit="seconds", low=0)
    # fmt: on

    def __post_init__(self) -> None:
        for option in SERVER_OPTIONS:
            option.check(getattr(self, option.name))
        prefix = self.api_prefix
        if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
            raise InvalidOption("--api-prefix", prefix, "must begin with a slash, and not end with one")

    @property
    def hosts(self) -> tuple[str, ...]:
        return _listed(self.host)

    @property
    def aliases(self) -> tuple[str, ...]:
        """By the alphabet; the first is what the model is called in answers."""
        return tuple(sorted(set(_listed(self.alias))))

    @property
    def tag_list(self) -> tuple[str, ...]:
        return tuple(sorted(set(_listed(self.tags))))

    def api_keys(self) -> tuple[str, ...]:
        """All keys, those of the file included. Raises InputError if it cannot be read."""
        keys = list(_listed(self.api_key))
        if self.api_key_file:
            try:
                lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or str(error)
                raise InputError(f"--api-key-file {self.api_key_file!r}", why) from None
            keys += [line for line in lines if line.strip() and not line.startswith("#")]
        return tuple(dict.fromkeys(keys))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _table() -> tuple[Option, ...]:
    rows = []
    for f in dataclasses.fields(ServerOptions):
        row = dict(f.metadata[_KEY])
        default = cast("int | bool | str", f.default)
        rows.append(Option(name=f.name, type=type(default), default=default, **row))
    return tuple(rows)


SERVER_OPTIONS: Final = _table()
_SERVER_NAMES: Final = {option.name: option for option in SERVER_OPTIONS}
_OFF: Final = {f.metadata["off"]: f.name for f in dataclasses.fields(ServerOptions) if f.metadata["off"]}
# Other spellings of llama.cpp's.
_ALSO: Final = {
    "-hf": "-m",
    "-hfr": "-m",
    "--hf-repo": "-m",
    "--webui": "--ui",
    "--log-verbose": "--verbose",
    "-no-kvu": "--no-kv-unified",
}

LLAMA_ENV: Final[Mapping[str, str]] = {
    **{f.name: f.metadata["env"] for f in dataclasses.fields(ServerOptions) if f.metadata["env"]},
    "model": "LLAMA_ARG_MODEL",
    "chat_template": "LLAMA_ARG_CHAT_TEMPLATE",
    "chat_template_file": "LLAMA_ARG_CHAT_TEMPLATE_FILE",
    "jinja": "LLAMA_ARG_JINJA",
    "n_ctx": "LLAMA_ARG_CTX_SIZE",
    "n_ubatch": "LLAMA_ARG_UBATCH",
    "n_threads": "LLAMA_ARG_THREADS",
    "n_gpu_layers": "LLAMA_ARG_N_GPU_LAYERS",
    "cache_type_k": "LLAMA_ARG_CACHE_TYPE_K",
    "cache_type_v": "LLAMA_ARG_CACHE_TYPE_V",
    "n_parallel": "LLAMA_ARG_N_PARALLEL",
    "rope_freq_base": "LLAMA_ARG_ROPE_FREQ_BASE",
    "rope_freq_scale": "LLAMA_ARG_ROPE_FREQ_SCALE",
    "n_predict": "LLAMA_ARG_N_PREDICT",
    "temp": "LLAMA_ARG_TEMPERATURE",
    "top_k": "LLAMA_ARG_TOP_K",
    "top_p": "LLAMA_ARG_TOP_P",
    "min_p": "LLAMA_ARG_MIN_P",
    "repeat_penalty": "LLAMA_ARG_REPEAT_PENALTY",
    "presence_penalty": "LLAMA_ARG_PRESENCE_PENALTY",
    "frequency_penalty": "LLAMA_ARG_FREQUENCY_PENALTY",
}
"""llama.cpp's environment names by option. A KVMEM_* name of the same option goes first."""

N_PARALLEL: Final = 4
"""Slots where -np is not given, as many as llama-server's."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command line."""

    settings: Settings
    options: ServerOptions
    warnings: tuple[str, ...]


def parse(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> Parsed:
    """The options that `arguments` and the environment give.

    env: by default the environment of the process.
    Raises InvalidOption for values that cannot be used, and for a flag without its value. A flag that
    nobody knows, or that changes nothing here, is a warning.
    """
    environ = environment() if env is None else env
    given: dict[str, object] = {}
    warnings: list[str] = []
    for name, value in _read(arguments, warnings):
        separator = BY_OPTION[name].separator
        if separator == ";" and isinstance(value, str):  # an item that holds one is written so
            value = value.replace(";", r"\x3b")
        given[name] = f"{given[name]}{separator}{value}" if separator and name in given else value
    options = ServerOptions(**_server_values(given, environ))
    values = _engine_values(given, environ)
    is_shared = "n_parallel" in values or bool(environ.get(BY_NAME["n_parallel"].env))
    values.setdefault("n_parallel", None if is_shared else N_PARALLEL)
    settings = Settings.from_sources(values, environ)
    if is_shared and not options.kv_unified and settings.n_ctx:
        settings = replace(settings, n_ctx=max(settings.n_ctx // settings.n_parallel, 1))
    return Parsed(settings, options, tuple(warnings))


def _engine_values(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {name: value for name, value in given.items() if name in BY_NAME}
    for option in OPTIONS:
        env = LLAMA_ENV.get(option.name, "")
        if option.name == "model" and not environ.get(env):
            env = "LLAMA_ARG_HF_REPO"
        if option.name not in values and not environ.get(option.env) and environ.get(env):
            values[option.name] = option.parse(environ[env], where=env)
    if values.get("n_parallel") in (-1, "-1"):  # llama-server's word for its default
        del values["n_parallel"]
    return values


def _server_values(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in SERVER_OPTIONS:
        value = given.get(option.name)
        where = option.flags[0]
        if value is None:
            for where in (option.env, LLAMA_ENV.get(option.name, "")):
                if environ.get(where):
                    value = environ[where]
                    break
        if value is not None:
            values[option.name] = option.parse(value, where=where) if isinstance(value, str) else value
    return values


# -- the command line


def _spellings() -> dict[str, tuple[str, bool | None]]:
    """Every flag -> its option, and the value of a switch; None: it takes one."""
    found: dict[str, tuple[str, bool | None]] = {}
    for option in (*OPTIONS, *SERVER_OPTIONS):
        for flag in option.flags:
            found[flag] = (option.name, True if option.type is bool else None)
        if option.type is bool:
            found["--no-" + option.flags[-1].removeprefix("--")] = (option.name, False)
    for flag, name in _OFF.items():
        found[flag] = (name, False)
    for flag, other in _ALSO.items():
        found[flag] = found[other]
    return found


FLAGS: Final = _spellings()
"""Every flag of `kvmem serve` that changes something."""
_NUMBER: Final = re.compile(r"-?\d")
_OF_REQUESTS: Final = {
    "system_prompt": "instructions come in the messages of a request",
    **dict.fromkeys(("grammar", "grammar_file", "json_schema"), "a request has its own `grammar` or schema"),
}
"""Options of the engine that say something of one answer."""


def _read(arguments: Sequence[str], warnings: list[str]) -> Iterator[tuple[str, object]]:
    """Options by name and their values, in order."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, equals, inline = argument.partition("=") if argument.startswith("--") else (argument, "", "")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in FLAGS:
            name, switch = FLAGS[flag]
            if name in _OF_REQUESTS:
                warnings.append(f"{flag} changes nothing here: {_OF_REQUESTS[name]}")
            if switch is None:
                if not equals and not rest:
                    raise InvalidOption(flag, True, "it needs a value", hint="See `kvmem serve --help`.")
                yield name, inline if equals else rest.pop(0)
            elif equals:
                yield name, BY_OPTION[name].parse(inline, where=flag) is switch
            else:
                yield name, switch
        elif names_model(flag):
            raise InvalidOption(
                flag, inline or " ".join(rest[:1]), "models are not found in this way here",
                hint="Give -m FILE, or -m owner/name for one of the hub.",
            )  # fmt: skip
        elif (row := ignored(flag)) is not None:
            value = inline if equals else ""
            if row.takes_value and not equals and rest and _is_value(rest[0]):
                value = rest.pop(0)
            if row.refuse and value.lower() in row.refuse:
                raise InvalidOption(flag, value, row.why, hint="Leave it out.")
            if not row.silent:
                warnings.append(f"{flag} changes nothing here: {row.why}")
        elif argument.startswith("-") and not _NUMBER.match(argument):
            if not equals and rest and _is_value(rest[0]):
                argument += " " + rest.pop(0)
            warnings.append(f"unknown option {argument!r} is ignored{_suggestion(flag)}")
        else:
            warnings.append(f"{argument!r} is ignored: it belongs to no option")


BY_OPTION: Final = {**BY_NAME, **_SERVER_NAMES}


def _is_value(text: str) -> bool:
    return not text.startswith("-") or _NUMBER.match(text) is not None


def _suggestion(flag: str) -> str:
    close = difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


# -- help

_SECTIONS_LAST: Final = ("Measuring and research",)


def help_text() -> str:
    """The page of `kvmem serve --help`: llama-server's flags first, those of kvmem_llama apart."""
    own = ("Memory", "Store of durable workspaces")
    groups: dict[str, list[Option]] = {}
    for option in (*OPTIONS, *SERVER_OPTIONS):
        if option.section not in _SECTIONS_LAST and option.name not in _UNUSED:
            groups.setdefault(option.section, []).append(option)
    order = [name for name in groups if name not in own and name != OWN] + [OWN, *own]
    lines = [
        "Usage: kvmem serve [OPTIONS]",
        "",
        "  A llama-server-compatible endpoint with memory.",
        "",
        "  Flags and LLAMA_ARG_* names are llama-server's where it has them; every option also has a KVMEM_*",
        "  name (docs/options.md, docs/server.md). What a client sends is stored, matched and recalled.",
    ]
    for name in order:
        lines += ["", f"{name}:"]
        for option in groups[name]:
            lines += _help_lines(option)
    lines += ["", "Other:", "  -h, --help", "        Show this page and exit."]
    return "\n".join(lines)


_UNUSED: Final = frozenset({"system_prompt", "policy", "grammar", "grammar_file", "json_schema"})


def _help_lines(option: Option) -> list[str]:
    flags = ", ".join(option.flags)
    if option.type is bool:
        flags += f", --no-{option.flags[-1].removeprefix('--')}"
    else:
        flags += " " + ("|".join(option.choices) or (option.unit or "number").upper())
    default = {True: "on", False: "off"}[bool(option.default)] if option.type is bool else option.default
    if option.name == "n_parallel":
        default = N_PARALLEL
    tail = [f"default: {default}"] if default != "" else []
    tail += [f"env: {LLAMA_ENV[option.name]}"] if option.name in LLAMA_ENV else []
    shown = f" [{', '.join(tail)}]" if tail else ""
    return [f"  {flags}", f"        {option.help}{shown}"]
