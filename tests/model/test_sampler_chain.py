"""The chain of samplers, compared with NumPy where it is a function of the logits, and where it draws with a
chain that is put together here by llama.cpp's own calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem_llama.engine.model import Model
from kvmem_llama.engine.sampler import Sampler, SamplingParams
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.errors import InvalidOption
from kvmem_llama.native import library
from kvmem_llama.settings import Settings

OFF = SamplingParams(temp=1, top_k=0, top_p=1, min_p=0, seed=1)
MANY = 10**6


@pytest.fixture(scope="module")
def vocab(smollm2: Path) -> Iterator[Vocab]:
    library.load()
    model = Model.load(smollm2, Settings())
    yield model.vocab
    model.close()


def random_logits(vocab: Vocab, seed: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab.n_tokens).astype(np.float32)


def probabilities(
    vocab: Vocab, params: SamplingParams, logits: np.ndarray, prompt: tuple[int, ...] = ()
) -> np.ndarray:
    """[n_vocab] what the samplers leave of `logits`, as they report it."""
    sampler = Sampler(vocab, replace(params, n_probs=MANY, post_sampling_probs=True))
    sampler.accept_prompt(prompt)
    probs = sampler.probs(logits, sampler.sample(logits), lambda token: b"")
    sampler.close()
    out = np.zeros(vocab.n_tokens)
    for token, _, logprob in probs.top:
        out[token] = np.exp(logprob)
    assert probs.logprob == pytest.approx(np.log(out[probs.token]))
    return out


def oracle(params: SamplingParams, logits: np.ndarray, prompt: tuple[int, ...] = ()) -> np.ndarray:
    """The same, for the samplers that need no chance, in llama.cpp's default order."""
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias:
        x[token] += bias
    newest = prompt[max(len(prompt) - params.repeat_last_n, 0) :]
    for token in set(newest):
        x[token] *= params.repeat_penalty if x[token] <= 0 else 1 / params.repeat_penalty
        x[token] -= newest.count(token) * params.frequency_penalty + params.presence_penalty
    if params.top_n_sigma > 0:
        finite = x[np.isfinite(x)]
        x[x < finite.max() - params.top_n_sigma * finite.std()] = -np.inf
    order = np.argsort(-x, kind="stable")
    keep = order[: params.top_k] if params.top_k > 0 else order
    if params.top_p < 1:
        sums = np.cumsum(softmax(x[keep]))
        keep = keep[: max(int(np.argmax(sums >= params.top_p)) + 1, params.min_keep)]
    if params.min_p > 0:
        n = int((x[keep] >= x[keep[0]] + np.log(params.min_p)).sum())
        keep = keep[: max(n, params.min_keep)]
    p = softmax(x[keep])
    temp = params.temp
    if params.dynatemp_range > 0:
        low = max(0.0, temp - params.dynatemp_range)
        entropy = -(p[p > 0] * np.log(p[p > 0])).sum() / np.log(len(p))
        temp = low + (temp + params.dynatemp_range - low) * entropy**params.dynatemp_exponent
    out = np.zeros(len(x))
    out[keep] = softmax(x[keep] / temp) if temp > 0 else np.arange(len(keep)) == 0
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


PROMPT = (7, 100, 7, 9000, 100, 7, 11)
HISTORY = {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temp": 0.6},
        {"temp": 0.0},
        {"logit_bias": ((7, 4.0), (100, -np.inf), (7, 1.0))},
        {"repeat_penalty": 1.5},
        HISTORY,
        {**HISTORY, "repeat_last_n": 3},
        {**HISTORY, "repeat_last_n": 0},
        {"repeat_penalty": 0.5, "frequency_penalty": -1.0},
        {"top_n_sigma": 1.0},
        {"top_n_sigma": 1.5, "temp": 2.0},
        {"top_k": 5},
        {"top_k": 5, "top_p": 0.5},
        {"top_p": 0.3},
        {"top_p": 0.01, "min_keep": 4},
        {"min_p": 0.3},
        {"min_p": 0.9, "min_keep": 6},
        {"top_k": 50, "min_p": 0.9, "min_keep": 6},
        {"top_k": 3, "min_keep": 9},  # top_k does not ask
        {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "temp": 0.8, "top_k": 60},
        {"dynatemp_range": 1.5, "temp": 0.0, "top_k": 20},
        {**HISTORY, "logit_bias": ((11, 9.0),), "top_k": 40, "top_p": 0.95, "min_p": 0.05, "temp": 0.8},
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_left_of_the_logits_is_what_numpy_says(
    vocab: Vocab, options: dict[str, Any], seed: int
) -> None:
    logits = random_logits(vocab, seed)
    logits[list(set(PROMPT))] += 8  # so that they are among what is left
    params = replace(OFF, **options)
    got, want = probabilities(vocab, params, logits, PROMPT), oracle(params, logits, PROMPT)
    assert np.array_equal(got > 0, want > 0)
    assert np.abs(got - want).max() < 1e-5


def test_tokens_that_end_an_answer_can_be_forbidden(vocab: Vocab) -> None:
    logits = random_logits(vocab, 3)
    logits[list(vocab.eogs)] = 50
    for temp in (0.0, 1.0):
        assert vocab.is_eog(next(drawn(Sampler(vocab, replace(OFF, temp=temp)), [logits])))
        sampler = Sampler(vocab, replace(OFF, temp=temp, ignore_eos=True))
        assert not any(vocab.is_eog(token) for token in drawn(sampler, [logits] * 20))


def drawn(sampler: Sampler, rows: list[np.ndarray]) -> Iterator[int]:
    for logits in rows:
        token = sampler.sample(logits)
        sampler.accept(token)
        yield token
    sampler.close()


def stock(llama: Any, chain: list[Any], rows: list[np.ndarray], prompt: tuple[int, ...]) -> list[int]:
    """Tokens that a chain of llama.cpp's own draws from `rows`."""
    whole = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for part in chain:
        llama.llama_sampler_chain_add(whole, part)
    for token in prompt:
        llama.llama_sampler_accept(whole, token)
    out = []
    for logits in rows:
        data = (llama.llama_token_data * len(logits))()
        for i, logit in enumerate(logits.tolist()):
            data[i] = llama.llama_token_data(id=i, logit=logit, p=0.0)
        array = llama.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
        llama.llama_sampler_apply(whole, ctypes.byref(array))
        out.append(int(array.data[array.selected].id))
        llama.llama_sampler_accept(whole, out[-1])
    llama.llama_sampler_free(whole)
    return out


def breakers(*texts: bytes) -> tuple[Any, int]:
    return (ctypes.c_char_p * len(texts))(*texts), len(texts)


SEED = 42
DEFAULT_BREAKERS = (b"\n", b":", b'"', b"*")
CHAINS: dict[str, tuple[dict[str, Any], Callable[[Any, Any], list[Any]]]] = {
    "the defaults": (
        {},
        lambda m, v: [
            m.llama_sampler_init_top_k(40),
            m.llama_sampler_init_top_p(0.95, 0),
            m.llama_sampler_init_min_p(0.05, 0),
            m.llama_sampler_init_temp(0.8),
            m.llama_sampler_init_dist(SEED),
        ],
    ),
    "everything": (
        {
            "repeat_penalty": 1.2,
            "frequency_penalty": 0.1,
            "dry_multiplier": 0.8,
            "dry_penalty_last_n": 200,
            "top_n_sigma": 2.5,
            "top_k": 100,
            "typical_p": 0.9,
            "top_p": 0.98,
            "min_p": 0.01,
            "min_keep": 2,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.05,
            "temp": 1.2,
            "dynatemp_range": 0.4,
            "dynatemp_exponent": 1.5,
            "logit_bias": ((4, 3.0),),
        },
        lambda m, v: [
            m.llama_sampler_init_logit_bias(
                v.n_tokens, 1, (m.llama_logit_bias * 1)(m.llama_logit_bias(token=4, bias=3.0))
            ),
            m.llama_sampler_init_penalties(v.n_tokens, 64, 1.2, 0.1, 0.0),
            m.llama_sampler_init_dry(v.pointer, 0.8, 1.75, 2, 200, *breakers(*DEFAULT_BREAKERS)),
            m.llama_sampler_init_top_n_sigma(2.5),
            m.llama_sampler_init_top_k(100),
            m.llama_sampler_init_typical(0.9, 2),
            m.llama_sampler_init_top_p(0.98, 2),
            m.llama_sampler_init_min_p(0.01, 2),
            m.llama_sampler_init_xtc(0.5, 0.05, 2, SEED),
            m.llama_sampler_init_temp_ext(1.2, 0.4, 1.5),
            m.llama_sampler_init_dist(SEED),
        ],
    ),
    "another order": (
        {"samplers": ("temperature", "min_p", "top_k"), "top_p": 0.1, "top_k": 7, "repeat_penalty": 2.0},
        lambda m, v: [
            m.llama_sampler_init_temp_ext(0.8, 0.0, 1.0),
            m.llama_sampler_init_min_p(0.05, 0),
            m.llama_sampler_init_top_k(7),
            m.llama_sampler_init_dist(SEED),
        ],
    ),
    "no samplers": ({"samplers": (), "temp": 0.0}, lambda m, v: [m.llama_sampler_init_dist(SEED)]),
    "dry": (
        {
            "dry_multiplier": 2.0,
            "dry_base": 1.5,
            "dry_allowed_length": 1,
            "dry_sequence_breakers": ("a", ";"),
        },
        lambda m, v: [
            m.llama_sampler_init_dry(v.pointer, 2.0, 1.5, 1, 64, *breakers(b"a", b";")),
            m.llama_sampler_init_top_k(40),
            m.llama_sampler_init_top_p(0.95, 0),
            m.llama_sampler_init_min_p(0.05, 0),
            m.llama_sampler_init_temp(0.8),
            m.llama_sampler_init_dist(SEED),
        ],
    ),
    "greedy with dry": (
        {"dry_multiplier": 5.0, "temp": 0.0},
        lambda m, v: [
            m.llama_sampler_init_dry(v.pointer, 5.0, 1.75, 2, 64, *breakers(*DEFAULT_BREAKERS)),
            m.llama_sampler_init_greedy(),
        ],
    ),
    "infill": (
        {"samplers": ("top_k", "infill")},
        lambda m, v: [
            m.llama_sampler_init_top_k(40),
            m.llama_sampler_init_infill(v.pointer),
            m.llama_sampler_init_dist(SEED),
        ],
    ),
    "adaptive_p, which is last wherever it stands": (
        {"samplers": ("adaptive_p", "top_k"), "adaptive_target": 0.3, "adaptive_decay": 0.7},
        lambda m, v: [m.llama_sampler_init_top_k(40), m.llama_sampler_init_adaptive_p(0.3, 0.7, SEED)],
    ),
    "mirostat": (
        {"mirostat": 1, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "top_k": 2, "repeat_penalty": 2.0},
        lambda m, v: [
            m.llama_sampler_init_temp(0.8),
            m.llama_sampler_init_mirostat(v.n_tokens, SEED, 4.0, 0.2, 100),
        ],
    ),
    "mirostat 2": (
        {"mirostat": 2, "temp": 1.5},
        lambda m, v: [m.llama_sampler_init_temp(1.5), m.llama_sampler_init_mirostat_v2(SEED, 5.0, 0.1)],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_seed_draws_what_a_chain_of_llama_cpp_draws(vocab: Vocab, name: str) -> None:
    options, chain = CHAINS[name]
    llama = library.import_binding()
    rows = [random_logits(vocab, 100 + i % 4, 2.0) for i in range(10)]
    rows = [np.where(np.arange(vocab.n_tokens) < 30, row + 9, row).astype(np.float32) for row in rows]
    prompt = (3, 4, 5, 6, 3, 4, 5)
    sampler = Sampler(vocab, SamplingParams(**{"seed": SEED, **options}))
    sampler.accept_prompt(prompt)
    want = stock(llama, chain(llama, vocab), rows, prompt)
    assert list(drawn(sampler, rows)) == want
    assert len(set(want)) > 1


def test_a_repeated_sequence_is_not_continued_with_dry(vocab: Vocab) -> None:
    logits = np.zeros(vocab.n_tokens, dtype=np.float32)
    logits[[300, 400]] = 10.0, 9.5
    sequence = (500, 600, 700, 300, 500, 600, 700)
    assert probabilities(vocab, replace(OFF, temp=0.0), logits, sequence).argmax() == 300
    dry = replace(OFF, temp=0.0, dry_multiplier=0.8)
    assert probabilities(vocab, dry, logits, sequence).argmax() == 400
    broken = replace(dry, dry_sequence_breakers=(vocab.piece(700).decode(),))
    assert probabilities(vocab, broken, logits, sequence).argmax() == 300


def test_greedy_probabilities_after_sampling_leave_one_token(vocab: Vocab) -> None:
    logits = random_logits(vocab, 9)
    got = probabilities(vocab, SamplingParams(temp=0), logits)
    assert got.argmax() == logits.argmax() and got.sum() == pytest.approx(1) and (got > 0).sum() == 1


def test_a_bias_of_no_token_is_refused(vocab: Vocab) -> None:
    for token in (-1, vocab.n_tokens):
        with pytest.raises(InvalidOption, match="logit-bias"):
            Sampler(vocab, SamplingParams(logit_bias=((token, 1.0),)))


def test_looking_at_very_many_tokens_sets_no_memory_aside_for_them(vocab: Vocab) -> None:
    most = 2**31 - 1
    params = SamplingParams(
        temp=0, repeat_penalty=1.1, repeat_last_n=most, dry_multiplier=1.0, dry_penalty_last_n=most
    )
    assert len(list(drawn(Sampler(vocab, params), [random_logits(vocab, 1)]))) == 1
