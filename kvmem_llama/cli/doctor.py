"""`kvmem doctor`: what was built, what the model is, and the plan for it here. No model is loaded."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from ..errors import KvmemError, exit_code
from ..settings import BY_NAME, Settings
from .grouped import number
from .messages import note

if TYPE_CHECKING:
    from ..calibration import Calibration
    from ..fitting import Plan
    from ..gguf_info import ModelInfo

Facts = dict[str, Any]


def doctor(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")] = False,
) -> None:
    """Show what was built, the facts of the model, and the plan for it on this machine. Loads no model.

    The exit code is 5 if the plan does not fit.
    """
    _info.cache_clear()
    _calibration.cache_clear()
    _plan.cache_clear()
    report: dict[str, Facts] = {"program": _program(), "folders": _folders(settings)}
    failures: list[KvmemError] = []
    sections: list[tuple[str, Callable[[], Facts]]] = [
        ("library", lambda: _library(settings)),
        ("kernels", _kernels),
        ("model", lambda: _model(settings)),
        ("memory", lambda: _memory(settings)),
        ("search", lambda: _search(settings)),
        ("plan", lambda: _plan_facts(settings, failures)),
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
        print(_verdict(report))
    if failures:
        raise typer.Exit(exit_code(failures[0]))


def _print(report: dict[str, Facts]) -> None:
    for name, facts in report.items():
        print(name)
        print_facts(facts, "  ")


def _verdict(report: dict[str, Facts]) -> str:
    """The last line: whether this can be used as it is."""
    wrong = [name for name, facts in report.items() if facts.get("error")]
    if wrong:
        return f"not well: see {' and '.join(wrong)} above"
    return "all is well: the libraries are there, and the plan for the model fits"


def print_facts(facts: Facts, indent: str = "") -> None:
    """One line for each fact that says something; of those that are lists, one for each of their texts."""
    width = max(26, *map(len, facts))
    for key, value in facts.items():
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is None or one == "":
                continue
            shown = number(key, one) if isinstance(one, int) and not isinstance(one, bool) else one
            print(f"{indent}{key.replace('_', ' '):<{width}} {shown}")


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
    from .. import models
    from ..gguf_info import check_policy, read_model_info

    info = read_model_info(models.resolve(settings.model, settings.cache_path, note))
    check_policy(info, settings.policy)
    return info


@functools.cache
def _calibration(settings: Settings) -> Calibration | None:
    from ..calibration import find

    return find(settings, _info(settings).fingerprint)


@functools.cache
def _plan(settings: Settings) -> Plan:
    from ..fitting import machine_for, make_plan

    return make_plan(settings, _info(settings), machine_for(settings), _calibration(settings))


def _model(settings: Settings) -> Facts:
    return model_facts(_info(settings))


def model_facts(info: ModelInfo) -> Facts:
    """What a file says about its model."""
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
    """How the view is divided. What it takes is part of the plan."""
    from ..engine.context import cells_needed
    from ..memory.budget import Budget

    plan, info = _plan(settings), _info(settings)
    budget = Budget.of(plan.settings, plan.n_view, info.n_ctx_train)
    costs, n_cells = plan.costs, cells_needed(settings, budget.n_view)
    return {
        "view_tokens": budget.n_view,
        "of_it_sink": budget.n_sink,
        "of_it_recent": budget.n_recent,
        "of_it_for_the_answer": budget.n_reserve,
        "block_tokens": budget.block,
        "sequences": settings.n_parallel,
        "cells": n_cells,
        "cells_bytes": round(n_cells * costs.cell),
        "cell_bytes_per_token": round(costs.cell),
        "record_bytes_per_token": round(costs.record),
        "index_bytes_per_token": round(costs.index["mean_k"]),
        "bytes_per_million_tokens": round((costs.record + costs.index["mean_k"]) * 1e6),
    }


def _search(settings: Settings) -> Facts:
    """How blocks are found, and what the indexes for it take. That of words depends on the text."""
    from ..memory.channels import NOT_CALIBRATED, Channels

    calibration = _calibration(settings)
    channels, costs = Channels.of(settings, calibration), _plan(settings).costs
    facts: Facts = {
        "score": settings.score,
        "channels": " + ".join(f"{name} {share:.2f}" for name, share in channels.shares.items()),
        "calibration": NOT_CALIBRATED if settings.score == "fused" else "none",
    }
    if calibration is not None:
        facts["calibration"] = f"{len(calibration.heads)} heads of {calibration.model_name}"
    facts |= {f"{name}_bytes_per_token": round(n) for name, n in costs.index.items()}
    return facts | {"used_bytes_per_token": round(costs.used_index(channels))}


def _plan_facts(settings: Settings, failures: list[KvmemError]) -> Facts:
    """What `kvmem ask` and `kvmem chat` take with these options on this machine, and why."""
    from ..errors import DoesNotFit

    plan = _plan(settings)
    needs, costs, why = plan.needs, plan.costs, plan.reasons
    facts: Facts = {"fits": plan.fits}
    if plan.refusal:
        facts |= {"error": plan.refusal, "hint": plan.advice}
        failures.append(DoesNotFit(plan.refusal, hint=plan.advice))
    is_default = settings.n_ubatch == BY_NAME["n_ubatch"].default
    batch_is = "the default; -ub 0 would choose it for this machine" if is_default else why["batch"]
    facts |= {"view_tokens": plan.n_view, "view_is": why["view"]}
    facts |= {"batch_tokens": plan.n_ubatch, "batch_is": batch_is}
    facts |= {"gpu_layers": plan.n_gpu_layers}
    if "gpu_layers" in why:
        facts["gpu_layers_are"] = why["gpu_layers"]
    facts |= {"host_budget_bytes": plan.host_budget, "host_budget_is": why["host_budget"]}
    facts |= {"ram_bytes": needs.n_memory, "ram_usable_bytes": _known(plan.free)}
    facts |= {f"ram_{_key(part)}_bytes": n for part, n in needs.host.items()}
    facts |= {"ram_mapped_weights_bytes": needs.mapped, "ram_view_records_bytes": needs.least_records}
    if needs.gpu:
        facts |= {"gpu_bytes": needs.n_gpu, "gpu_usable_bytes": plan.gpu_free}
        facts |= {f"gpu_{_key(part)}_bytes": n for part, n in needs.gpu.items()}
    per_thousand = {"cells": costs.cell, "records_in_ram": costs.record, "records_on_disk": costs.disk}
    per_thousand |= {f"index_of_{channel}": n for channel, n in costs.index.items()}
    facts |= {f"{part}_bytes_per_1000_tokens": round(1000 * n) for part, n in per_thousand.items()}
    facts["disk_has_room_for_tokens"] = plan.disk_tokens
    return facts | {"remark": list(plan.remarks)}


def _key(part: str) -> str:
    return part.replace(" ", "_")


def _known(n_bytes: int | None) -> int | str:
    return "not known" if n_bytes is None else n_bytes


def _each(values: tuple[int, ...]) -> int | str:
    """One number if all layers have it, else the numbers of all layers."""
    return values[0] if len(set(values)) == 1 else " ".join(map(str, values))
