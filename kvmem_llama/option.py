"""One row of the table of options: its type, unit, limits and names, and how it is read from text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .errors import InvalidOption

Value = int | float | bool | str

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_BYTES: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of two


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. `flags` are those of the command line, the first one is the one messages use."""

    name: str
    type: type
    unit: str
    default: Value
    help: str
    section: str
    flags: tuple[str, ...]
    choices: tuple[str, ...] = ()
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)  # words accepted in place of a number
    low: float = -math.inf
    high: float = math.inf
    separator: str = ""  # of the items of a text; a flag with one may be given several times

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return "KVMEM_" + self.name.upper()

    def parse(self, text: str, where: str = "") -> Value:
        """Value written as `text` in an environment variable or on a command line; raises InvalidOption."""
        where = where or self.flags[0]
        text = text.strip() if self.type is not str else text
        try:
            if self.type is bool:
                if text.lower() in _TRUE | _FALSE:
                    return text.lower() in _TRUE
                raise InvalidOption(where, text, "must be 1 or 0 (true/false, yes/no, on/off)")
            if self.type is int and text in self.words:
                return self.words[text]
            if self.type is int:
                return _bytes(text) if self.unit == "bytes" else int(text, 10)
            return float(text) if self.type is float else text
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            if self.unit == "bytes":
                kind = "a number of bytes, such as 500000 or 256M"
            raise InvalidOption(where, text, f"must be {kind}{self._or_words()}") from None

    def check(self, value: object) -> None:
        """Raises InvalidOption if `value` has the wrong type or lies outside the limits."""
        flag = self.flags[0]
        if self.type is float:
            good = isinstance(value, (int, float)) and not isinstance(value, bool)
        else:
            good = type(value) is self.type
        if not good:
            raise InvalidOption(flag, value, f"must be of type {self.type.__name__}")
        if self.choices and value not in self.choices:
            raise InvalidOption(flag, value, "must be one of " + ", ".join(self.choices))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise InvalidOption(flag, value, "must be a finite number")
            if not self.low <= value <= self.high:
                raise InvalidOption(flag, value, f"must be {self.limits}{self._or_words()}")

    @property
    def limits(self) -> str:
        """The allowed range in words; empty if there is none."""
        if math.isinf(self.low) and math.isinf(self.high):
            return ""
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        if math.isinf(self.low):
            return f"at most {self.high:.10g}"
        return f"from {self.low:g} to {self.high:.10g}"

    def _or_words(self) -> str:
        return f" or {', '.join(self.words)}" if self.words else ""


def _bytes(text: str) -> int:
    """A size such as 4096, 256M, 1.5GiB; the letters are powers of 1024. Raises ValueError."""
    digits = text.rstrip("KMGTkmgtiIbB")
    unit = text[len(digits) :].upper().removesuffix("B").removesuffix("I")
    if unit not in _BYTES:
        raise ValueError(text)
    return int(digits, 10) << _BYTES[unit] if "." not in digits else int(float(digits) * (1 << _BYTES[unit]))
