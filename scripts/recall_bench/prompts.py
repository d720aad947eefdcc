"""From a case to tokens: history, question in the chat template, gold answer, evidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.conversation import Conversation, document_text
from kvmem_llama.engine.chat_template import ChatTemplate
from kvmem_llama.engine.model import Model
from kvmem_llama.native.layout import I32
from kvmem_llama.settings import Settings

from .cases import Case, History


@dataclass(frozen=True, slots=True)
class Prompt:
    """One case as the model sees it; the same tokens as `kvmem ask -f TEXT QUESTION` makes."""

    case: Case
    tokens: I32  # [n] history and question
    n_history: int  # tokens before the question; the same ones for every case of a history
    scored: NDArray[np.bool_]  # [n] text of the question and the document, not template
    answer: I32  # [n_answer] the gold answer
    evidence: I32  # token positions


def prompts_of(model: Model, history: History, text: str, cases: list[Case]) -> list[Prompt]:
    """The prompts of the cases about one history. text: the excerpt with its insertions."""
    template = ChatTemplate.open(model, Settings())
    nothing = np.zeros(0, np.int32)
    prompts = []
    for case in cases:
        turn, _ = Conversation(model.vocab, template, None).next_turn(case.question, [("", text)], nothing)
        ends = np.cumsum([len(model.vocab.piece(int(token))) for token in turn.tokens])
        whole = b"".join(model.vocab.piece(int(token)) for token in turn.tokens)
        first = whole.index(document_text("", text).encode())
        inside = np.zeros(len(turn.tokens), np.bool_)
        for start, end in case.spans(history):
            a, b = (first + len(text[:at].encode()) for at in (start, end))
            inside |= (ends > a) & (ends - np.diff(ends, prepend=0) < b)
        answer = model.vocab.tokenize(case.answer, parse_special=False)
        prompts.append(
            Prompt(
                case, turn.tokens, turn.question, turn.scored, answer, np.flatnonzero(inside).astype(np.int32)
            )
        )
    shared = prompts[0].tokens[: prompts[0].n_history]
    assert all(np.array_equal(p.tokens[: p.n_history], shared) for p in prompts), "a history is read once"
    return prompts
