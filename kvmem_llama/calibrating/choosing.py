"""Chooses how the best heads are used, by what is found of passages whose place is known.

Centring and spread stay at their defaults unless another choice is better by more than two standard errors
of the difference: there are few questions, and all of them about short passages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from ..memory.channels import SHARES, WEIGHTS, shares_for
from ..memory.retrieval import fuse, spread
from ..memory.selector import order
from .cases import About
from .ranking import Head, block_shares, head_keys, tokens_of
from .reading import F64, I64, Read

BUDGETS: Final = (128, 256, 512)  # tokens that are selected
SPREADS: Final = (0.5, 0.25, 0.0)  # the first one of each is the default
CENTRED: Final = (False, True)
SHOWN: Final = 512  # tokens; figures at this budget are written down

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """One question about a passage, and the scores that each channel gives; [n_candidates] each."""

    about: About
    candidates: I64
    blocks: I64  # of each token of the passage
    lexical: F64
    mean_k: F64
    heads: Mapping[bool, F64]  # by whether queries are centred
    known: float = 1.0  # how much of the question the best block holds, see channels.shares_for


@dataclass(frozen=True, slots=True)
class Chosen:
    centred: bool
    spread: Mapping[str, float]


def head_scores(
    read: Read, heads: Sequence[Head], mean_q: Mapping[Head, F64], block: int
) -> list[dict[bool, F64]]:
    """Of each question: block scores of the candidates by these heads, as the token scorer computes them."""
    number = {layer.il: i for i, layer in enumerate(read.layers)}
    tokens = tokens_of(read.candidates, block)
    out: list[dict[bool, F64]] = [
        {centred: np.zeros(len(read.candidates)) for centred in CENTRED} for _ in read.asked
    ]
    groups: dict[tuple[int, int], list[int]] = {}
    for il, head in heads:
        layer = read.layers[number[il]]
        groups.setdefault((il, head // (layer.n_head // layer.n_head_kv)), []).append(head)
    for (il, head_kv), some in sorted(groups.items()):
        keys = head_keys(read.keys[number[il]], head_kv, tokens)
        means = np.array([mean_q[il, head] for head in some], np.float32)
        for asked, scores in zip(read.asked, out, strict=True):
            q = asked.rows.layers[number[il]][:, some]
            for centred in CENTRED:
                rows = q - means if centred else q
                shares = block_shares(keys, rows, read.layers[number[il]].scale, block)
                scores[centred] += shares.sum(axis=0) / len(heads)
    return out


def choose(trials: Sequence[Trial], block: int) -> Chosen:
    """Centring and spread of the heads, then the spread of the words."""
    centred, of_heads = best_of(
        {
            (centred, part): values(trials, {"heads": 1.0}, centred, {"heads": part}, block)
            for centred in CENTRED
            for part in SPREADS
        }
    )
    of_words = best_of(
        {part: values(trials, {"lexical": 1.0}, False, {"lexical": part}, block) for part in SPREADS}
    )
    return Chosen(centred, {"heads": of_heads, "lexical": of_words})


def best_of(options: Mapping[T, F64]) -> T:
    """The option with the highest mean, if it is better than the first one by more than two standard
    errors. options: values of the same questions, [n] each."""
    default = next(iter(options))
    best = max(options, key=lambda option: float(options[option].mean()))
    gain = options[best] - options[default]
    error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.inf
    return best if gain.mean() > 2 * error else default


def values(
    trials: Sequence[Trial],
    shares: Mapping[str, float],
    centred: bool,
    spreads: Mapping[str, float],
    block: int,
    budgets: Sequence[int] = BUDGETS,
) -> F64:
    """Of each question: the share of the passage's tokens that is found, mean over the budgets: [n]."""
    return np.array([_covered(trial, shares, centred, spreads, block, budgets) for trial in trials])


def _covered(
    trial: Trial,
    shares: Mapping[str, float],
    centred: bool,
    spreads: Mapping[str, float],
    block: int,
    budgets: Sequence[int],
) -> float:
    scores = {"lexical": trial.lexical, "mean_k": trial.mean_k, "heads": trial.heads[centred]}
    asked, orders = {}, {}
    for channel in shares:
        one = asked[channel] = spread(scores[channel], spreads.get(channel, 0.0))
        orders[channel] = order(one, trial.candidates)[: np.count_nonzero(one > 0)]
    best = fuse(asked, orders, shares_for(shares, trial.known), WEIGHTS, max(budgets) // block)
    found = [np.isin(trial.blocks, trial.candidates[best[: n // block]]).mean() for n in budgets]
    return float(np.mean(found))


def figures(trials: Sequence[Trial], chosen: Chosen, block: int) -> dict[str, float]:
    """Coverage of the passages at `SHOWN` tokens by each channel and by all of them, rounded."""
    ways: dict[str, Mapping[str, float]] = {
        **{channel: {channel: 1.0} for channel in ("mean_k", "lexical", "heads")},
        "fused": SHARES,
    }
    groups = {"": list(trials), "_reworded": [trial for trial in trials if trial.about == "reworded"]}
    out: dict[str, float] = {}
    for suffix, some in groups.items():
        for way, shares in ways.items():
            if some:
                found = values(some, shares, chosen.centred, chosen.spread, block, (SHOWN,))
                out[f"coverage_{SHOWN}_{way}{suffix}"] = round(float(found.mean()), 3)
    chance = [min(SHOWN / block / len(trial.candidates), 1.0) for trial in trials]
    out[f"coverage_{SHOWN}_random"] = round(float(np.mean(chance)), 3)
    return out
