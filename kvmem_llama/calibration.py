"""What `kvmem calibrate` found out about one model: which query heads find text, and how to use them.

A file of JSON, keyed by the fingerprint of the model (gguf_info). docs/calibration.md says how it is made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from .errors import InputError, InvalidOption
from .settings import Settings
from .text_file import write_whole

FORMAT: Final = 1
CHANNELS: Final = ("heads", "lexical")
INDEX_TYPES: Final = ("q4_0", "q8_0")
NONE: Final = "none"
"""In place of a path: as if there were no file."""

SHIPPED: Final = Path(__file__).parent / "calibrations"
_HINT: Final = "Run `kvmem calibrate MODEL --force` to write it again, or --calibration none to do without."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CalibratedHead:
    """A query head that finds text."""

    layer: int  # number in the model
    head: int  # query head of the layer
    agreement: float  # with the search by words, from 0 to 1
    mean_q: tuple[float, ...] | None = None  # [d] of its raw Q, subtracted before scoring; None: nothing is


@dataclass(frozen=True, slots=True)
class Calibration:
    """How blocks of one model are found by a few of its heads, and by words."""

    model: str  # fingerprint
    model_name: str
    heads: tuple[CalibratedHead, ...]  # best first
    centred: bool  # every head has a mean_q
    index_type: str  # of the keys in the token index, see INDEX_TYPES
    spread: Mapping[str, float]  # by channel: the part of a block's score that each neighbour gets
    shares: Mapping[str, float]  # by channel: of the selection; what they leave of 1 goes by both
    weights: Mapping[str, float]  # by channel: of the scores by which that rest goes
    measured: Mapping[str, float | int | str]  # on the texts it was made from


def load(path: str | Path) -> Calibration:
    """The calibration in a file. Raises InputError, naming the file and what is wrong with it."""
    where = f"the calibration {str(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(where, why, hint=_HINT) from None
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(where, f"it is not JSON ({error})", hint=_HINT) from None
    try:
        return _calibration(_Fields(data, ""))
    except _Wrong as error:
        raise InputError(where, str(error), hint=_HINT) from None


def dump(calibration: Calibration, path: str | Path) -> None:
    """Writes a calibration: the file is the old one or the new one, whole, and equal calibrations give equal
    bytes. Folders are made. Raises InvalidOption if it cannot be written."""
    path = Path(path)
    values = {"format": FORMAT, **asdict(calibration)}
    text = json.dumps(values, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise InvalidOption(
            "--out", str(path), f"it cannot be written: {error.strerror or error}",
            hint="Choose a file in a folder that you may write to.",
        ) from None  # fmt: skip


def path_of(settings: Settings, fingerprint: str) -> Path:
    """Where a calibration of this machine's own belongs."""
    return settings.calibration_path / f"{fingerprint}.json"


def find(settings: Settings, fingerprint: str) -> Calibration | None:
    """The calibration of the model with this fingerprint: the one that was asked for, this machine's own, or
    the one that comes with the package; None: there is none, or none is wanted.

    Raises InputError (a file is damaged), InvalidOption (it was made for another model).
    """
    if settings.calibration == NONE:
        return None
    if settings.calibration:
        return _of_model(Path(settings.calibration).expanduser(), fingerprint)
    for path in (path_of(settings, fingerprint), SHIPPED / f"{fingerprint}.json"):
        if path.is_file():
            return _of_model(path, fingerprint)
    return None


def _of_model(path: Path, fingerprint: str) -> Calibration:
    calibration = load(path)
    if calibration.model != fingerprint:
        raise InvalidOption(
            "--calibration", str(path),
            f"it was made for another model, {calibration.model_name} ({calibration.model}); "
            f"this one is {fingerprint}",
            hint="Run `kvmem calibrate MODEL` for this model, or leave --calibration out.",
        )  # fmt: skip
    return calibration


class _Wrong(Exception):
    """A field is missing or has a value it cannot have."""


class _Fields:
    """An object of JSON, field by field."""

    def __init__(self, values: Any, where: str) -> None:
        self._where = where
        if not isinstance(values, dict):
            raise _Wrong(f"{where.rstrip('.') or 'it'} is not an object")
        self._values: Mapping[str, Any] = values

    def get(self, name: str, what: str, check: Callable[[Any], T | None]) -> T:
        """check: -> the value, or None if it is not `what`."""
        if name not in self._values:
            raise _Wrong(f"{self._where}{name} is missing")
        found = check(self._values[name])
        if found is None:
            raise _Wrong(f"{self._where}{name} is {self._values[name]!r:.60}, must be {what}")
        return found

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        def check(value: Any) -> float | None:
            return float(value) if _is_number(value) and low <= value <= high else None

        return self.get(name, f"a number from {low:g} to {high:g}", check)

    def whole(self, name: str) -> int:
        def check(value: Any) -> int | None:
            return value if type(value) is int and 0 <= value < 2**31 else None

        return self.get(name, "a whole number, at least 0", check)

    def text(self, name: str, choices: tuple[str, ...] = ()) -> str:
        def check(value: Any) -> str | None:
            return value if isinstance(value, str) and (not choices or value in choices) else None

        return self.get(name, " or ".join(choices) or "text", check)

    def flag(self, name: str) -> bool:
        return self.get(name, "true or false", lambda value: value if type(value) is bool else None)

    def channels(self, name: str) -> dict[str, float]:
        """Numbers from 0 to 1, one for each channel."""
        inner = _Fields(self.get(name, "an object", lambda value: value), f"{self._where}{name}.")
        if unknown := sorted(inner._values.keys() - set(CHANNELS)):
            raise _Wrong(f"{self._where}{name}.{unknown[0]} is not one of the channels {', '.join(CHANNELS)}")
        return {channel: inner.number(channel, 0, 1) for channel in CHANNELS}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _calibration(fields: _Fields) -> Calibration:
    if (version := fields.whole("format")) != FORMAT:
        raise _Wrong(f"its format is {version}, this program reads {FORMAT}")
    centred = fields.flag("centred")
    rows = fields.get("heads", "a list", lambda value: value if isinstance(value, list) and value else None)
    heads = tuple(_head(_Fields(row, f"heads[{i}]."), centred) for i, row in enumerate(rows))
    if len({(head.layer, head.head) for head in heads}) < len(heads):
        raise _Wrong("heads names one twice")
    shares = fields.channels("shares")
    if not 0 < sum(shares.values()) <= 1 + 1e-6:
        raise _Wrong(f"shares sum up to {sum(shares.values()):g}, must be more than 0 and at most 1")
    return Calibration(
        model=fields.text("model"),
        model_name=fields.text("model_name"),
        heads=heads,
        centred=centred,
        index_type=fields.text("index_type", INDEX_TYPES),
        spread=fields.channels("spread"),
        shares=shares,
        weights=fields.channels("weights"),
        measured=fields.get("measured", "an object of numbers and texts", _measured),
    )


def _head(fields: _Fields, centred: bool) -> CalibratedHead:
    mean_q = fields.get("mean_q", "a list of numbers", _vector) if centred else None
    return CalibratedHead(
        fields.whole("layer"), fields.whole("head"), fields.number("agreement", 0, 1), mean_q
    )


def _vector(value: Any) -> tuple[float, ...] | None:
    if not isinstance(value, list) or not value or not all(_is_number(x) for x in value):
        return None
    return tuple(float(x) for x in value)


def _measured(value: Any) -> dict[str, float | int | str] | None:
    if not isinstance(value, dict) or not all(_is_number(x) or isinstance(x, str) for x in value.values()):
        return None
    return value
