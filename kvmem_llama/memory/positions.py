"""The three integer spaces of a workspace. They never mix: a function's types say which one it means."""

from __future__ import annotations

from typing import NewType

TokenPos = NewType("TokenPos", int)
"""Index of a token in the workspace history: 0-based, never changes."""

ViewPos = NewType("ViewPos", int)
"""Position that a cell is encoded for: contiguous over the execution view when positions are packed."""

Cell = NewType("Cell", int)
"""Row of llama.cpp's KV cache."""
