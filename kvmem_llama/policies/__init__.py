"""What the model attends to when the history outgrows the view: one module per policy, one table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.errors import InvalidOption

from .compaction import Compaction
from .full_context import FullContext
from .kvmem import KVMem
from .policy import MemoryStats, Policy
from .sliding_window import SlidingWindow
from .text_retrieval import CompactionRetrieval

POLICIES: Final[dict[str, Callable[[EngineCore], Policy]]] = {
    policy.name: policy for policy in (KVMem, FullContext, SlidingWindow, Compaction, CompactionRetrieval)
}


def make_policy(name: str, core: EngineCore) -> Policy:
    """An empty memory under the policy `name`. Raises InvalidOption, or ModelUnsupported."""
    if name not in POLICIES:
        raise InvalidOption("--policy", name, "must be one of " + ", ".join(POLICIES))
    return POLICIES[name](core)


__all__ = [
    "POLICIES",
    "Compaction",
    "CompactionRetrieval",
    "FullContext",
    "KVMem",
    "MemoryStats",
    "Policy",
    "SlidingWindow",
    "make_policy",
]
