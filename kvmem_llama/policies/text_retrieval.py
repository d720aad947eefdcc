"""Compaction, and a search by words over the text that it took out of the view."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvmem_llama.engine.core import EngineCore
from kvmem_llama.lexical import WordIndex, terms
from kvmem_llama.memory.canonical import parts_of
from kvmem_llama.memory.positions import TokenPos, ViewPos
from kvmem_llama.memory.report import Recalled, RecalledBlock, RecallReport, RecallTimings, Why
from kvmem_llama.memory.retrieval import spread
from kvmem_llama.memory.selector import ranks, select
from kvmem_llama.memory.stopwatch import Stopwatch
from kvmem_llama.native.layout import I32

from .compacted import Range
from .compaction import Compaction
from .policy import MemoryStats
from .summary import text_only

HEAD, GAP, END = "\n[From earlier]\n", "\n[...]\n", "\n[End of what is from earlier]\n"
_EDGE: Final = 8  # tokens looked at around a block for the rest of words that are cut at its edges


@dataclass(frozen=True, slots=True)
class _Passage:
    block: int
    offset: int  # of its first token in the passages
    n: int  # tokens of it that stand there
    rank: int
    score: float


@dataclass(frozen=True, slots=True)
class _Search:
    """What was found for a question."""

    passages: tuple[_Passage, ...]  # in history order
    n_candidates: int
    score_s: float
    select_s: float


class CompactionRetrieval(Compaction):
    """As `Compaction`; and the blocks of the replaced text that have most in common with the question's words
    (BM25) are put before it as text. They are in the view of this one step and not in the history.
    """

    name: ClassVar[str] = "compaction_retrieval"

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        vocab = core.model.vocab
        self._marks: Final = tuple(vocab.tokenize(text, parse_special=False) for text in (HEAD, GAP, END))
        self._index = WordIndex(self._budget.n_sink // self._budget.block)
        self._search = _Search((), 0, 0.0, 0.0)

    def fork(self) -> Self:
        other = super().fork()
        other._index = self._index.fork()
        return other

    def stats(self) -> MemoryStats:
        return replace(super().stats(), n_blocks=len(self._index), index_bytes=self._index.nbytes)

    def _drop_from(self, n_tokens: int) -> None:
        super()._drop_from(n_tokens)
        self._index.drop_from(max(n_tokens - _EDGE, 0) // self._budget.block)

    # -- search

    def _n_passages(self, n_free: int) -> int:
        return min(n_free, self._budget.n_view // 4)

    def _find(self, question: I32, n_most: int) -> I32:
        watch = Stopwatch()
        vocab, block = self._core.model.vocab, self._budget.block
        candidates, scores = self._scores(
            vocab.detokenize(question, special=False).decode("utf-8", "replace")
        )
        n_candidates = len(candidates)
        candidates, scores = candidates[scores > 0], scores[scores > 0]
        score_s = watch.lap("score_s")
        head, gap, end = self._marks
        n_blocks = max(n_most - len(head) - len(end), 0) // (block + len(gap))
        selected = select(scores, candidates, n_blocks)
        by_block = dict(
            zip(candidates.tolist(), zip(ranks(scores, candidates), scores, strict=True), strict=True)
        )
        parts: list[I32] = []
        passages: list[_Passage] = []
        for number in selected.tolist():
            follows = passages and passages[-1].block == number - 1
            parts += [] if follows else [gap if passages else head]
            text = text_only(vocab, self.tokens(number * block, (number + 1) * block))
            rank, score = by_block[number]
            passages.append(_Passage(number, sum(map(len, parts)), len(text), int(rank), float(score)))
            parts.append(text)
        self._search = _Search(tuple(passages), n_candidates, score_s, watch.lap("select_s"))
        return np.concatenate([*parts, end]) if parts else np.zeros(0, dtype=np.int32)

    def _scores(self, question: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Replaced blocks, ascending, and their scores; 0 for those that share no word with the question."""
        now, block = self._now, self._budget.block
        first, end = self._budget.n_sink // block, now.cut // block
        self._index_up_to(end)
        scores = np.zeros(max(end - first, 0))
        numbers, found, _ = self._index.search(question)
        inside = numbers < end
        scores[numbers[inside] - first] = found[inside]
        scores = spread(scores)
        candidates = np.arange(first, max(end, first))
        if now.kept:
            hidden = (candidates < now.kept[0] // block) | (candidates * block >= now.kept[1])
            candidates, scores = candidates[hidden], scores[hidden]
        return candidates, scores

    def _index_up_to(self, end: int) -> None:
        """Adds the blocks of replaced text that are not in the index yet."""
        self._index.add([terms(self._text_of(number)) for number in range(self._index.end, end)])

    def _text_of(self, number: int) -> str:
        """The text of a block, with the words at its edges whole."""
        block, vocab = self._budget.block, self._core.model.vocab
        start, end = number * block, (number + 1) * block

        def text(first: int, last: int) -> str:
            tokens = self.tokens(max(first, 0), last)
            return vocab.detokenize(tokens, special=False).decode("utf-8", "replace")

        before, body, after = text(start - _EDGE, start), text(start, end), text(end, end + _EDGE)
        if body[:1].strip() and before[-1:].strip():
            body = before.split()[-1] + body
        if body[-1:].strip() and after[:1].strip():
            body += after.split()[0]
        return body

    # -- report

    def _report(self, end: int) -> tuple[RecallReport, ...]:
        """The view after the question was evaluated; the summary, which is no block, is not in it."""
        if not self._compactions or self._asked is None:
            return ()
        report = RecallReport(
            blocks=tuple(sorted(self._blocks(end), key=lambda b: b.start)),
            n_view=self._n_in_view(end),
            n_candidates=self._search.n_candidates,
            n_selected=len(self._search.passages),
            # Reading the passages is part of evaluating the question.
            timings=RecallTimings(self._search.score_s, self._search.select_s, 0.0, 0.0),
            noop=not self._search.passages,
            mid_answer=False,
        )
        self._link.emit(Recalled(report))
        return (report,)

    def _blocks(self, end: int) -> list[RecalledBlock]:
        assert self._asked is not None
        start, block = self._asked.span[0], self._budget.block
        n_sink, n_passages = self._budget.n_sink, len(self._asked.passages)
        blocks = self._rows((0, n_sink), 0, "sink")
        at = n_sink + len(self._summarizer.framed(self._now.summary))
        for first, last in self._now.ranges(start):
            blocks += self._rows((first, last), at, "recent")
            at += last - first
        for passage in self._search.passages:
            first = passage.block * block
            blocks.append(
                RecalledBlock(
                    start=TokenPos(first),
                    count=block,
                    rank=passage.rank,
                    score=passage.score,
                    why="selected",
                    position=ViewPos(at + passage.offset),
                    resident=False,
                    text=self._decoded((first, first + block)),
                )
            )
        return blocks + self._rows((start, end), at + n_passages, "query")

    def _rows(self, span: Range, position: int, why: Why) -> list[RecalledBlock]:
        """The blocks of a part of the view that was not searched for."""
        return [
            RecalledBlock(
                start=part.start,
                count=part.count,
                rank=None,
                score=None,
                why=why,
                position=ViewPos(position + part.start - span[0]),
                resident=position + part.end - span[0] <= self._shown.n_kept,
                text=self._decoded((part.start, part.end)),
            )
            for part in parts_of(self._budget.block, *span)
        ]

    def _decoded(self, span: Range) -> str:
        return self._core.model.vocab.detokenize(self.tokens(*span)).decode("utf-8", "replace")
