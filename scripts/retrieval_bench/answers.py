"""How likely the right answers are to the model under each policy: log-probability of their tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.errors import MandatoryTooLarge
from kvmem_llama.memory import answering
from kvmem_llama.native.layout import F32
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import open_engine

from .coverage import LENGTHS
from .questions import histories

_ANSWER: Final = SamplingParams(temp=0, seed=1_000_003)
"""Of the questions. Known by its seed, as a conversation makes a copy of it; a summary has another one."""

POLICIES = {
    "full context": {"policy": "full_context", "n_ctx": 0},
    "sliding window": {"policy": "sliding_window"},
    "compaction": {"policy": "compaction"},
    "compaction + text": {"policy": "compaction_retrieval"},
    "kvmem, mean_k": {"policy": "kvmem", "score": "mean_k"},
    "kvmem, lexical": {"policy": "kvmem", "score": "lexical"},
    "kvmem, default": {"policy": "kvmem"},
}


@dataclass(frozen=True, slots=True)
class Likelihood:
    """One question: mean log-probability (nats) of the answer's tokens by policy; NaN where the history
    does not fit."""

    set: str
    kind: str
    id: str
    mean: dict[str, float]


class _Forced:
    """Stands where a sampler does: says the right answer whatever the model would say, and notes how likely
    each of its tokens was."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._left = list(answer)
        self.log_p: list[float] = []

    def sample(self, logits: F32) -> int:
        x = logits.astype(np.float64)
        token = self._left.pop(0)
        self.log_p.append(float(x[token] - x.max() - np.log(np.exp(x - x.max()).sum())))
        return token

    def accept(self, token: int) -> None:
        pass

    def accept_prompt(self, tokens: object) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def _saying(forced: _Forced) -> Iterator[None]:
    real = answering.Sampler

    def make(vocab: Vocab, params: SamplingParams, *more: Any) -> Any:
        return forced if params.seed == _ANSWER.seed else real(vocab, params, *more)

    answering.Sampler = make  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        answering.Sampler = real  # type: ignore[misc]


def measure(model: Path, settings: Settings, names: Sequence[str], n_most: int) -> list[Likelihood]:
    """The histories of 7K tokens of the sets, at most `n_most` of each, read once under every policy."""
    some = [(name, h) for name in names for h in list(histories(name, *LENGTHS["7K"]))[:n_most]]
    found: dict[str, Likelihood] = {}
    for policy, options in POLICIES.items():
        with open_engine(model, replace(settings, **options)) as engine:
            vocab = engine.core.model.vocab
            for name, history in some:
                print(f"  {policy}: {history.id}", file=sys.stderr, flush=True)
                with engine.workspace() as ws:
                    try:
                        ws.read(history.text).result()
                        n_read = ws.n_tokens
                    except MandatoryTooLarge:
                        n_read = 0
                    for question in history.questions:
                        known = found.setdefault(
                            question.id, Likelihood(name, question.kind, question.id, {})
                        )
                        known.mean[policy] = np.nan
                        if not n_read:
                            continue
                        answer = vocab.tokenize(question.answer, parse_special=False).tolist()
                        forced = _Forced(answer)
                        with _saying(forced):
                            ws.ask(question.text, sampling=_ANSWER, max_tokens=len(answer)).result()
                        assert len(forced.log_p) == len(answer), question.id
                        ws.truncate(n_read)
                        known.mean[policy] = float(np.mean(forced.log_p))
    return list(found.values())


def table(found: Sequence[Likelihood]) -> list[str]:
    """Means with standard errors, and paired differences to full context where the history fits."""
    lines = ["| set | n | " + " | ".join(POLICIES) + " |", "|---|---|" + "---|" * len(POLICIES)]
    groups: dict[str, list[Likelihood]] = {}
    for one in found:
        groups.setdefault("reworded" if one.kind == "reworded" else one.set, []).append(one)
    for name, some in (groups | {"all": list(found)}).items():
        cells = []
        for policy in POLICIES:
            values = np.array([one.mean[policy] for one in some])
            values = values[~np.isnan(values)]
            if not len(values):
                cells.append("does not fit")
                continue
            error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
            cells.append(f"{values.mean():.2f} ± {error:.2f}")
        lines.append(f"| {name} | {len(some)} | " + " | ".join(cells) + " |")
    return lines
