"""Fields of a request as llama-server reads them: one of a wrong type is absent, and so is null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    value = body.get(name)
    return value if isinstance(value, str) else default


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    return value if isinstance(value, bool) else default


def whole(body: Mapping[str, Any], name: str, default: int = 0) -> int:
    """A whole number; of a real one its whole part."""
    value = body.get(name)
    return int(value) if isinstance(value, (int, float)) else default


def real(body: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    value = body.get(name)
    return float(value) if isinstance(value, (int, float)) else default


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; {} where there is none."""
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def items(body: Mapping[str, Any], name: str) -> list[Any]:
    """A list; [] where there is none."""
    value = body.get(name)
    return value if isinstance(value, list) else []


def kind(item: Any) -> str:
    """The "type" of one of several kinds of objects in a list; "" for what is none."""
    return text(item, "type") if isinstance(item, dict) else ""
