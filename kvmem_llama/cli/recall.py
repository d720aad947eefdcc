"""`kvmem recall`: which blocks a question would recall, without answering it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import Cancelled, InvalidOption, KvmemError
from ..settings import Settings
from .inputs import Document, from_argument, note_repeated, note_reused, read_documents
from .messages import warn
from .opening import Chosen, chosen_workspace
from .parameters import Files, GoOn, ReadOnly, Workspace

if TYPE_CHECKING:
    from ..memory.search import SearchResult


def recall(
    settings: Settings,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="what to look for", show_default=False)],
    file: Files = None,
    workspace: Workspace = None,
    go_on: GoOn = False,
    read_only: ReadOnly = False,
    n_blocks: Annotated[int, typer.Option("-k", "--blocks", min=1, help="blocks to show")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print the blocks as one line of JSON")] = False,
) -> None:
    """Show which blocks QUERY would recall, the best first, without an answer. Nothing is added but FILEs."""
    try:
        chosen = chosen_workspace(settings, workspace, go_on=go_on, read_only=read_only)
        documents = read_documents(file or [], warn, stdin=False)
        if chosen is None and not documents:
            raise InvalidOption(
                "--workspace", "", "there is nothing to search",
                hint="Name a workspace with -w NAME, use --continue, or read a text with -f FILE.",
            )  # fmt: skip
        if chosen is not None and not documents:
            chosen = replace(chosen, must_exist=True)  # a new one would hold nothing to find
        found = _search(settings, chosen, query, documents, n_blocks)
    except KvmemError as error:
        if as_json:
            from .json_lines import emit_error

            emit_error(error)
        raise
    if as_json:
        from dataclasses import asdict

        from .json_lines import emit

        blocks = [asdict(block) for block in found.blocks]
        emit("found", n_candidates=len(found.ranking.candidates), blocks=blocks)
        return
    from .recall_table import found_lines

    for line in found_lines(found):
        print(line)


def _search(
    settings: Settings, chosen: Chosen | None, query: str, documents: list[Document], n_blocks: int
) -> SearchResult:
    from .opening import opened_workspace
    from .output import TextPresenter, show

    text = from_argument(query, "the query", warn)
    with opened_workspace(settings, "", chosen) as workspace:
        if chosen is not None:
            note_repeated(workspace, documents)
        for document in documents:
            stream = workspace.read(document.text, document.source)
            try:
                note_reused(show(stream, TextPresenter(show_recall=False)))
            except KeyboardInterrupt:
                stream.cancel()
                raise Cancelled from None
        return workspace.search(text, n_blocks)
