"""`kvmem doctor`: what was built, what the model is, what its memory will take. No model is loaded."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from .. import __version__, models
from ..errors import KvmemError, exit_code
from ..gguf_info import ModelInfo, check_policy, read_model_info
from ..settings import Settings
from .messages import note

Facts = dict[str, Any]

# Bits of one element in cells and records (ggml's block sizes).
BITS: Final = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}


def doctor(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")] = False,
) -> None:
    """Show what was built, the facts of the model and its memory plan. Loads no model."""
    report: dict[str, Facts] = {"program": _program(), "folders": _folders(settings)}
    failures: list[KvmemError] = []
    sections: list[tuple[str, Callable[[], Facts]]] = [
        ("library", lambda: _library(settings)),
        ("kernels", _kernels),
        ("model", lambda: _model(settings)),
        ("memory", lambda: _memory(settings)),
        ("search", lambda: _search(settings)),
    ]
    for name, section in sections:
        try:
            report[name] = section()
        except KvmemError as error:
            report[name] = {"error": error.what, "hint": error.hint}
            failures.append(error)
            if name == "model":
                break  # without it there is nothing to plan for
    if as_json:
        from .json_lines import emit

        emit("doctor", **report)
    else:
        _print(report)
    if failures:
        raise typer.Exit(exit_code(failures[0]))


def _print(report: dict[str, Facts]) -> None:
    for name, facts in report.items():
        print(name)
        for key, value in facts.items():
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
            print(f"  {key.replace('_', ' '):<26} {shown}")


def _program() -> Facts:
    return {"kvmem_llama": __version__, "python": sys.version.split()[0], "platform": sys.platform}


def _folders(settings: Settings) -> Facts:
    """Each is made when it is needed first."""
    return {"workspaces": str(settings.data_path.absolute()), "cache": str(settings.cache_path.absolute())}


def _library(settings: Settings) -> Facts:
    from ..native import library

    native = library.load()

    from ..native.host_memory import host_memory

    return {
        "path": str(native.path),
        "patch_id": native.patch_id,
        "host_pool": host_memory(settings, native.path).kind,
    }


def _kernels() -> Facts:
    from ..native import kernels

    loaded = kernels.load()
    return {"path": str(loaded.path), "instruction_set": loaded.isa}


@functools.cache
def _info(settings: Settings) -> ModelInfo:
    info = read_model_info(models.resolve(settings.model, settings.cache_path, note))
    check_policy(info, settings.policy)
    return info


def _model(settings: Settings) -> Facts:
    info = _info(settings)
    return {
        "path": str(info.path),
        "folder": str(info.path.absolute().parent),
        "name": info.name,
        "architecture": info.arch,
        "parameters": info.n_params,
        "file_bytes": info.file_size,
        "file_parts": info.n_parts,
        "weights_mostly": info.quantisation,
        "layers": info.n_layer,
        "width": info.n_embd,
        "query_heads": info.n_head,
        "key_heads": _each(info.n_head_kv),
        "key_width": info.d_k,
        "value_width": info.d_v,
        "trained_window_tokens": info.n_ctx_train,
        "sliding_window_tokens": info.n_swa or "none",
        "vocabulary_tokens": info.n_vocab,
        "tokenizer": info.tokenizer,
        "chat_template": info.has_chat_template,
        "fingerprint": info.fingerprint,
    }


def _memory(settings: Settings) -> Facts:
    from ..engine.context import cells_needed
    from ..memory.budget import Budget

    info = _info(settings)
    n_train = info.n_ctx_train
    budget = Budget.of(settings, min(settings.n_ctx or n_train, n_train), n_train)
    cell = info.cell_bytes(BITS[settings.cache_type_k], BITS[settings.cache_type_v])
    record = info.cell_bytes(BITS[settings.raw_k_type], BITS[settings.cache_type_v])
    index = info.cell_bytes(BITS["f16"], 0) / budget.block
    n_cells = cells_needed(settings, budget.n_view)
    return {
        "view_tokens": budget.n_view,
        "of_it_sink": budget.n_sink,
        "of_it_recent": budget.n_recent,
        "of_it_for_the_answer": budget.n_reserve,
        "block_tokens": budget.block,
        "sequences": settings.n_parallel,
        "cells": n_cells,
        "cells_bytes": round(n_cells * cell),
        "cell_bytes_per_token": round(cell),
        "record_bytes_per_token": round(record),
        "index_bytes_per_token": round(index),
        "bytes_per_million_tokens": round((record + index) * 1e6),
    }


def _search(settings: Settings) -> Facts:
    """How blocks are found, and what the indexes for it take. That of words depends on the text."""
    from ..calibration import find
    from ..memory.channels import NOT_CALIBRATED, Channels

    info = _info(settings)
    calibration = find(settings, info.fingerprint)
    channels = Channels.of(settings, calibration)
    facts: Facts = {
        "score": settings.score,
        "channels": " + ".join(f"{name} {share:.2f}" for name, share in channels.shares.items()),
        "calibration": NOT_CALIBRATED if settings.score == "fused" else "none",
        "mean_k_bytes_per_token": round(info.cell_bytes(BITS["f16"], 0) / settings.block_size),
    }
    if calibration is not None:
        group = {il: info.n_head // n for il, n in enumerate(info.n_head_kv) if n}
        heads_kv = {(h.layer, h.head // group[h.layer]) for h in calibration.heads if h.layer in group}
        facts["calibration"] = f"{len(calibration.heads)} heads of {calibration.model_name}"
        facts["heads_bytes_per_token"] = round(len(heads_kv) * info.d_k * BITS[calibration.index_type] / 8)
    used = [facts.get(f"{name}_bytes_per_token", 0) for name in channels.shares]
    return facts | {"used_bytes_per_token": sum(used)}


def _each(values: tuple[int, ...]) -> int | str:
    """One number if all layers have it, else the numbers of all layers."""
    return values[0] if len(set(values)) == 1 else " ".join(map(str, values))
