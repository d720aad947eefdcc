"""llama-server's flags that change nothing here, with the reason that a user is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Ignored:
    """One flag. silent: what it asks for is so anyway. refuse: values that cannot be had."""

    why: str
    takes_value: bool = False
    silent: bool = False
    refuse: frozenset[str] = frozenset()


_OFF: Final = frozenset({"off", "0", "false", "disabled"})


def _rows() -> Iterator[tuple[Iterable[str], Ignored]]:
    yield ("-fa", "--flash-attn"), Ignored(
        "flash attention is always on; memory moves rows of V, which it stores by row",
        takes_value=True, silent=True, refuse=_OFF,
    )  # fmt: skip
    yield ("-b", "--batch-size"), Ignored(
        "a batch is as long as --ubatch-size, so that a request can be cancelled soon", takes_value=True,
        silent=True,
    )  # fmt: skip
    always = "requests are always batched together"
    yield ("-cb", "--cont-batching"), Ignored(always, silent=True)
    yield ("-nocb", "--no-cont-batching"), Ignored(always)
    yield (
        ("--context-shift", "--no-context-shift"),
        Ignored("a history longer than the view is recalled, not shifted away", silent=True),
    )
    kept = "prompts are kept in workspaces; --host-budget and --disk-budget bound them"
    yield ("-cram", "--cache-ram"), Ignored(kept, takes_value=True)
    yield ("--cache-reuse",), Ignored("--reuse says what an edited prompt keeps", takes_value=True)
    yield ("--cache-idle-slots", "--no-cache-idle-slots"), Ignored(kept)
    yield ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), Ignored(kept, takes_value=True)
    yield (
        ("-sps", "--slot-prompt-similarity"),
        Ignored("a prompt is matched to what is stored, whatever slot it runs on", takes_value=True),
    )
    yield ("--swa-full",), Ignored("sliding-window layers keep all cells anyway", silent=True)
    yield ("--threads-http",), Ignored("connections need no threads of their own", takes_value=True)
    yield ("--reuse-port",), Ignored("the port is not shared")
    yield ("--warmup", "--no-warmup"), Ignored("there is no warm-up", silent=True)
    yield ("--offline",), Ignored("models are only fetched when they are asked for by name", silent=True)
    yield ("--perf", "--no-perf"), Ignored("timings are in every answer", silent=True)
    yield ("-lv", "--verbosity", "--log-verbosity"), Ignored("use --verbose", takes_value=True, silent=True)
    yield ("--log-colors",), Ignored("the log has no colours", takes_value=True, silent=True)
    yield ("--log-prefix", "--no-log-prefix"), Ignored("lines of the log have one form", silent=True)
    yield ("--log-jsonl", "--no-log-jsonl"), Ignored("lines of the log have one form")
    yield ("--keep",), Ignored("nothing is dropped from a history; --n-sink stays in view", takes_value=True)
    yield (
        ("--embedding", "--embeddings"),
        Ignored("embeddings are not supported, and requests for them are refused with or without it"),
    )
    yield (
        ("--rerank", "--reranking"),
        Ignored("reranking is not supported, and requests for it are refused with or without it"),
    )
    yield ("--pooling",), Ignored("embeddings are not supported", takes_value=True)
    yield (
        ("-mm", "--mmproj", "-mmu", "--mmproj-url"),
        Ignored("images and sound are not read", takes_value=True),
    )
    yield ("-md", "--model-draft"), Ignored("there is no speculative decoding", takes_value=True)
    yield (
        ("--models-dir", "--models-preset", "--models-max"),
        Ignored("one model is served", takes_value=True),
    )
    yield ("--path",), Ignored("the page at / is built in", takes_value=True)
    yield (
        ("--tools", "--mcp-servers-config", "--mcp-servers-json"),
        Ignored("the server runs no tools; clients do", takes_value=True),
    )
    yield (
        ("--ssl-key-file", "--ssl-cert-file"),
        Ignored("put a proxy with TLS before the server", takes_value=True),
    )
    yield ("--agent", "--ui-mcp-proxy", "--webui-mcp-proxy"), Ignored("the server runs no tools; clients do")
    yield ("--sleep-idle-seconds",), Ignored("the model stays loaded", takes_value=True)


IGNORED: Final[Mapping[str, Ignored]] = {flag: row for flags, row in _rows() for flag in flags}
