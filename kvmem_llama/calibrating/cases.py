"""From the texts to what is read and asked: histories with passages put into them, and questions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from ..lexical import words
from ..native.layout import I32
from .facts import FACTS, LOCKERS, Fact, locker
from .texts import Kind, Source, text_of

About = Literal["words", "plain", "reworded", "alike"]
"""words: some of the text's own words, no answer is known. The others are about a passage that was put into
the text: in its words, in other words, or about one of several that look alike."""

_MARKS: Final = {"prose": "{}\n\n", "code": "# {}\n"}
_WORD: Final = re.compile(r"[^\W\d_]\w+")
_N_WINDOW: Final = 24  # words that stand close together
_N_KEPT: Final = 6  # the rarest of them, which make a question
_N_LOCKERS: Final = 4  # in one history


@dataclass(frozen=True, slots=True)
class Question:
    about: About
    text: str
    answer: tuple[int, int] | None = None  # token positions [start, end) of the passage, where there is one


@dataclass(frozen=True, slots=True)
class Case:
    """A history and what is asked about it."""

    kind: Kind
    tokens: I32  # [n]
    questions: tuple[Question, ...]


Tokenize: TypeAlias = Callable[[str], I32]


def words_case(source: Source, tokenize: Tokenize, n_tokens: int, n_questions: int) -> Case:
    """About `n_tokens` tokens of a source, and questions made of rare words that stand close together in it:
    what a search by words finds for them is hardly ever wrong, so nobody has to tell where the answer is."""
    text = _beginning(source, tokenize, n_tokens)
    lines = [match.start() for match in re.finditer(r"[^\n]*\S[^\n]*\n", text)]
    count = Counter(words(text))
    questions = []
    for i in range(n_questions):
        first = lines[len(lines) * (2 * i + 1) // (2 * n_questions)]
        window = list(dict.fromkeys(_WORD.findall(text[first : first + 2000])[:_N_WINDOW]))
        rare = sorted(window, key=lambda word: (max((count[w] for w in words(word)), default=0), word))
        kept = " ".join(word for word in window if word in rare[:_N_KEPT])
        questions.append(Question("words", kept))
    return Case(source.kind, tokenize(text), tuple(questions))


def facts_case(source: Source, tokenize: Tokenize, n_tokens: int, n_facts: int, part: int) -> Case:
    """About `n_tokens` tokens of a source with `n_facts` passages spread over them, and questions about
    these. part: 0 or 1, which of the statements that look alike are among them."""
    lockers = LOCKERS[part * _N_LOCKERS : (part + 1) * _N_LOCKERS]
    alike = [locker(name, code) for name, code in lockers]
    facts = _mixed(FACTS[:n_facts], alike)
    passages = [tokenize(_MARKS[source.kind].format(fact.passage)) for fact in facts]
    text = _beginning(source, tokenize, n_tokens - sum(map(len, passages)))
    runs: list[I32] = []
    questions = []
    at = 0
    *pieces, last = _pieces(text, len(facts) + 2)
    pieces[-1] += last  # the newest tokens are in every view: nothing that is asked for may lie there
    for i, piece in enumerate(pieces):
        runs.append(tokenize(piece))
        at += len(runs[-1])
        if i < len(facts):
            answer = (at, at + len(passages[i]))
            if facts[i] in alike:
                questions.append(Question("alike", facts[i].plain, answer))
            else:
                questions.append(Question("plain", facts[i].plain, answer))
                questions.append(Question("reworded", facts[i].reworded, answer))
            runs.append(passages[i])
            at = answer[1]
    return Case(source.kind, np.concatenate(runs), tuple(questions))


def _mixed(some: Sequence[Fact], few: Sequence[Fact]) -> list[Fact]:
    """All of them, the few spread evenly among the others."""
    out = list(some)
    for i, fact in enumerate(few):
        out.insert((i + 1) * len(some) // (len(few) + 1) + i, fact)
    return out


def _beginning(source: Source, tokenize: Tokenize, n_tokens: int) -> str:
    """Of the source's text, as much as makes about `n_tokens` tokens, cut between characters."""
    text = text_of(source, 8 * n_tokens)
    return text_of(source, max(len(text) * n_tokens // max(len(tokenize(text)), 1), 1))


def _pieces(text: str, n: int) -> list[str]:
    """The text in `n` pieces of about equal length, cut after ends of lines."""
    edges = [0]
    for i in range(1, n):
        edges.append(max(text.find("\n", len(text) * i // n) + 1, edges[-1]))
    return [text[a:b] for a, b in zip(edges, [*edges[1:], len(text)], strict=True)]
