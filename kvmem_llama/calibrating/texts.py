"""The texts that models are calibrated on: prose and code that come with Python.

They differ a little between versions of Python, and so may what is measured on them.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ..errors import InputError

Kind = Literal["prose", "code"]

_HINT: Final = (
    "Use a Python with its standard library whole (Debian, Ubuntu: apt-get install libpython3-stdlib)."
)


@dataclass(frozen=True, slots=True)
class Source:
    """Sources of one kind that are read one after the other, as one text."""

    kind: Kind
    names: tuple[str, ...]  # topics of pydoc_data, or files of the standard library


RANKING: Final = (
    Source("prose", ("compound", "import", "naming", "execmodel")),
    Source("code", ("smtplib.py", "calendar.py", "fractions.py")),
)
"""Heads are ranked on these. Topics explain, files do: a memory holds both."""

CHOOSING: Final = (
    Source("prose", ("types", "objects", "numeric-types", "function")),
    Source("code", ("statistics.py", "configparser.py", "poplib.py")),
)
"""How the heads are used is chosen on these."""


def text_of(source: Source, n_characters: int) -> str:
    """The beginning of every one of its texts, joined: about `n_characters`.

    Raises InputError if this Python has not got one of them.
    """
    each = -(-n_characters // len(source.names))
    parts = [_prose(name) if source.kind == "prose" else _code(name) for name in source.names]
    return "\n\n".join(part[:each] for part in parts)


def _prose(topic: str) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError("the topics of pydoc", "this Python has none", hint=_HINT) from None
    if topic not in topics:
        raise InputError(f"the topic {topic!r} of pydoc", "this Python has none", hint=_HINT)
    return str(topics[topic])


def _code(name: str) -> str:
    path = Path(sysconfig.get_path("stdlib")) / name
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), str(error), hint=_HINT) from None
