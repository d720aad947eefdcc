"""Content words of a text as Porter stems (M. F. Porter, "An algorithm for suffix stripping", 1980)."""

from __future__ import annotations

import re
from collections.abc import Iterable

_FUNCTION_WORDS = """
a about after again against all also although always am among an and another any anyone anything are
around as at away back be because been before behind being below besides between both but by can
cannot could did do does doing done down during each either else enough ever every everyone
everything except few first for from further get gets getting given go goes going got had has have
having he her here hers herself him himself his how however i if in instead into is it its itself
just last least less let like made make makes many may me might mine more most mr mrs much must my
myself neither never no nobody nor not nothing now of off often on once one only or other others
ought our ours out over own perhaps quite rather same shall she should since so some someone
something soon still such than that the their theirs them themselves then there therefore these they
thing this those though through thus till to together too toward towards two under until unless up
upon us very was we were what whatever when where whether which while who whom whose why will with
within without would yet you your yours yourself s t d ll m re ve don
"""
STOP_WORDS = frozenset(_FUNCTION_WORDS.split())

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # camelCase and snake_case are taken apart

_STEP_2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble",
    "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate",
    "alism": "al", "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive",
    "biliti": "ble", "logi": "log",
}  # fmt: skip
_STEP_3 = {
    "icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": "",
}  # fmt: skip
# "ion" goes only after s or t, which stay.
_STEP_4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "sion", "tion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip


def content_stems(text: str) -> dict[str, str]:
    """Each stem of the text's content words, and the first word that has it. Stop words are left out."""
    stems: dict[str, str] = {}
    for word in _WORD.findall(text):
        if word.lower() not in STOP_WORDS:
            stems.setdefault(stem(word), word)
    return stems


def stem(word: str) -> str:
    """The Porter stem of one word, in lower case."""
    word = word.lower()
    if len(word) <= 2 or not word.isascii() or not word.isalpha():
        return word
    word = _without_plural(word)
    word = _without_past(word)
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    word = _replaced(word, _STEP_2)
    word = _replaced(word, _STEP_3)
    word = _without_last(word)
    if word.endswith("e") and (
        _n_turns(word[:-1]) > 1 or (_n_turns(word[:-1]) == 1 and not _short(word[:-1]))
    ):
        word = word[:-1]
    if word.endswith("ll") and _n_turns(word) > 1:
        word = word[:-1]
    return word


def _without_plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _without_past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _n_turns(word[:-3]) > 0 else word
    for ending in ("ed", "ing"):
        if word.endswith(ending):
            rest = word[: -len(ending)]
            if not _has_vowel(rest):
                return word
            if rest.endswith(("at", "bl", "iz")) or (_n_turns(rest) == 1 and _short(rest)):
                return rest + "e"
            doubled = len(rest) > 1 and rest[-1] == rest[-2] and rest[-1] not in "aeioulsz"
            return rest[:-1] if doubled else rest
    return word


def _replaced(word: str, endings: dict[str, str]) -> str:
    ending = _longest(word, endings)
    if ending and _n_turns(word[: -len(ending)]) > 0:
        return word[: -len(ending)] + endings[ending]
    return word


def _without_last(word: str) -> str:
    ending = _longest(word, _STEP_4)
    if not ending:
        return word
    n_cut = 3 if ending in ("sion", "tion") else len(ending)
    return word[:-n_cut] if _n_turns(word[:-n_cut]) > 1 else word


def _longest(word: str, endings: Iterable[str]) -> str:
    return max((ending for ending in endings if word.endswith(ending)), key=len, default="")


def _shape(word: str) -> str:
    """c for each consonant, v for each vowel; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _has_vowel(word: str) -> bool:
    return "v" in _shape(word)


def _n_turns(word: str) -> int:
    """Porter's m: how often a consonant follows a vowel."""
    return _shape(word).count("vc")


def _short(word: str) -> bool:
    """Porter's *o: ends consonant, vowel, consonant, and the last is none of w, x, y."""
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"
