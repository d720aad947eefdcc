"""Whether a text stands in a history already, by its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvmem_llama.occurrence import occurs

RNG = np.random.default_rng(0)
HISTORY = RNG.integers(0, 50, 5000).astype(np.int32)


@pytest.mark.parametrize(("start", "end"), [(0, 5000), (0, 30), (4900, 5000), (700, 3000)])
def test_a_text_is_found_wherever_it_stands_whatever_its_outermost_tokens_are(start: int, end: int) -> None:
    tokens = HISTORY[start:end].copy()
    tokens[:4] = tokens[-4:] = 77
    assert occurs(tokens, HISTORY)


@pytest.mark.parametrize("at", [10, 1000, 2295])
def test_a_text_that_was_changed_is_another_one(at: int) -> None:
    tokens = HISTORY[700:3000].copy()
    tokens[min(at, len(tokens) - 6)] = 77
    assert not occurs(tokens, HISTORY)


def test_the_newest_of_many_beginnings_are_looked_at() -> None:
    history = np.concatenate([np.zeros(3000, np.int32), HISTORY])
    assert occurs(np.concatenate([np.zeros(100, np.int32), HISTORY[:100]]), history)
    assert occurs(np.zeros(200, np.int32), history)


@pytest.mark.parametrize("n", [0, 1, 8, 23])
def test_a_few_words_are_no_text(n: int) -> None:
    assert not occurs(HISTORY[:n], HISTORY)
    assert not occurs(HISTORY, HISTORY[:n])
