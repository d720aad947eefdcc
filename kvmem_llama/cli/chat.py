"""`kvmem chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..errors import BudgetError, Cancelled, DecodeFailed, InputError, KvmemError, exit_code
from ..settings import Settings
from .inputs import Document, from_argument, from_stdin, read_documents
from .interrupts import Interrupts
from .messages import note, report_error, warn
from .parameters import GoOn, ReadOnly, ShowRecall
from .parameters import Workspace as NamedWorkspace

if TYPE_CHECKING:
    from ..workspace import Workspace
    from .output import TextPresenter

_PROMPT: Final = "> "
_HELP: Final = "Ctrl-C stops an answer. Ctrl-D, /exit, or Ctrl-C twice ends the chat."


def chat(
    settings: Settings,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="text to read with the first message; may be repeated"
        ),
    ] = None,
    workspace: NamedWorkspace = None,
    go_on: GoOn = False,
    read_only: ReadOnly = False,
    show_recall: ShowRecall = False,
) -> None:
    """Talk with the model; the conversation may outgrow its window.

    Ctrl-C stops an answer (what there is of it stays in the conversation), twice within a second ends the
    chat, as Ctrl-D does. Without a terminal, every line of standard input is one message, and the exit code
    is that of the last message that was refused, if any was.
    """
    from .opening import chosen_workspace, opened_workspace

    chosen = chosen_workspace(settings, workspace, go_on=go_on, read_only=read_only)
    documents = read_documents(file or [], warn, stdin=False)
    system = from_argument(settings.system_prompt, "the system prompt", warn)

    from .output import TextPresenter

    with opened_workspace(settings, system, chosen) as opened:
        talk = _Conversation(settings, opened, documents, TextPresenter(show_recall=show_recall))
        talk.run()
    if talk.refused is not None and not _typed():
        raise typer.Exit(exit_code(talk.refused))


def _typed() -> bool:
    """Someone types the messages, and has seen which were refused."""
    return sys.stdin is not None and sys.stdin.isatty()


class _Conversation:
    """Reads messages until there are no more; a message that fails is reported and forgotten."""

    def __init__(
        self, settings: Settings, workspace: Workspace, documents: list[Document], presenter: TextPresenter
    ) -> None:
        from .opening import sampling_of

        self._workspace = workspace
        self._pending = documents  # not yet part of the conversation
        self._presenter = presenter
        self._sampling = sampling_of(settings, workspace)
        self._max_tokens = settings.n_predict
        self._interrupts = Interrupts()
        self._terminal = _typed() and sys.stdout.isatty()
        self.refused: KvmemError | None = None  # what the last message that failed, failed with

    def run(self) -> None:
        if self._terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (gives input() line editing and history)
            note(_HELP)
        elif hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(encoding="utf-8")
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="surrogateescape")  # `from_stdin` warns of what is replaced
        while (message := self._next_message()) is not None:
            if message:
                self._turn(message)

    def _next_message(self) -> str | None:
        if sys.stdin is None:
            return None
        try:
            message = input(_PROMPT if self._terminal else "").strip()
        except EOFError:
            if self._terminal:
                note("")
            return None
        except KeyboardInterrupt:
            if self._interrupts.second():
                note("")
                raise
            note(f"\n{_HELP}")
            return ""
        return None if message == "/exit" else from_stdin(message, "the message", warn)

    def _turn(self, message: str) -> None:
        from .output import show

        try:
            stream = self._workspace.ask(
                message,
                [(document.source, document.text) for document in self._pending],
                sampling=self._sampling,
                max_tokens=self._max_tokens,
            )

            def stop() -> None:
                # Before the answer began there is nothing to keep.
                if self._presenter.answering:
                    stream.stop()
                else:
                    stream.cancel()

            try:
                with self._interrupts.during(stop):
                    result = show(stream, self._presenter)
            except BaseException:
                stream.cancel()
                raise
        except (BudgetError, DecodeFailed, InputError) as error:
            report_error(error)
            self.refused = error
            return
        except Cancelled:
            note("[cancelled: the message is not part of the conversation]")
            return
        self._pending = []
        if result.finish_reason == "truncated":
            note("[stopped: the answer is kept as far as it goes]")
