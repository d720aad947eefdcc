"""Where the records of blocks live when they are not in cells: one protocol, one module per tier.

Names are loaded when first used: who keeps records in RAM only does not wait for what files need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .disk import DiskStore
    from .host import HostStore
    from .pool import HostPool
    from .readers import Readers
    from .records import BlockStore, NotStored, RecordRef, StaleRecord, StoreStats, Where
    from .tiered import TieredStore, TierStats

_HOME = {
    "BlockStore": "records",
    "DiskStore": "disk",
    "HostPool": "pool",
    "HostStore": "host",
    "NotStored": "records",
    "Readers": "readers",
    "RecordRef": "records",
    "StaleRecord": "records",
    "StoreStats": "records",
    "TierStats": "tiered",
    "TieredStore": "tiered",
    "Where": "records",
}

__all__ = [
    "BlockStore",
    "DiskStore",
    "HostPool",
    "HostStore",
    "NotStored",
    "Readers",
    "RecordRef",
    "StaleRecord",
    "StoreStats",
    "TierStats",
    "TieredStore",
    "Where",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
