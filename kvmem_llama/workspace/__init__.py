"""What a program uses: an engine, workspaces on it, and the handles of running work.

Names are loaded when first used: an engine can load a model while the rest is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import WorkspaceEngine
    from .opening import Engine, open_engine
    from .running import Answer, Step
    from .workspace import Workspace

_HOME = {
    "Answer": "running",
    "Engine": "opening",
    "Step": "running",
    "Workspace": "workspace",
    "WorkspaceEngine": "engine",
    "open_engine": "opening",
}

__all__ = ["Answer", "Engine", "Step", "Workspace", "WorkspaceEngine", "open_engine"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
