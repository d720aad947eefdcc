"""The channels that find blocks: which of them a score asks, and what each of them is worth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from kvmem_llama.calibration import Calibration
from kvmem_llama.errors import InvalidOption
from kvmem_llama.settings import Settings

SPREAD: Final[Mapping[str, float]] = {"lexical": 0.5, "heads": 0.5}
"""By channel: share of a block's score that its neighbours get, none where it is not named. 32 tokens are
less than most statements."""

SHARES: Final[Mapping[str, float]] = {"heads": 0.2, "lexical": 0.5}
WEIGHTS: Final[Mapping[str, float]] = {"heads": 0.4, "lexical": 0.6}
"""Shares and weights of the fused score of a calibrated model, see retrieval.fuse. They are chosen by the
annotated questions of docs/retrieval.md, not for each model: questions that a calibration can make up by
itself do not show what words add."""

STRANGE: Final = 0.1
STRANGE_SHARES: Final[Mapping[str, float]] = {"heads": 0.6, "lexical": 0.1}
"""Shares for a question whose words the history hardly has: no block holds more than a tenth of it, by the
weight of its words. What words find then is mostly chance."""

UNCALIBRATED: Final[Mapping[str, float]] = {"lexical": 0.95, "mean_k": 0.05}
"""The shares of a model without a calibration, and the weights by which its scores are shown."""

NOT_CALIBRATED: Final = "not calibrated: lexical + mean_k; run kvmem calibrate MODEL"


def shares_for(shares: Mapping[str, float], known: float) -> Mapping[str, float]:
    """`shares`, or those for a question of strange words.

    known: how much of the question, by the weight of its words, the best candidate holds: 0 .. 1.
    """
    return STRANGE_SHARES if known < STRANGE and set(shares) == set(STRANGE_SHARES) else shares


@dataclass(frozen=True, slots=True)
class Channels:
    """Of one engine."""

    shares: Mapping[str, float]  # of the selection, by channel, see retrieval.fuse; at most 1 together
    spread: Mapping[str, float] = field(default_factory=lambda: SPREAD)
    calibration: Calibration | None = None  # of the heads that the channel `heads` reads
    weights: Mapping[str, float] = field(default_factory=dict)  # of scores that are added; 1 for any other

    @classmethod
    def of(cls, settings: Settings, calibration: Calibration | None) -> Channels:
        """Those of the score that was asked for. calibration: of the model, None if there is none.

        Raises InvalidOption for the score `heads` without a calibration.
        """
        spread = SPREAD if calibration is None else {**SPREAD, **calibration.spread}
        if settings.score == "heads":
            if calibration is None:
                raise InvalidOption(
                    "--score", settings.score, "nothing is known about the heads of this model",
                    hint="Run `kvmem calibrate MODEL` once, or use --score fused or mean_k.",
                )  # fmt: skip
            return cls({"heads": 1.0}, spread, calibration)
        if settings.score == "fused":
            if calibration is None:
                return cls(UNCALIBRATED, spread, weights=UNCALIBRATED)
            weights = calibration.weights
            shares = {name: share for name, share in calibration.shares.items() if share or weights[name]}
            return cls(shares, spread, calibration if "heads" in shares else None, weights)
        return cls({settings.score: 1.0}, spread)

    def __contains__(self, channel: object) -> bool:
        return channel in self.shares

    @property
    def hint(self) -> str:
        """What would find more than these; empty if nothing is known to."""
        return NOT_CALIBRATED if set(self.shares) == set(UNCALIBRATED) else ""

    @property
    def calibration_id(self) -> str:
        """Tells one calibration from another: 8 hexadecimal digits; empty without one."""
        if self.calibration is None:
            return ""
        facts = json.dumps(asdict(self.calibration), sort_keys=True)
        return hashlib.blake2b(facts.encode(), digest_size=4).hexdigest()
