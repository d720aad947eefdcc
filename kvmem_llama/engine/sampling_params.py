"""How the tokens of an answer are chosen."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import numpy as np

from ..errors import InvalidOption
from ..sampling_text import (
    BREAKERS,
    LETTERS,
    SAMPLERS,
    breakers_of,
    logit_bias_of,
    samplers_of,
    samplers_of_letters,
)
from ..settings import BY_NAME, Settings
from .grammar import AnswerGrammar, ReasoningLimit

_INT_MAX: Final = 2**31 - 1
_FLOAT_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names, meanings and defaults are llama.cpp's (common/common.h). Checked when made: raises
    InvalidOption.

    Plain values only: it is stored with a step as JSON.
    """

    temp: float = 0.8  # <= 0: always the likeliest token
    top_k: int = 40  # tokens; <= 0: all
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typical_p: float = 1.0  # 1: off
    seed: int = -1  # -1: a random one, to be read from Sampler.seed
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # newest tokens that the penalties look at; 0: off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: str | AnswerGrammar = ""  # GBNF; empty: none
    reasoning: ReasoningLimit | None = None
    top_n_sigma: float = -1.0  # standard deviations of the logits; <= 0: off
    xtc_probability: float = 0.0  # of leaving out the likeliest tokens; 0: off
    xtc_threshold: float = 0.1  # least probability of a token that may be left out; > 0.5: off
    dynatemp_range: float = 0.0  # the temperature lies within temp +- this; 0: off
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # tokens; a longer repetition is penalized
    dry_penalty_last_n: int = 64  # newest tokens that DRY looks at; 0: off
    dry_sequence_breakers: tuple[str, ...] = BREAKERS
    mirostat: int = 0  # 1, 2: the version; most other samplers are not used then
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0  # probability near which tokens are chosen; < 0: off
    adaptive_decay: float = 0.9
    min_keep: int = 0  # tokens that top_p, min_p, typ_p and xtc leave at least
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, what is added to its logit; -inf: never
    ignore_eos: bool = False  # no token that ends the answer is chosen
    samplers: tuple[str, ...] = SAMPLERS  # in this order; sampling_text.LETTERS has all names
    n_probs: int = 0  # likeliest tokens that are reported with each token; 0: no probabilities
    post_sampling_probs: bool = False  # report the probabilities that the samplers leave

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _plain(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if isinstance(value, float) and not abs(value) <= _FLOAT_MAX:
                raise InvalidOption(_flag(field.name), value, "must be a finite number")
            is_long = isinstance(value, int) and not -_INT_MAX - 1 <= value <= _INT_MAX
            if is_long and not (field.name == "seed" and 0 <= value < 2**32):
                raise InvalidOption(_flag(field.name), value, "must be an integer of 32 bits")
        penalty = float(np.float32(self.repeat_penalty))
        if penalty <= 0 or 1 / penalty > _FLOAT_MAX:  # logits are multiplied and divided by it
            raise InvalidOption("--repeat-penalty", self.repeat_penalty, "must be greater than 0")
        if self.mirostat not in (0, 1, 2):
            raise InvalidOption("--mirostat", self.mirostat, "must be 0, 1 or 2")
        for name in ("dry_allowed_length", "min_keep", "n_probs"):
            if getattr(self, name) < 0:
                raise InvalidOption(_flag(name), getattr(self, name), "must be at least 0")
        if not 0 <= self.adaptive_decay < 1:
            raise InvalidOption("--adaptive-decay", self.adaptive_decay, "must be from 0 to 0.99")
        for name in self.samplers:
            if name not in LETTERS.values():
                raise InvalidOption(
                    "--samplers", name, "there is no such sampler",
                    hint="Give names out of " + ", ".join(LETTERS.values()) + ".",
                )  # fmt: skip
        for token, bias in self.logit_bias:
            if math.isnan(bias) or bias > _FLOAT_MAX:
                raise InvalidOption("--logit-bias", bias, f"token {token}: must be a number, or -inf")

    @classmethod
    def of(cls, settings: Settings, n_view: int) -> SamplingParams:
        """The sampling options of `settings`, but for the grammar. n_view: tokens that -1 stands for where
        an option says how many tokens are looked at. Raises InvalidOption."""
        letters = settings.sampler_seq
        return cls(
            temp=settings.temp,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            typical_p=settings.typical_p,
            seed=settings.seed,
            repeat_penalty=settings.repeat_penalty,
            repeat_last_n=n_view if settings.repeat_last_n < 0 else settings.repeat_last_n,
            frequency_penalty=settings.frequency_penalty,
            presence_penalty=settings.presence_penalty,
            top_n_sigma=settings.top_n_sigma,
            xtc_probability=settings.xtc_probability,
            xtc_threshold=settings.xtc_threshold,
            dynatemp_range=settings.dynatemp_range,
            dynatemp_exponent=settings.dynatemp_exponent,
            dry_multiplier=settings.dry_multiplier,
            dry_base=settings.dry_base,
            dry_allowed_length=settings.dry_allowed_length,
            dry_penalty_last_n=n_view if settings.dry_penalty_last_n < 0 else settings.dry_penalty_last_n,
            dry_sequence_breakers=breakers_of(settings.dry_sequence_breakers),
            mirostat=settings.mirostat,
            mirostat_tau=settings.mirostat_tau,
            mirostat_eta=settings.mirostat_eta,
            adaptive_target=settings.adaptive_target,
            adaptive_decay=settings.adaptive_decay,
            logit_bias=logit_bias_of(settings.logit_bias),
            ignore_eos=settings.ignore_eos,
            samplers=samplers_of_letters(letters) if letters else samplers_of(settings.samplers),
        )

    @property
    def has_penalties(self) -> bool:
        """A token that was there before is less likely, or likelier, than its logit says."""
        off = self.repeat_penalty == 1 and not self.frequency_penalty and not self.presence_penalty
        return self._has("penalties") and self.repeat_last_n > 0 and not off

    @property
    def has_dry(self) -> bool:
        """A token that goes on with a repetition is less likely."""
        is_on = self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_penalty_last_n > 0
        return self._has("dry") and is_on

    @property
    def n_looked_at(self) -> int:
        """Newest tokens of the history that the choice of a token depends on."""
        penalties = self.repeat_last_n if self.has_penalties else 0
        return max(penalties, self.dry_penalty_last_n if self.has_dry else 0)

    @property
    def is_argmax(self) -> bool:
        """The samplers choose the likeliest token, whatever else they do: what is left can only take others
        away."""
        moves = self.has_penalties or self.has_dry or self.logit_bias or self.ignore_eos
        takes_it = (
            (self._has("xtc") and self.xtc_probability > 0 and self.xtc_threshold <= 0.5)
            or (self._has("typ_p") and self.typical_p < 1)
            or self._has("infill")
            or self._has("adaptive_p")
        )
        return (
            self.temp <= 0
            and self.dynatemp_range <= 0
            and self._has("temperature")
            and not (self.mirostat or moves or takes_it)
        )

    def _has(self, sampler: str) -> bool:
        return not self.mirostat and sampler in self.samplers


def _plain(name: str, kind: str, value: Any) -> Any:
    """A value as JSON takes it: also given as one of numpy's numbers, or in a list. Raises InvalidOption for
    another type."""
    if kind == "int":
        return plain_int(_flag(name), value)
    if kind == "float":
        return _plain_float(name, value)
    if kind == "bool":
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise InvalidOption(_flag(name), value, "must be True or False")
    if name in ("samplers", "dry_sequence_breakers"):
        if isinstance(value, (tuple, list)) and all(isinstance(text, str) for text in value):
            return tuple(value)
        raise InvalidOption(_flag(name), value, "must be a tuple of texts", hint='For example ("top_k",).')
    if name == "logit_bias":
        pairs = isinstance(value, (tuple, list)) and all(
            isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value
        )
        if not pairs:
            raise InvalidOption(
                _flag(name), value, "must be pairs of a token and what is added to its logit",
                hint="For example ((5, -1.5), (6, float('-inf'))).",
            )  # fmt: skip
        return tuple((plain_int(_flag(name), token), _plain_float(name, bias)) for token, bias in value)
    if name == "grammar" and not isinstance(value, (str, AnswerGrammar)):
        raise InvalidOption(_flag(name), value, "must be GBNF, a text")
    if name == "reasoning" and not isinstance(value, (ReasoningLimit, NoneType)):
        raise InvalidOption(name, value, "must be a ReasoningLimit, or None")
    return value


def plain_int(name: str, value: Any) -> int:
    """An int, also of one of numpy's integers. Raises InvalidOption, naming `name`, for anything else."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise InvalidOption(name, value, "must be an integer")


def _plain_float(name: str, value: Any) -> float:
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise InvalidOption(_flag(name), "a very long integer", "must be a finite number") from None
    raise InvalidOption(_flag(name), value, "must be a number")


def _flag(name: str) -> str:
    return BY_NAME[name].flags[-1] if name in BY_NAME else name
