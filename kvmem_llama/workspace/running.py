"""The handles of running work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self, cast

from ..engine.answer_parser import ParsedMessage
from ..engine.events import ReadAlready
from ..engine.message_reader import MessageReader
from ..engine.task import Task
from ..engine.templates import AppliedTemplate
from ..memory.report import (
    Event,
    Finished,
    FinishReason,
    MessagePiece,
    RecallReport,
    StepResult,
    TextPiece,
)
from ..memory.usage import Timings, Usage


class Step:
    """Work that runs: its events, its end, and how to end it early.

    Iterate over it for events (one reader); leaving the loop before the end cancels the step, and so does
    leaving its `with`. The other methods may be called from any thread. A step that nobody watches runs to
    its end all the same.
    """

    def __init__(self, task: Task[StepResult]) -> None:
        self._task = task

    def __iter__(self) -> Iterator[Event]:
        """Events until the step ends; then raises what the step raised, if it failed."""
        try:
            for event in self._task.events():
                yield from self._seen(cast(Event, event))
        except ReadAlready:
            raise  # the loop has not begun
        except BaseException:  # a Ctrl-C while it waits, for one
            self.cancel()
            raise
        self._task.result()

    def result(self, timeout: float | None = None) -> StepResult:
        """Waits for the end (seconds; None: as long as it takes). Raises what the step raised: Cancelled,
        MandatoryTooLarge, DecodeFailed ...; or TimeoutError, and the step goes on."""
        return self._task.result(timeout)

    def cancel(self) -> None:
        """Undoes the step, soon; `result` then raises Cancelled. Nothing, if it has ended."""
        self._task.cancel()

    def stop(self) -> None:
        """Ends the answer, soon, and keeps what there is of it; before it has begun, the same as `cancel`."""
        self._task.stop()

    @property
    def done(self) -> bool:
        """It has a result, or has failed."""
        return self._task.done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels the step if it still runs, and waits until nothing is left of it."""
        if not self.done:
            self.cancel()
            with contextlib.suppress(Exception):
                self._task.result()

    # -- for a reader that must not wait

    def watch(self, told: Callable[[], None]) -> None:
        """`told` is called, by any thread, when `take` has something to take after it had nothing, and when
        the step ends. One reader, until `unwatch`. Raises RuntimeError if there is one."""
        self._task.watch_events(told)

    def take(self) -> tuple[list[Event], bool]:
        """All events there are now -> (events, none will follow)."""
        events, ended = self._task.take_events()
        return [seen for event in events for seen in self._seen(cast(Event, event))], ended

    def unwatch(self) -> None:
        self._task.unwatch_events()

    def when_done(self, told: Callable[[], None]) -> None:
        """Calls `told` once, when the step has ended: at once, or on the thread that ends it."""
        self._task.when_done(told)

    def _seen(self, event: Event) -> Iterable[Event]:
        """What the reader sees of an event."""
        return (event,)

    @property
    def ends_soon(self) -> bool:
        """It was cancelled: whoever needs its workspace can wait for it."""
        return self._task.cancel_requested

    @property
    def usage(self) -> Usage:
        """Tokens, by what became of them. Waits for the end, and raises as `result`."""
        return self.result().usage

    @property
    def timings(self) -> Timings:
        """Seconds, by phase. Waits for the end, and raises as `result`."""
        return self.result().timings


class Answer(Step):
    """A step that answers. What it gives of the answer waits for the end, and raises as `result`.

    Of an answer in the chat template, a piece of text is followed by what it adds to the message
    (MessagePiece), and the result has the whole message. Both are made in the reader's thread.
    """

    def __init__(self, task: Task[StepResult], applied: AppliedTemplate | None = None) -> None:
        """applied: the template that the answer is read in; None: it is text only."""
        super().__init__(task)
        self._reader = None if applied is None else MessageReader(applied)

    def result(self, timeout: float | None = None) -> StepResult:
        return self._read(super().result(timeout))

    @property
    def message(self) -> ParsedMessage | None:
        """Content, reasoning and tool calls of an answer in the chat template."""
        return self.result().message

    def _read(self, result: StepResult) -> StepResult:
        if self._reader is None:
            return result
        return replace(result, message=self._reader.message(result.text))

    def _seen(self, event: Event) -> Iterable[Event]:
        if self._reader is not None and isinstance(event, TextPiece):
            return (event, *map(MessagePiece, self._reader.push(event.text)))
        if self._reader is not None and isinstance(event, Finished):
            last = self._reader.finish(event.result.text)
            return (*map(MessagePiece, last), Finished(self._read(event.result)))
        return (event,)

    @property
    def text(self) -> str:
        """The answer, without the stop string."""
        return self.result().text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The answer as it stands in the history, the end token included."""
        return self.result().tokens

    @property
    def finish_reason(self) -> FinishReason:
        """'stop': it ended itself, or at a stop string; 'length': at max_tokens or at the end of what the
        model can attend to; 'truncated': `stop` was called."""
        return self.result().finish_reason

    @property
    def recall(self) -> tuple[RecallReport, ...]:
        """What was recalled for the question, and in the midst of a long answer; empty while everything
        fits the view."""
        return self.result().recalls
