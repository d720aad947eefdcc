"""Where the records of blocks live when they are not in cells: one protocol, one module per tier."""

from .disk import DiskStore
from .host import HostStore
from .pool import HostPool
from .readers import Readers
from .records import BlockStore, NotStored, RecordRef, StaleRecord, StoreStats, Where
from .tiered import TieredStore, TierStats

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
