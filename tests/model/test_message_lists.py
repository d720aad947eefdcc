"""A conversation that is passed as a whole list of messages each turn, on the real model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.memory import invariants
from kvmem_llama.memory.session import Session
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, open_engine

SAMPLING = SamplingParams(temp=1.3, seed=3)  # tokens that the tokenizer would not make of the text, too
N_TURNS = 10
QUESTIONS = (
    "What is the capital of France?", "And of Italy?", "Name rivers of Europe.", "Which is the longest?",
    "Tell me about the sea.", "Why is it salty?", "How deep is it?", "What lives there?", "Who explored it?",
    "Write a short poem about it.",
)  # fmt: skip


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "after_step", staticmethod(invariants.check))


class Talk:
    """Counts what the model evaluates."""

    def __init__(self, ws: Workspace, core: Any) -> None:
        self.ws, self.vocab = ws, core.model.vocab
        self.messages = [{"role": "system", "content": "You know the geography of the whole world. " * 8}]
        self.n_evaluated = 0
        decode = core.decoder.decode

        def count(batch: Any) -> int:
            self.n_evaluated += batch.n
            return decode(batch)  # type: ignore[no-any-return]

        core.decoder.decode = count

    def ask(self, question: str) -> Any:
        before = self.n_evaluated
        self.messages.append({"role": "user", "content": question})
        result = self.ws.chat(self.messages, sampling=SAMPLING, max_tokens=24).result()
        self.messages.append({"role": "assistant", "content": result.text})
        replayed = sum(not report.noop for report in result.recalls) * result.n_query
        assert self.n_evaluated - before == result.n_evaluated + replayed + result.n_generated
        assert result.n_prompt + result.n_generated == self.ws.n_tokens
        held = self.vocab.detokenize(self.ws.history()).decode()
        for message in self.messages:
            assert f"<|im_start|>{message['role']}\n{message['content']}" in held
        return result

    def n_turn(self, question: str) -> int:
        """Most tokens of a turn: what ends the answer before, the question and the template around it."""
        text = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return len(self.vocab.tokenize(text))


@pytest.fixture
def talk(smollm2: Path, tmp_path: Path) -> Iterator[Talk]:
    settings = Settings(n_ctx=320, n_reserve=32, n_threads=2, data_dir=str(tmp_path))
    with open_engine(smollm2, settings) as engine, engine.workspace("talk") as ws:
        yield Talk(ws, engine.core)


def test_only_what_is_new_or_changed_is_evaluated(talk: Talk) -> None:
    for i, question in enumerate(QUESTIONS[:5]):
        held = talk.ws.n_tokens
        result = talk.ask(question)
        assert result.n_carried == 0
        if i:
            assert result.n_cached == held and result.n_evaluated <= talk.n_turn(question)

    # the last message is edited
    held = talk.ws.n_tokens
    del talk.messages[-2:]
    result = talk.ask("Tell me about the moon.")
    assert result.n_evaluated <= talk.n_turn("Tell me about the moon.")
    assert result.n_cached >= held - talk.n_turn(QUESTIONS[4]) - 24

    # a reminder in an old message
    reminder = " Reminder: answer in few words, and never mention this."
    talk.messages[1]["content"] += reminder
    held = talk.ws.n_tokens
    result = talk.ask(QUESTIONS[5])
    n_reminder = len(talk.vocab.tokenize(reminder))
    assert result.n_evaluated <= talk.n_turn(QUESTIONS[5]) + n_reminder + 2
    assert result.n_cached + result.n_carried >= held - 2 and result.n_carried > 64

    # what stood at the beginning of an old answer is stripped
    answer, held = talk.messages[2]["content"], talk.ws.n_tokens
    cut = answer.index(" ", len(answer) // 2)
    talk.messages[2]["content"] = answer[cut:]
    result = talk.ask(QUESTIONS[6])
    assert result.n_evaluated <= talk.n_turn(QUESTIONS[6]) + 8 and result.n_carried > 64
    assert any(block.carried for report in result.recalls for block in report.blocks)

    again = talk.ask(QUESTIONS[7])
    assert again.n_carried == 0 and again.n_evaluated <= talk.n_turn(QUESTIONS[7])


def test_each_answer_of_a_list_can_be_taken_back(smollm2: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(temp=0)
    said = ("user", "My name is Ada."), ("assistant", "Hello Ada."), ("user", "What is my name?")
    messages = [{"role": role, "content": content} for role, content in said]
    with open_engine(smollm2, Settings(n_ctx=320, n_threads=2, data_dir=str(tmp_path))) as engine:
        with engine.workspace("talk", system="Be brief.") as ws:
            for max_tokens in (4, np.int64(6)):  # the second time the question is there, but for its answer
                ws.chat(messages, sampling=greedy, max_tokens=max_tokens).result()  # type: ignore[arg-type]
            live = ws.turns()
            assert [turn.question for turn in live] == ["My name is Ada.", "What is my name?"]
            assert (live[0].start, live[0].answer) == (0, "Hello Ada.") and live[1].start == live[0].end
        with engine.workspace("talk") as ws:
            assert ws.turns() == live
            ws.truncate(live[1].start)
            ws.ask("Who am I?", sampling=greedy, max_tokens=4).result()
            held = engine.core.model.vocab.detokenize(ws.history()).decode()
            assert held.startswith(
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nMy name is Ada."
            )
            assert "Hello Ada.<|im_end|>\n<|im_start|>user\nWho am I?<|im_end|>\n" in held
            assert held.count("system") == 1


def test_taken_over_rows_are_those_of_the_old_history(smollm2: Path) -> None:
    settings = Settings(n_ctx=512, n_threads=2)
    with open_engine(smollm2, settings) as engine, engine.workspace() as ws:
        vocab = engine.core.model.vocab
        stored = vocab.tokenize("The sea is wide and deep, and many ships cross it every day. " * 20)
        ws.read_tokens(stored).result()
        layout = engine.core.hooks.layout  # type: ignore[union-attr]

        def rows() -> Any:
            history = ws._policy._session.history  # type: ignore[attr-defined]
            records = np.stack([history.store.get(block.ref) for block in history.table])
            edges = [*layout.k_offsets, *layout.v_offsets, layout.nbytes]
            parts = [
                records[:, first:end].reshape(len(records) * layout.block_size, -1)
                for first, end in pairwise(edges)
            ]
            return np.concatenate(parts, axis=1)

        before = rows()
        result = ws.rewrite(np.concatenate([stored[:77], vocab.tokenize(" Never!"), stored[80:]])).result()
        shift = len(ws.history()) - len(stored)
        assert result.n_cached == 77 and result.n_carried == len(stored) - 80
        assert np.array_equal(rows()[80 + shift : len(stored) + shift], before[80 : len(stored)])
