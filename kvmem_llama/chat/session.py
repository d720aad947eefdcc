"""A chat apart from its terminal: asks, reads, and reports what became of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..cli.inputs import Document
from ..cli.opening import sampling_of
from ..cli.output import show
from ..errors import Cancelled, DecodeFailed, EngineError, KvmemError, LibraryError, ModelError
from ..memory.report import Progress, StepResult
from ..settings import Settings
from .look import Look
from .screen import Screen
from .seats import Seat, Seats
from .signals import Signals
from .terminal_mode import silent_keys

if TYPE_CHECKING:
    from ..workspace import Step


def is_fatal(error: KvmemError) -> bool:
    """Nothing can be asked any more."""
    return isinstance(error, (LibraryError, ModelError)) or (
        isinstance(error, EngineError) and not isinstance(error, DecodeFailed)
    )


class Session:
    """One chat. Main thread only."""

    def __init__(
        self,
        settings: Settings,
        seats: Seats,
        screen: Screen,
        look: Look,
        documents: Sequence[Document] = (),
    ) -> None:
        """documents: to be read with the first message."""
        self.settings = settings
        self.seats = seats
        self.screen = screen
        self.look = look
        self.signals = Signals(screen.leave)
        self.pending = list(documents)  # not yet part of the conversation
        self.system = seats.now.workspace.system  # of the workspaces that are made from now on
        self.thinks = True  # the model is asked to reason before it answers, if it can
        self.prefill = ""  # of the next message
        self.ended = False
        self.refused: KvmemError | None = None  # what the last message that failed, failed with
        self._n_again = 0

    @property
    def seat(self) -> Seat:
        return self.seats.now

    def say(self, *lines: str) -> None:
        self.screen.say(lines)

    # -- steps

    def ask(self, question: str, *, again: bool = False) -> bool:
        """One turn -> whether it was answered.

        again: the answer is to differ from an earlier one, though a seed was given.
        """
        self._n_again = self._n_again + 1 if again else 0
        seed = self.settings.seed
        settings = self.settings if seed < 0 else replace(self.settings, seed=(seed + self._n_again) % 2**32)
        from ..engine.templates import TemplateOptions

        seat, documents = self.seat, self.pending
        result = self._run(
            lambda: seat.workspace.ask(
                question,
                [(document.source, document.text) for document in documents],
                sampling=sampling_of(settings, seat.workspace),
                max_tokens=settings.n_predict,
                options=TemplateOptions(enable_thinking=self.thinks),
            )
        )
        if result is None:
            self.say("[cancelled: the message is not part of the conversation]")
        if not isinstance(result, StepResult):
            return False
        self.pending = []
        seat.last = result
        if result.finish_reason == "truncated":
            self.say("[stopped: the answer is kept as far as it goes]")
        return True

    def read(self, documents: Sequence[Document]) -> None:
        """Reads texts into the workspace, one after the other, as far as Ctrl-C lets it."""
        for i, document in enumerate(documents):
            counts: list[Progress] = []
            seat = self.seat
            start = partial(seat.workspace.read, document.text, document.source)
            result = self._run(start, counts)
            if isinstance(result, StepResult):
                reused = f" ({result.n_reused:,} of them had been read)" if result.n_reused else ""
                n = result.n_read + result.n_reused
                self.say(f"[read {document.source}: {n:,} tokens{reused}]")
                continue
            if result is None:
                kept = ", ".join(d.source for d in documents[:i])
                self.say(_stopped(document.source, counts[-1] if counts else None, kept))
            return

    def note_stats(self) -> None:
        """Takes note of the state of memory, for the bar."""
        if self.screen.typed:
            with contextlib.suppress(KvmemError):
                self.seat.stats = self.seat.workspace.stats()

    def last_answer(self) -> str:
        """Without its reasoning; empty if there is none."""
        message = self.seat.workspace.last_message()
        return message.content if message else ""

    # -- private

    def _run(
        self, start: Callable[[], Step], counts: list[Progress] | None = None
    ) -> StepResult | KvmemError | None:
        """Shows a step to its end -> None if it was cancelled, the error if it was refused.

        counts: takes its progress. Raises what ends the chat.
        """
        presenter = self.screen.presenter
        try:
            stream = start()

            def stop() -> None:
                # Before the answer began there is nothing to keep.
                if presenter.answering:
                    stream.stop()
                else:
                    stream.cancel()

            try:
                with silent_keys(), self.signals.during(stop):
                    return show(stream, presenter, counts)
            except BaseException:
                stream.cancel()
                raise
        except Cancelled:
            return None
        except KvmemError as error:
            if is_fatal(error):
                raise
            self.screen.failed(error)
            self.refused = error
            return error
        finally:
            self.note_stats()


def _stopped(source: str, seen: Progress | None, kept: str) -> str:
    done = f"{seen.done:,} of {seen.total:,} tokens were read" if seen is not None else "nothing was read"
    others = f" What was read before it stayed: {kept}." if kept else ""
    return f"[stopped at {source}: {done}. It is no part of the history; /read goes on from there.{others}]"
