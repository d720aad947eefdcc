"""Where the records of blocks live when they are not in cells: one protocol, one module per tier."""

from .host import HostStore
from .records import BlockStore, RecordRef, StaleRecord, StoreStats

__all__ = ["BlockStore", "HostStore", "RecordRef", "StaleRecord", "StoreStats"]
