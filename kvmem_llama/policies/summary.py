"""A summary of a part of the history, written by the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from kvmem_llama.engine.chat_template import Message
from kvmem_llama.engine.core import EngineCore
from kvmem_llama.engine.requests import Phase, TaskGenerator
from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.engine.templates import TemplateOptions
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.memory.answering import Answering
from kvmem_llama.memory.budget import Budget
from kvmem_llama.memory.canonical import floor_to
from kvmem_llama.memory.link import TaskLink
from kvmem_llama.memory.query import StepRequest
from kvmem_llama.memory.report import Event, Progress
from kvmem_llama.native.layout import F32, I32

from .text_cells import TextCells

MOST: Final = 512  # tokens of a summary, however large the view: its price is that of an answer
_BEFORE, _TEXT = "@before@", "@text@"
PROMPT: Final = (
    f"Summary of what came before:\n{_BEFORE}\n\nText that follows it:\n{_TEXT}\n\n"
    "Write one summary of both, in at most {n_words} words. "
    "Keep names, numbers, file names, decisions and open tasks. Write nothing else."
)
HEAD, END = "\n[Summary of what came before]\n", "\n[End of the summary]\n"


class Summarizer:
    """Writes summaries of at most `n_summary` tokens, greedily.

    A text that is too long for one prompt is read in pieces: the summary so far goes into the prompt of the
    next piece, and is replaced by what comes out.
    """

    def __init__(self, core: EngineCore, budget: Budget) -> None:
        """Raises TemplateUnsupported for a chat template that llama.cpp cannot render."""
        vocab = core.model.vocab
        self._link: Final = TaskLink(core)
        self._silent: Final = _Silent(core)
        self.n_summary: Final = max(min(floor_to(budget.block, budget.n_view // 8), MOST), budget.block)
        self._vocab = vocab
        n_words = max(self.n_summary * 3 // 5, 1)
        message = Message("user", PROMPT.format(n_words=n_words))
        applied = core.chat_template().apply([message], TemplateOptions(enable_thinking=False))
        self._stop = applied.additional_stops
        first, _, rest = applied.prompt.partition(_BEFORE)
        middle, _, last = rest.partition(_TEXT)
        self._prompt = (vocab.tokenize(first, add_bos=True), vocab.tokenize(middle), vocab.tokenize(last))
        self._none = vocab.tokenize("none", parse_special=False)
        self._frame = tuple(vocab.tokenize(text, parse_special=False) for text in (HEAD, END))
        # Beside a piece of the text: the prompt, the summary so far and the one that is written.
        self._n_beside = sum(len(part) for part in self._prompt) + 2 * self.n_summary
        self._n_piece = budget.n_view - self._n_beside
        self.n_least: Final = self._n_beside + budget.block  # the smallest view that it can work in, tokens

    @property
    def n_framed(self) -> int:
        """Most tokens of a summary as it stands in the view."""
        return self.n_summary + sum(len(part) for part in self._frame)

    def framed(self, summary: I32) -> I32:
        """The summary as it stands in the view; nothing if it is empty."""
        return np.concatenate([self._frame[0], summary, self._frame[1]]) if len(summary) else summary

    def run(self, cells: TextCells, before: I32, text: I32, check: Callable[[], None]) -> TaskGenerator[I32]:
        """The summary of a text whose beginning is summarized already -> [n <= n_summary] token ids.

        The cells then hold whatever was evaluated last. If the model writes nothing, `before` is returned.
        check: called after every batch; what it raises ends the work.
        """
        text = text_only(self._vocab, text)
        if not len(text):
            return before
        n_pieces = -(-len(text) // self._n_piece)
        total = len(text) + n_pieces * self._n_beside  # at most
        for i, piece in enumerate(np.array_split(text, n_pieces)):

            def done(n: int, start: int = total * i // n_pieces) -> None:
                self._link.emit(Progress("summary", start + n, total))
                check()

            before = yield from self._write(cells, before, piece, done)
        self._link.emit(Progress("summary", total, total))
        return before

    def _write(
        self, cells: TextCells, before: I32, piece: I32, done: Callable[[int], None]
    ) -> TaskGenerator[I32]:
        first, middle, last = self._prompt
        so_far = before if len(before) else self._none
        prompt = np.concatenate([first, so_far, middle, piece, last])
        request = StepRequest(
            prompt,
            query_start=0,
            scored=np.zeros(len(prompt), np.bool_),
            sampling=SamplingParams(temp=0),
            max_tokens=self.n_summary,
            stop=self._stop,
        )
        logits = yield from cells.show(prompt, logits=True, done=lambda n, _: done(cells.n_kept + n))
        growth = _Growth(cells, lambda n: done(len(prompt) + n))
        answer = Answering(self._vocab, self._silent, growth, request)
        yield from answer.run(prompt[:0], logits)
        written = self._stripped(text_only(self._vocab, np.array(answer.tokens, dtype=np.int32)))
        return written if len(written) else before

    def _stripped(self, tokens: I32) -> I32:
        """Without the tokens at both ends that are white space only."""
        solid = [i for i, token in enumerate(tokens.tolist()) if self._vocab.piece(token).strip()]
        return tokens[solid[0] : solid[-1] + 1] if solid else tokens[:0]


def text_only(vocab: Vocab, tokens: I32) -> I32:
    """`tokens` without control tokens: in the middle of another text they would stand for turns of it."""
    unique, where = np.unique(tokens, return_inverse=True)
    is_text = [not (vocab.is_control(token) or vocab.is_eog(token)) for token in unique.tolist()]
    return tokens[np.array(is_text, dtype=np.bool_)[where]]


class _Silent(TaskLink):
    """What is written is no piece of the step's answer, and whoever stops the step is heard elsewhere."""

    @property
    def stop_requested(self) -> bool:
        return False

    def emit(self, event: Event) -> None: ...


class _Growth:
    """See memory.answering.Growth. The prompt leaves room for all of the summary."""

    def __init__(self, cells: TextCells, done: Callable[[int], None]) -> None:
        self._cells = cells
        self._done = done
        self._n = 0

    def make_room(self, logits: F32) -> TaskGenerator[F32 | None]:
        yield from ()
        return logits

    def feed(self, token: int, *, logits: bool) -> TaskGenerator[F32 | None]:
        if not logits:  # the last one: nothing is to come after it
            return None
        self._n += 1
        one = np.array([token], dtype=np.int32)
        fed = yield from self._cells.append(one, Phase.DECODE, logits=True)
        self._done(self._n)
        return fed

    def drop(self, n_kept: int) -> None:
        """The cells are given another text next, whatever they hold."""
