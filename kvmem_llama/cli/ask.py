"""`kvmem ask`: reads texts, answers one question about them."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import Cancelled, KvmemError
from ..settings import Settings
from .inputs import Document, from_argument, note_repeated, note_reused, read_documents
from .messages import note, warn
from .opening import Chosen, chosen_workspace
from .parameters import Files, GoOn, ReadOnly, ShowRecall, Workspace


def ask(
    settings: Settings,
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="what to ask", show_default=False)],
    file: Files = None,
    workspace: Workspace = None,
    go_on: GoOn = False,
    read_only: ReadOnly = False,
    show_recall: ShowRecall = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print every event as a line of JSON instead of the answer")
    ] = False,
) -> None:
    """Read files (or standard input), then answer QUESTION about them."""
    try:
        chosen = chosen_workspace(settings, workspace, go_on=go_on, read_only=read_only)
        documents = read_documents(file or [], warn, stdin=True)
        _answer(settings, chosen, question, documents, show_recall=show_recall, as_json=as_json)
    except KvmemError as error:
        if as_json:
            from .json_lines import emit_error

            emit_error(error)
        raise


def _answer(
    settings: Settings,
    chosen: Chosen | None,
    question: str,
    documents: list[Document],
    *,
    show_recall: bool,
    as_json: bool,
) -> None:
    from .json_lines import JsonPresenter
    from .opening import opened_workspace, sampling_of
    from .output import Presenter, TextPresenter, show
    from .recall_table import no_recall_line

    text = from_argument(question, "the question", warn)
    system = from_argument(settings.system_prompt, "the system prompt", warn)
    with opened_workspace(settings, system, chosen) as workspace:
        presenter: Presenter = TextPresenter(show_recall=show_recall)
        if as_json:
            presenter = JsonPresenter(None if chosen is None else workspace.stats)
        if chosen is not None:
            note_repeated(workspace, documents)
        stream = workspace.ask(
            text,
            [(document.source, document.text) for document in documents],
            sampling=sampling_of(settings, workspace),
            max_tokens=settings.n_predict,
        )
        try:
            result = show(stream, presenter)
        except KeyboardInterrupt:
            stream.cancel()
            raise Cancelled from None
        except BaseException:
            stream.cancel()  # the reader of standard output went away, or a defect: do not compute on
            raise
        if not as_json:
            note_reused(result)
        if show_recall and not as_json and not result.recalls:
            stats = workspace.stats()
            if stats.n_tokens <= stats.n_view:
                note(no_recall_line(stats.n_tokens))
