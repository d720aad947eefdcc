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
    for flags, why in _MORE:
        yield flags.split(), Ignored(why, takes_value=True)


_MORE: Final = (
    ("-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch "
     "--cpu-strict-batch --prio-batch --poll-batch --numa", "the system places the threads"),
    ("--rope-scaling --rope-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow "
     "--yarn-beta-fast", "of these there are --rope-freq-base and --rope-freq-scale"),
    ("-kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host --rpc -lm --load-mode -lzm "
     "--lazy-mode --mlock -dev --device -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn "
     "--n-cpu-ffn -sm --split-mode -ts --tensor-split -mg --main-gpu --op-offload --no-op-offload "
     "--check-tensors --override-kv", "where weights and cells lie is the matter of --gpu-layers alone"),
    ("-fit --fit -fitt --fit-target -fitc --fit-ctx", "sizes that are left open fit the machine anyway"),
    ("--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
     "--control-vector-layer-range", "adapters and control vectors are not applied"),
    ("-td -tbd -Cd -Crd -Cbd -otd -cmoed -ncmoed -devd -ngld -ctkd -ctvd -hfd -hfrd --draft --draft-n "
     "--draft-max --draft-min --draft-n-min -lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
     "there is no speculative decoding"),
    ("--kv-unified-per-slot -cms --checkpoint-min-step -dt --defrag-thold",
     "prompts are kept in workspaces; --host-budget and --disk-budget bound them"),
    ("-r --reverse-prompt -sp --special -e --escape --no-escape --reasoning-effort --reasoning-preserve "
     "--no-reasoning-preserve", "a request says so itself"),
    ("--mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload -mmdev "
     "--mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps "
     "--video-timestamp-interval --video-ffmpeg-dir --media-path", "images and sound are not read"),
    ("--embd-normalize", "embeddings are not supported"),
    ("-bs --backend-sampling --spm-infill", "there is one way to do it here"),
    ("--ui-config --webui-config --ui-config-file --webui-config-file", "the page at / is built in"),
    ("--tools-runtime -ag -no-ag --no-agent --no-ui-mcp-proxy --no-webui-mcp-proxy",
     "the server runs no tools; clients do"),
    ("--models-autoload --no-models-autoload", "one model is served"),
    ("--log-prompts-dir", "--log-prompts writes them to the log"),
    ("-cl --cache-list --list-devices", "see `kvmem model ls` and `kvmem doctor`"),
)  # fmt: skip

IGNORED: Final[Mapping[str, Ignored]] = {flag: row for flags, row in _rows() for flag in flags}

_SPECULATION: Final = Ignored("there is no speculative decoding", takes_value=True)
_OTHER_MODEL: Final = (
    "-mu", "--model-url", "-dr", "--docker-repo", "-hff", "--hf-file", "--embd-gemma-default",
    "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default", "--fim-qwen-7b-spec",
    "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default", "--gpt-oss-120b-default",
    "--vision-gemma-4b-default", "--vision-gemma-12b-default",
)  # fmt: skip


def ignored(flag: str) -> Ignored | None:
    """What there is to say of a flag that changes nothing; None: it is not one of llama-server's."""
    if flag.startswith(("--spec-", "--no-spec-")) or flag.endswith("-draft"):
        return _SPECULATION
    return IGNORED.get(flag)


def names_model(flag: str) -> bool:
    """Whether a flag names the model in a way that is not known here: another one must not be served."""
    return flag in _OTHER_MODEL
