"""Probabilities that an answer reports, on a real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.memory.report import TextPiece
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import WorkspaceEngine, open_engine

QUESTION = "Count from one to five."


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[WorkspaceEngine]:
    with open_engine(smollm2, Settings(n_ctx=512, n_threads=2)) as engine:
        yield engine


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - float(logits.max())
    out: np.ndarray = x - np.log(np.exp(x).sum())
    return out


def test_they_are_those_of_the_logits_and_change_nothing(engine: WorkspaceEngine) -> None:
    seen: list[tuple[int, np.ndarray]] = []

    def watch(tokens: Any, logits: Any) -> Any:
        seen.append((len(tokens), logits.copy()))
        return logits

    with engine.workspace() as plain:
        expected = plain.ask(QUESTION, sampling=SamplingParams(temp=0), max_tokens=12).result()
    with engine.workspace() as workspace:
        sampling = SamplingParams(temp=0, n_probs=5)
        stream = workspace.ask(QUESTION, sampling=sampling, max_tokens=12, logits_processors=[watch])
        pieces = [event for event in stream if isinstance(event, TextPiece)]
        result = stream.result()
    assert result.tokens == expected.tokens and result.text == expected.text
    told = [*result.probs, *([result.end_probs] if result.end_probs else [])]
    assert tuple(p.token for p in told) == result.tokens
    assert [p for piece in pieces for p in piece.probs] == list(result.probs)
    assert b"".join(p.piece for p in result.probs).decode() == result.text
    first = seen[0][0]
    assert [n for n, _ in seen] == list(range(first, first + len(told)))
    for probs, (_, logits) in zip(told, seen, strict=True):
        want = log_softmax(logits)
        assert probs.logprob == pytest.approx(want.max(), abs=1e-5)
        assert [t for t, _, _ in probs.top] == np.argsort(-want, kind="stable")[:5].tolist()
        assert [x for _, _, x in probs.top] == pytest.approx(np.sort(want)[:-6:-1].tolist(), abs=1e-5)
        assert probs.top[0][0] == probs.token


def test_after_the_samplers_they_add_up_to_one(engine: WorkspaceEngine) -> None:
    with engine.workspace() as workspace:
        sampling = SamplingParams(seed=3, top_k=7, n_probs=20, post_sampling_probs=True)
        result = workspace.ask(QUESTION, sampling=sampling, max_tokens=12).result()
    assert result.probs
    for probs in result.probs:
        logprobs = [x for _, _, x in probs.top]
        assert 1 <= len(logprobs) <= 7 and logprobs == sorted(logprobs, reverse=True)
        assert np.exp(logprobs).sum() == pytest.approx(1, abs=1e-5)
        assert dict((t, x) for t, _, x in probs.top)[probs.token] == probs.logprob
