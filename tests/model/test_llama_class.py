"""kvmem_llama.Llama where llama_cpp.Llama has an end: long prompts, long answers, kept workspaces."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_model

from kvmem_llama import Llama
from kvmem_llama.errors import EngineClosed, InvalidOption, ModelNotFound

GREEDY = {"temperature": 0.0}
WORDS = "amber birch cedar delta ember fjord grove heron inlet jetty kelp larch mango north ocean pine"
SMALL = {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight model with a token for each byte."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def llm(tiny: Path) -> Iterator[Llama]:
    made = Llama(str(tiny), report=True, **SMALL)
    yield made
    made.close()


def text(n: int) -> str:
    """`n` bytes of words."""
    names = WORDS.split()
    return " ".join(names[(i * i + 7 * i) % len(names)] for i in range(n // 6 + 1))[:n]


def test_a_prompt_longer_than_the_window_is_answered_from_what_it_asks_for(smollm2: Path) -> None:
    """The fact stands where the window cannot hold it; the second question evaluates only itself."""
    notes = [f"Note {i}: parcel {37 * i % 1000} went to room {i}." for i in range(60)]
    notes[20] = "Note 20: the secret word of the garden is pelican."
    talk = [
        {"role": "user", "content": " ".join(notes)},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is the secret word of the garden?"},
    ]
    llm = Llama(str(smollm2), report=True, n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False)
    answer: Any = llm.create_chat_completion(talk, max_tokens=12, **GREEDY)
    usage, facts = answer["usage"], answer["kvmem"]["usage"]
    assert usage["prompt_tokens"] > 2 * llm.n_ctx()
    assert "pelican" in answer["choices"][0]["message"]["content"]
    before = " ".join(notes[:20])
    at = len(llm.tokenize(before.encode()))
    recalled = answer["kvmem"]["recalled"]
    assert any(b["start"] <= at + 40 and b["start"] + b["count"] > at for b in recalled)
    assert facts["cached"] == 0 and facts["evaluated"] == usage["prompt_tokens"]

    reply = answer["choices"][0]["message"]
    talk += [reply, {"role": "user", "content": "Which room holds parcel 37?"}]
    again: Any = llm.create_chat_completion(talk, max_tokens=4, **GREEDY)
    facts = again["kvmem"]["usage"]
    assert facts["cached"] > usage["prompt_tokens"] and facts["evaluated"] < 40
    assert facts["prompt"] == again["usage"]["prompt_tokens"]
    llm.close()


def test_an_answer_goes_on_past_the_window_for_as_long_as_it_is_wanted(llm: Llama) -> None:
    prompt = llm.tokenize(text(100).encode())
    done: Any = llm.create_completion(prompt, max_tokens=400, logit_bias=no_end(llm), **GREEDY)
    assert done["usage"]["completion_tokens"] == 400
    assert done["choices"][0]["finish_reason"] == "length"
    assert llm.n_ctx() == 256 and llm.n_tokens == len(prompt) + 399  # the last one was not evaluated
    assert any(report.mid_answer for report in llm.last_result.recalls)


def test_without_a_limit_an_answer_ends_with_the_window_or_has_the_room_of_an_answer(llm: Llama) -> None:
    n = 32  # the room: an eighth of the window, in whole blocks
    for n_prompt, n_answer in ((100, 156), (240, n), (600, n)):
        tokens = llm.tokenize(text(2000).encode())[:n_prompt]
        done: Any = llm.create_completion(tokens, max_tokens=None, logit_bias=no_end(llm), **GREEDY)
        assert done["usage"] == dict(
            prompt_tokens=n_prompt, completion_tokens=n_answer, total_tokens=n_prompt + n_answer
        )


def test_what_fits_the_window_is_not_recalled_from_up_to_its_last_token(llm: Llama) -> None:
    done: Any = llm.create_completion(
        llm.tokenize(text(2000).encode())[:200], max_tokens=56, logit_bias=no_end(llm), **GREEDY
    )
    assert done["usage"]["total_tokens"] == 256 and not llm.last_result.recalls
    assert done["kvmem"]["recalled"] == []


def test_logprobs_of_a_long_prompt_and_its_answer(tiny: Path) -> None:
    llm = Llama(str(tiny), logits_all=True, **SMALL)
    prompt = text(400)
    done: Any = llm(prompt, max_tokens=3, logprobs=2, echo=True, logit_bias=no_end(llm), **GREEDY)
    found = done["choices"][0]["logprobs"]
    assert "".join(found["tokens"]).startswith(prompt) and len(prompt) > llm.n_ctx()
    # llama_cpp leaves out the last token, whose row it does not have.
    assert len(found["token_logprobs"]) == done["usage"]["total_tokens"] - 1
    llm.close()
    wide = Llama(str(tiny), logits_all=True, **{**SMALL, "n_ctx": 1024})
    other: Any = wide(prompt, max_tokens=3, logprobs=2, echo=True, logit_bias=no_end(wide), **GREEDY)
    wide.close()
    expected = other["choices"][0]["logprobs"]["token_logprobs"]
    assert found["token_logprobs"][1:200] == pytest.approx(expected[1:200], abs=0.05)
    assert found["token_logprobs"][200:] != pytest.approx(expected[200:], abs=0.05), "seen from another view"


def test_a_workspace_is_there_again_with_nothing_to_evaluate(tiny: Path, tmp_path: Path) -> None:
    kept = {"workspace": "notes", "options": {"data_dir": str(tmp_path)}, "report": True, **SMALL}
    prompt = text(700)
    llm = Llama(str(tiny), **kept)
    llm(prompt, max_tokens=8, logit_bias=no_end(llm), **GREEDY)
    tokens = llm.last_result.tokens
    llm.close()
    again = Llama(str(tiny), **kept)
    assert again.n_tokens == llm.n_tokens
    second: Any = again.create_completion(
        [*again.tokenize(prompt.encode()), *tokens, *again.tokenize(b" and")],
        max_tokens=4,
        logit_bias=no_end(again),
        **GREEDY,
    )
    facts = second["kvmem"]["usage"]
    assert (
        facts["evaluated"] <= 64 and facts["cached"] + facts["evaluated"] == second["usage"]["prompt_tokens"]
    )
    again.close()


def test_a_stream_that_is_left_and_a_callback_that_fails_do_no_harm(llm: Llama, tiny: Path) -> None:
    prompt, ends = text(150), no_end(llm)
    expected: Any = llm(prompt, max_tokens=12, logit_bias=ends, **GREEDY)
    fresh = Llama(str(tiny), **SMALL)
    for i, _ in enumerate(fresh(prompt, max_tokens=50, stream=True, logit_bias=ends, **GREEDY)):
        if i == 3:
            break

    def fail(ids: Any, scores: Any) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fresh(prompt + "x", max_tokens=5, stopping_criteria=fail, **GREEDY)
    found: Any = fresh(prompt, max_tokens=12, logit_bias=ends, **GREEDY)
    assert found["choices"] == expected["choices"]
    fresh.close()


def test_an_interrupt_while_a_prompt_is_read_is_raised_and_undone(llm: Llama) -> None:
    prompt, ends = text(150), no_end(llm)
    expected: Any = llm(prompt, max_tokens=6, logit_bias=ends, **GREEDY)
    seen = threading.Event()
    forget = llm._engine.observe(lambda report: seen.set())

    def interrupt() -> None:
        seen.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        llm(text(200_000), max_tokens=1)
    forget()
    found: Any = llm(prompt, max_tokens=6, logit_bias=ends, **GREEDY)
    assert found["choices"] == expected["choices"]


def test_a_state_brings_back_tokens_and_what_was_computed_for_them(llm: Llama) -> None:
    prompt, ends = text(500), no_end(llm)
    llm.eval(llm.tokenize(prompt.encode()))
    state = llm.save_state()
    other: Any = llm("Something else", max_tokens=4, logit_bias=ends, **GREEDY)
    assert other["kvmem"]["usage"]["cached"] == 0
    llm.load_state(state)
    back: Any = llm(prompt, max_tokens=4, logit_bias=ends, **GREEDY)
    assert back["kvmem"]["usage"]["evaluated"] <= 128
    llm.load_state(pickle.loads(pickle.dumps(state)))
    assert llm.n_tokens == len(llm.tokenize(prompt.encode()))


def test_what_is_wrong_is_said_and_nothing_works_after_close(llm: Llama) -> None:
    class Bad:
        _grammar, _root = "root ::= [", "root"

    with pytest.raises(InvalidOption, match="cannot parse it"):
        llm("a", max_tokens=1, grammar=Bad())
    with pytest.raises(InvalidOption, match="prompt = '': it has no tokens"):
        llm("", max_tokens=1)
    with pytest.raises(InvalidOption, match="Call eval first"):
        llm.n_tokens = 1
        llm.sample()
    llm.close()
    llm.close()
    calls: tuple[Callable[[], object], ...] = (
        lambda: llm("a"), lambda: llm.tokenize(b"a"), lambda: llm.eval([1]), lambda: llm.eval([]),
        llm.token_eos, llm.n_ctx, llm.sample, llm.reset, llm.save_state,
    )  # fmt: skip
    for call in calls:
        with pytest.raises(EngineClosed, match="closed"):
            call()


def test_the_engine_goes_with_the_object(tiny: Path) -> None:
    made = Llama(str(tiny), **SMALL)
    made("a", max_tokens=1)
    engine = made._engine
    del made
    assert engine.closed


def test_a_copy_is_made_with_the_same_arguments(llm: Llama) -> None:
    other = pickle.loads(pickle.dumps(llm))
    assert (other.n_ctx(), other.n_batch, other.chat_format) == (llm.n_ctx(), llm.n_batch, llm.chat_format)
    other.close()


def test_a_model_of_the_hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    files = ["README.md", "tiny-f32.gguf", "tiny-q8.gguf"]
    monkeypatch.setattr(hub.HfApi, "list_repo_files", lambda self, repo: files)
    monkeypatch.setattr(hub, "hf_hub_download", lambda repo, file, **more: str(tiny))
    llm = Llama.from_pretrained("somebody/tiny-GGUF", "*f32*", **SMALL)
    assert llm.model_path == str(tiny)
    llm.close()
    with pytest.raises(ModelNotFound, match=r"2 files match '\*\.gguf'\. It holds tiny-f32\.gguf, tiny-q8"):
        Llama.from_pretrained("somebody/tiny-GGUF", "*.gguf")

    def no_network(self: object, repo: str) -> list[str]:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub.HfApi, "list_repo_files", no_network)
    with pytest.raises(ModelNotFound, match="cannot be reached: no route to host"):
        Llama.from_pretrained("somebody/tiny-GGUF", "*.gguf")


def no_end(llm: Llama) -> dict[int, float]:
    """A bias against every token that would end an answer."""
    vocab = llm._engine.core.model.vocab
    return {token: -1e9 for token in range(vocab.n_tokens) if vocab.is_eog(token)}
