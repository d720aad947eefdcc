from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmem_llama.engine.model import Model
from kvmem_llama.engine.sampler import Sampler, SamplingParams
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.errors import InvalidOption
from kvmem_llama.native import library
from kvmem_llama.settings import Settings


@pytest.fixture(scope="module")
def vocab(smollm2: Path) -> Iterator[Vocab]:
    library.load()
    model = Model.load(smollm2, Settings())
    yield model.vocab
    model.close()


@pytest.fixture
def logits(vocab: Vocab) -> np.ndarray:
    return np.random.default_rng(5).normal(0, 3, vocab.n_tokens).astype(np.float32)


def draw(vocab: Vocab, params: SamplingParams, logits: np.ndarray, n: int = 40) -> list[int]:
    sampler = Sampler(vocab, params)
    tokens = []
    for _ in range(n):
        tokens.append(sampler.sample(logits))
        sampler.accept(tokens[-1])
    sampler.close()
    return tokens


@pytest.mark.parametrize("temp", [0.0, -1.0])
def test_without_temperature_the_likeliest_token_is_taken(
    vocab: Vocab, logits: np.ndarray, temp: float
) -> None:
    assert set(draw(vocab, SamplingParams(temp=temp), logits)) == {int(logits.argmax())}


def test_the_logits_are_not_touched(vocab: Vocab, logits: np.ndarray) -> None:
    before = logits.copy()
    draw(vocab, SamplingParams(repeat_penalty=1.3), logits)
    assert np.array_equal(before, logits)


def test_equal_seeds_draw_equal_tokens_and_others_do_not(vocab: Vocab, logits: np.ndarray) -> None:
    first = draw(vocab, SamplingParams(seed=7), logits)
    assert first == draw(vocab, SamplingParams(seed=7), logits)
    assert first != draw(vocab, SamplingParams(seed=8), logits)
    assert len(set(first)) > 1


def test_a_random_seed_can_be_read_and_used_again(vocab: Vocab, logits: np.ndarray) -> None:
    sampler = Sampler(vocab, SamplingParams(seed=-1))
    tokens = [sampler.sample(logits) for _ in range(30)]
    sampler.close()
    assert draw(vocab, SamplingParams(seed=sampler.seed), logits, 30) == tokens


def test_closing_twice_is_harmless(vocab: Vocab) -> None:
    sampler = Sampler(vocab, SamplingParams(seed=3))
    sampler.close()
    sampler.close()


@pytest.mark.parametrize(
    ("params", "n_most"),
    [
        (SamplingParams(top_k=3, top_p=1, min_p=0, temp=5.0), 3),
        (SamplingParams(top_k=0, top_p=1e-6, min_p=0, temp=1.0), 1),
        (SamplingParams(top_k=0, top_p=1, min_p=0.999999, temp=1.0), 1),
        (SamplingParams(top_k=50, typical_p=1e-6, top_p=1, min_p=0, temp=1.0), 1),
    ],
)
def test_each_filter_limits_what_can_be_drawn(
    vocab: Vocab, logits: np.ndarray, params: SamplingParams, n_most: int
) -> None:
    order = np.argsort(-logits)
    drawn = set(draw(vocab, params, logits, 60))
    assert len(drawn) <= n_most
    if params.typical_p == 1:
        assert drawn <= set(order[:n_most].tolist())


def test_a_penalty_makes_repeated_tokens_less_likely(vocab: Vocab) -> None:
    logits = np.zeros(vocab.n_tokens, dtype=np.float32)
    logits[[100, 200, 300]] = 10.0, 9.9, 9.8
    params = SamplingParams(temp=0, repeat_penalty=1.5)
    assert draw(vocab, params, logits, 3) == [100, 200, 300]
    sampler = Sampler(vocab, params)
    sampler.accept_prompt([100, 200])
    assert sampler.sample(logits) == 300
    sampler.close()
    assert draw(vocab, SamplingParams(temp=0, repeat_penalty=1.5, repeat_last_n=0), logits, 3) == [100] * 3


def test_a_grammar_holds_whatever_the_logits_say(vocab: Vocab) -> None:
    grammar = 'root ::= "yes" | "no"'
    logits = np.random.default_rng(1).normal(0, 3, vocab.n_tokens).astype(np.float32)
    for seed in range(5):
        sampler = Sampler(vocab, SamplingParams(seed=seed, top_k=0, grammar=grammar))
        text = b""
        for _ in range(8):
            token = sampler.sample(logits)
            if vocab.is_eog(token):
                break
            sampler.accept(token)
            text += vocab.piece(token)
        sampler.close()
        assert text in (b"yes", b"no")


def test_a_grammar_that_allows_the_choice_changes_nothing(vocab: Vocab, logits: np.ndarray) -> None:
    free = draw(vocab, SamplingParams(seed=4), logits, 1)
    assert draw(vocab, SamplingParams(seed=4, grammar="root ::= [^\\x00]*"), logits, 1) == free


def test_a_broken_grammar_and_an_impossible_penalty_are_refused(vocab: Vocab) -> None:
    with pytest.raises(InvalidOption, match="grammar"):
        Sampler(vocab, SamplingParams(grammar="root ::= ("))
    with pytest.raises(InvalidOption, match="repeat-penalty"):
        Sampler(vocab, SamplingParams(repeat_penalty=0.0))


def test_the_settings_hold_the_same_defaults() -> None:
    assert SamplingParams.of(Settings(), 512) == SamplingParams()
    assert SamplingParams.of(Settings(repeat_last_n=-1), 512).repeat_last_n == 512
