"""Where two answers differ, once ids and times are taken out of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from servers import Answer, Request

HERE: Final = Path(__file__).parent
ALLOWED: Final = HERE / "allowed_differences.json"

_ID: Final = re.compile(r"(chatcmpl-|cmpl-|msg_|resp_|rs_|fc_|call_|toolu_)?[A-Za-z0-9]{24,40}")
_TIMES: Final = frozenset(
    {"created", "created_at", "completed_at", "time_ms", "save_ms", "restore_ms", "t_start"}
)
_MEASURED: Final = re.compile(r"(prompt|predicted)_(ms|per_second|per_token_ms)")
_IDS: Final = frozenset({"id", "item_id", "tool_call_id", "call_id", "id_task", "message_id"})


@dataclass(frozen=True, slots=True)
class Allowed:
    """A difference that may be. at: pattern of the place in the answer; paths: pattern of requests' paths."""

    at: str
    paths: str
    why: str

    def holds(self, path: str, place: str) -> bool:
        return bool(re.fullmatch(self.paths, path) and re.fullmatch(self.at, place))


@dataclass(frozen=True, slots=True)
class Difference:
    place: str  # such as /body/choices/0/message/content
    stock: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.place}: stock {shortened(self.stock)}, ours {shortened(self.ours)}"


def allowed_differences() -> list[Allowed]:
    return [Allowed(**row) for row in json.loads(ALLOWED.read_text(encoding="utf-8"))]


def differences(request: Request, stock: Answer, ours: Answer) -> list[Difference]:
    """Every place where the two differ; nothing is allowed yet."""
    del request
    return list(_compare("", normal(stock.as_json()), normal(ours.as_json())))


def normal(value: Any, name: str = "") -> Any:
    """`value` without what differs from run to run: its kind stands in its place."""
    if isinstance(value, dict):
        return {key: normal(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [normal(item, name) for item in value]
    if name in _TIMES or _MEASURED.fullmatch(name):
        return f"<{type(value).__name__ if isinstance(value, str) else 'number'}>"
    if name in _IDS and isinstance(value, str) and _ID.fullmatch(value):
        return f"<id {_ID.fullmatch(value)[1] or ''}>"  # type: ignore[index]
    if name == "id_task":
        return "<number>"
    return value


_ABSENT: Final = "<absent>"


def _compare(place: str, stock: Any, ours: Any) -> Iterator[Difference]:
    if isinstance(stock, dict) and isinstance(ours, dict):
        for key in dict.fromkeys((*stock, *ours)):
            yield from _compare(f"{place}/{key}", stock.get(key, _ABSENT), ours.get(key, _ABSENT))
    elif isinstance(stock, list) and isinstance(ours, list) and len(stock) == len(ours):
        for i, (left, right) in enumerate(zip(stock, ours, strict=True)):
            yield from _compare(f"{place}/{i}", left, right)
    elif stock != ours or isinstance(stock, bool) != isinstance(ours, bool):
        yield Difference(place, stock, ours)


def shortened(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]} ..."
