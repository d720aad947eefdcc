"""From the events of a step to what a client is told of an answer while it comes."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..engine.answer_parser import MessageDelta
from ..memory.report import Event, Finished, MessagePiece, Progress, StepResult, TextPiece
from ..native.layout import I32
from .formats.answer import AnswerState, Ended, Head, Piece
from .schema import Generation
from .state import ServerState
from .timing import Clock

_PART: Final = "\ufffd"  # what stands for a part of a character


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer tells: one of these is set; none of them: its prompt was taken and is evaluated."""

    state: AnswerState
    piece: Piece | None = None
    final: Ended | None = None
    error: BaseException | None = None


class View:
    """Counts of the prompt and the answers to it, for whoever looks; tokens."""

    def __init__(self, generation: Generation, n_prompt: int) -> None:
        self.n_prompt = n_prompt
        self.n_cached = 0
        self.n_evaluated = 0
        self.n_decoded = 0
        self.has_new_line = False
        self.n_committed: int | None = None  # before the answer, once a step has ended
        self.unfinished: I32 | None = None  # of a prompt whose evaluation was cancelled
        self.tokens: I32 = np.empty(0, np.int32)
        self._is_first = True  # the first answer; the others to the same prompt cost nothing to read

    def begin(self, tokens: I32, n_cached: int) -> None:
        """The evaluation of a prompt begins. n_cached: at least so many of its tokens are stored."""
        self.tokens = tokens
        self.n_decoded = 0
        self.has_new_line = False
        if self._is_first:
            self.n_prompt, self.n_cached, self.n_evaluated = len(tokens), n_cached, 0

    def evaluated(self, n: int) -> None:
        """So many more tokens were evaluated."""
        if self._is_first:
            self.n_evaluated += n

    def sampling(self) -> None:
        """The prompt is evaluated: what was not, was stored."""
        if self._is_first:
            self.n_cached = max(self.n_prompt - self.n_evaluated, 0)

    def done(self, result: StepResult) -> None:
        self.n_committed = result.n_prompt
        if self._is_first:
            self.n_prompt, self.n_evaluated = result.n_prompt, result.n_evaluated
            self.n_cached = result.n_prompt - result.n_evaluated
        self._is_first = False


class Teller:
    """Of one answer, on the thread that reads its events."""

    def __init__(
        self,
        server: ServerState,
        head: Head,
        state: AnswerState,
        view: View,
        clock: Clock,
        tell: Callable[[Told], None],
        stop: Callable[[], None],
    ) -> None:
        """stop: ends the answer."""
        self.state: Final = state
        self.tokens: Final[list[int]] = []  # sampled
        self.cut: int | None = None  # characters of the text that count; None: all
        self._vocab: Final = server.engine.core.model.vocab
        self._head: Final = head
        self._view: Final = view
        self._clock: Final = clock
        self._tell: Final = tell
        self._stop: Final = stop
        self._decoder: Final = codecs.getincrementaldecoder("utf-8")("replace")
        self._done = {"read": 0, "query": 0}
        self._has_begun = False
        self._held: Piece | None = None  # without text: maybe the next event tells why
        self._newest = Piece()
        self._text = ""
        self._line = 0  # characters before the newest line, for n_indent; 0: there is none

    def take(self, event: Event) -> None:
        generation = self._head.generation
        if isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, TextPiece):
            self._piece(event)
        elif isinstance(event, MessagePiece):
            if self._head.parses and generation.stream:
                self._message(event.delta)
        elif isinstance(event, Finished):
            self._flush(event.result)

    def whole(self, text: str) -> str:
        """`text`, whose end is the answer's, without a character of which the answer has only a part."""
        return text.removesuffix(_PART) if self._decoder.getstate()[0] else text

    # -- private

    def _message(self, delta: MessageDelta) -> None:
        self._flush()
        shown = replace(
            delta, content=self.whole(delta.content), reasoning_content=self.whole(delta.reasoning_content)
        )
        if shown == delta or shown.content or shown.reasoning_content:
            piece = self._newest
            self._tell(Told(self.state, Piece(delta=shown, probs=piece.probs, timings=piece.timings)))

    def _progress(self, event: Progress) -> None:
        if event.phase not in self._done:
            return
        before = self._done[event.phase]
        self._view.evaluated(event.done - before if event.done >= before else event.done)
        self._done[event.phase] = event.done
        self._begin()
        self._tell_progress(self._view.n_cached + self._view.n_evaluated)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self.state.n_prompt, self.state.n_cached = self._view.n_prompt, self._view.n_cached
        self._tell(Told(self.state))
        if self._view.n_evaluated:
            self._tell_progress(self._view.n_cached)

    def _tell_progress(self, processed: int) -> None:
        generation, view = self._head.generation, self._view
        if not (generation.stream and generation.return_progress) or self._view.n_decoded:
            return
        progress = {
            "total": view.n_prompt,
            "cache": view.n_cached,
            "processed": min(processed, view.n_prompt),
            "time_ms": self._clock.elapsed_ms,
        }
        timings = None
        if generation.timings_per_token:
            n_evaluated = max(processed - view.n_cached, 0)
            timings = self._clock.timings(n_cached=view.n_cached, n_evaluated=n_evaluated, n_decoded=0)
        self._tell(Told(self.state, Piece(progress=progress, timings=timings)))

    def _piece(self, event: TextPiece) -> None:
        if event.token is None:  # text that was held back, and belongs to the last token
            text = self.whole(event.text)
            self._text += text
            held, self._held = self._held, None
            if text or held is not None:
                self._send(replace(held or replace(self._newest, is_first=False), text=text))
            return
        self._text += event.text
        self._begin()
        self._flush()
        self._clock.token()
        is_first = not self.tokens
        if is_first:
            self._view.sampling()
            self.state.n_prompt, self.state.n_cached = self._view.n_prompt, self._view.n_cached
        self.tokens.append(event.token)
        self._view.n_decoded = len(self.tokens)
        is_end = self._vocab.is_eog(event.token)
        self._decoder.decode(b"" if is_end else self._vocab.piece(event.token))
        if self._decoder.getstate()[0] and not event.text:  # part of a character
            if is_first:
                self._send(Piece(token=event.token, n_decoded=1, is_first=True), only_message=True)
            return
        piece = Piece(
            text=event.text,
            token=event.token,
            n_decoded=len(self.tokens),
            probs=event.probs[-1] if event.probs else None,
            is_first=is_first,
            timings=self._timings() if self._head.generation.timings_per_token else None,
        )
        if event.text:
            self._send(piece)
            self._look(event.text)
        else:
            self._held = piece

    def _flush(self, result: StepResult | None = None) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        if result is not None and result.stop_type == "word":
            held = replace(held, timings=self._timings())
        if result is not None and result.stop_type == "eos" and result.end_probs is not None:
            held = replace(held, probs=result.end_probs)
        self._send(held)

    def _send(self, piece: Piece, *, only_message: bool = False) -> None:
        self._newest = piece
        if self._head.generation.stream and (self._head.parses or not only_message):
            self._tell(Told(self.state, piece))

    def _timings(self) -> dict[str, Any]:
        return self._clock.timings(
            n_cached=self._view.n_cached,
            n_evaluated=self._view.n_evaluated,
            n_decoded=len(self.tokens),
        )

    def _look(self, text: str) -> None:
        """Whether the answer ends at a new line: it took too long, or the line is not indented enough."""
        generation = self._head.generation
        if generation.n_indent > 0 and self._view.has_new_line:
            if self._line:
                line = self._text[self._line :]
                n = len(line) - len(line.lstrip(" \t"))
                if n < len(line) and n < generation.n_indent:
                    self.cut = self._line + n
                    self._stop()
            at = self._text.find("\n", self._line)
            if at >= 0:
                self._line = at + 1
        if "\n" in text:
            self._view.has_new_line = True
            limit = generation.t_max_predict_ms
            if 0 < limit < self._clock.predicted_s * 1000:
                self._stop()
