"""Virtual memory for the KV cache of long-running agents, on llama.cpp.

    from kvmem_llama import SamplingParams, Settings, open_engine

    with open_engine(path, Settings(n_ctx=2048)) as engine, engine.workspace() as workspace:
        stream = workspace.ask("What changed?", [("log", text)], sampling=SamplingParams())
        print(stream.result().text)

Names are loaded when first used, so that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.sampler import SamplingParams
    from .errors import KvmemError
    from .gguf_info import ModelInfo, read_model_info
    from .memory.report import (
        Finished,
        Progress,
        Recalled,
        RecalledBlock,
        RecallReport,
        StepResult,
        TextPiece,
    )
    from .settings import Settings
    from .workspace import Stream, Workspace, WorkspaceEngine, open_engine

__version__ = "0.1.0"

_HOME = {
    "Finished": "memory.report",
    "KvmemError": "errors",
    "ModelInfo": "gguf_info",
    "Progress": "memory.report",
    "RecallReport": "memory.report",
    "Recalled": "memory.report",
    "RecalledBlock": "memory.report",
    "SamplingParams": "engine.sampler",
    "Settings": "settings",
    "StepResult": "memory.report",
    "Stream": "workspace",
    "TextPiece": "memory.report",
    "Workspace": "workspace",
    "WorkspaceEngine": "workspace",
    "open_engine": "workspace",
    "read_model_info": "gguf_info",
}

__all__ = [
    "Finished",
    "KvmemError",
    "ModelInfo",
    "Progress",
    "RecallReport",
    "Recalled",
    "RecalledBlock",
    "SamplingParams",
    "Settings",
    "StepResult",
    "Stream",
    "TextPiece",
    "Workspace",
    "WorkspaceEngine",
    "__version__",
    "open_engine",
    "read_model_info",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
