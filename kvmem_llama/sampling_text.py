"""The samplers' names and how lists of the sampling options are written as text, both as in llama.cpp.

common/sampling.cpp has the names, common/arg.cpp the rest.
"""

from __future__ import annotations

import re
from typing import Final

from .errors import InvalidOption

SAMPLERS: Final = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""The samplers of a chain in llama.cpp's default order."""

LETTERS: Final = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}
"""Letter of each sampler, and all samplers there are."""

_ALIASES: Final = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"} | {
    spelling: name
    for name in LETTERS.values()
    for spelling in (name, name.replace("_", "-"), name.replace("_", ""))
}
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[nrt'\"\\])")
_BIAS: Final = re.compile(r"(\d+)([+-](?:inf|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+))")

BREAKERS: Final = ("\n", ":", '"', "*")
"""Texts that end a repeated sequence for DRY, where nothing else is asked for."""


def sampler_name(text: str) -> str | None:
    """The sampler that llama.cpp takes this name for, such as top-k, topk or nucleus; None: there is none."""
    return _ALIASES.get(text.lower())


def samplers_of(text: str, where: str = "--samplers") -> tuple[str, ...]:
    """`penalties;top_k;temperature` -> names in this order. Raises InvalidOption, naming an unknown one."""
    names = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name = sampler_name(part)
        if name is None:
            raise InvalidOption(
                where, part, "there is no such sampler",
                hint="Separate their names by a semicolon: " + ";".join(LETTERS.values()) + ".",
            )  # fmt: skip
        names.append(name)
    return tuple(names)


def samplers_of_letters(text: str, where: str = "--sampler-seq") -> tuple[str, ...]:
    """`ekt` -> penalties, top_k, temperature. Raises InvalidOption, naming an unknown letter."""
    for letter in text:
        if letter not in LETTERS:
            known = ", ".join(f"{letter} {name}" for letter, name in LETTERS.items())
            raise InvalidOption(where, letter, "no sampler has this letter", hint=f"There are {known}.")
    return tuple(LETTERS[letter] for letter in text)


def logit_bias_of(text: str, where: str = "--logit-bias") -> tuple[tuple[int, float], ...]:
    """`15043+1.5,29871-inf` -> (token, what is added to its logit). Raises InvalidOption."""
    biases = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _BIAS.fullmatch(part)
        if match is None:
            raise InvalidOption(
                where, part, "must be a token id, + or -, and a number",
                hint="For example 15043+1 makes token 15043 likelier, 15043-inf forbids it.",
            )  # fmt: skip
        biases.append((int(match[1]), float(match[2])))
    return tuple(biases)


def breakers_of(text: str) -> tuple[str, ...]:
    r"""`\n;:` -> the texts between the semicolons, with \n, \x3b and the like resolved; `none`: no texts."""
    if text == "none":
        return ()
    return tuple(_ESCAPE.sub(_resolved, part) for part in text.split(";") if part)


def _resolved(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if code[0] == "x" else _ESCAPES[code]
