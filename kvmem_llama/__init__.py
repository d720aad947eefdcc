"""Virtual memory for the KV cache of long-running agents, on llama.cpp.

    from kvmem_llama import Engine

    with Engine(n_ctx=2048) as engine, engine.workspace() as workspace:
        workspace.add(text, source="log").result()
        with workspace.chat("What changed?") as answer:
            print(answer.text)

The same for asyncio is kvmem_llama.aio. Names are loaded when first used, so that importing the package stays
cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import aio
    from .conversation import Turn
    from .drop_in.llama import Llama
    from .engine.answer_parser import MessageDelta, ParsedMessage
    from .engine.chat_template import AnyMessage, Message
    from .engine.sampler import SamplingParams
    from .engine.templates import TemplateOptions
    from .errors import KvmemError
    from .gguf_info import ModelInfo, read_model_info
    from .memory.recall_params import RecallParams
    from .memory.report import (
        Event,
        Finished,
        MessagePiece,
        Progress,
        Recalled,
        RecalledBlock,
        RecallReport,
        RecallTimings,
        StepResult,
        TextPiece,
        TokenProbs,
    )
    from .memory.search import FoundBlock, SearchResult
    from .memory.usage import Timings, Usage
    from .policies.policy import MemoryStats
    from .settings import Settings
    from .workspace import Answer, Engine, Step, Workspace

__version__ = "0.1.0"

_HOME = {
    "Answer": "workspace",
    "AnyMessage": "engine.chat_template",
    "Engine": "workspace",
    "Event": "memory.report",
    "Finished": "memory.report",
    "FoundBlock": "memory.search",
    "KvmemError": "errors",
    "Llama": "drop_in.llama",
    "MemoryStats": "policies.policy",
    "Message": "engine.chat_template",
    "MessageDelta": "engine.answer_parser",
    "MessagePiece": "memory.report",
    "ModelInfo": "gguf_info",
    "ParsedMessage": "engine.answer_parser",
    "Progress": "memory.report",
    "RecallParams": "memory.recall_params",
    "RecallReport": "memory.report",
    "RecallTimings": "memory.report",
    "Recalled": "memory.report",
    "RecalledBlock": "memory.report",
    "SamplingParams": "engine.sampler",
    "SearchResult": "memory.search",
    "Settings": "settings",
    "Step": "workspace",
    "StepResult": "memory.report",
    "TemplateOptions": "engine.templates",
    "TextPiece": "memory.report",
    "Timings": "memory.usage",
    "TokenProbs": "memory.report",
    "Turn": "conversation",
    "Usage": "memory.usage",
    "Workspace": "workspace",
    "WorkspaceEngine": "workspace",
    "open_engine": "workspace",
    "read_model_info": "gguf_info",
}

__all__ = [
    "Answer",
    "AnyMessage",
    "Engine",
    "Event",
    "Finished",
    "FoundBlock",
    "KvmemError",
    "Llama",
    "MemoryStats",
    "Message",
    "MessageDelta",
    "MessagePiece",
    "ModelInfo",
    "ParsedMessage",
    "Progress",
    "RecallParams",
    "RecallReport",
    "RecallTimings",
    "Recalled",
    "RecalledBlock",
    "SamplingParams",
    "SearchResult",
    "Settings",
    "Step",
    "StepResult",
    "TemplateOptions",
    "TextPiece",
    "Timings",
    "TokenProbs",
    "Turn",
    "Usage",
    "Workspace",
    "__version__",
    "aio",
    "read_model_info",
]


def __getattr__(name: str) -> Any:
    if name == "aio":
        return importlib.import_module(".aio", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
