"""Events as JSON, one object a line on standard output. docs/cli.md describes every field."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import KvmemError, exit_code
from ..memory.report import Progress, RecallReport, StepResult, TextPiece

if TYPE_CHECKING:
    from ..engine.answer_parser import MessageDelta
    from ..policies import MemoryStats


class JsonPresenter:
    """Every event, as it comes."""

    def __init__(self, stats: Callable[[], MemoryStats] | None = None) -> None:
        """stats: of a durable workspace; told just before the end of a step."""
        self.answering = False
        self._stats = stats

    def begin(self) -> None:
        self.answering = False

    def progress(self, event: Progress) -> None:
        emit("progress", phase=event.phase, done=event.done, total=event.total)

    def recalled(self, report: RecallReport) -> None:
        emit("recall", **dataclasses.asdict(report))

    def text(self, piece: TextPiece) -> None:
        emit("text", text=piece.text, token=piece.token)

    def message(self, delta: MessageDelta) -> None:
        pass  # `finished` tells all of the message

    def finished(self, result: StepResult) -> None:
        if self._stats is not None:
            emit("stats", **dataclasses.asdict(self._stats()))
        # The reports were events of their own.
        names = [f.name for f in dataclasses.fields(result) if f.name not in ("recalls", "message")]
        fields: dict[str, Any] = {name: getattr(result, name) for name in names}
        if result.message is not None:
            fields["message"] = result.message.to_dict()
        emit("finished", **fields)

    def interrupted(self) -> None:
        pass


def emit(event: str, **fields: Any) -> None:
    """Writes one line: ASCII only, and valid JSON whatever the numbers are."""
    sys.stdout.write(json.dumps(plain({"event": event, **fields}), allow_nan=False) + "\n")
    sys.stdout.flush()


def emit_error(error: KvmemError) -> None:
    """The last line of a run that fails."""
    emit("error", **error_fields(error))


def error_fields(error: KvmemError) -> dict[str, Any]:
    """What every command tells of an error in JSON."""
    name = type(error).__name__
    return {"error": name, "message": error.what, "hint": error.hint, "exit_code": exit_code(error)}


def plain(value: Any) -> Any:
    """`value` in JSON's own types: NumPy scalars unwrapped, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # NumPy
        return plain(value.tolist())
    return str(value)
