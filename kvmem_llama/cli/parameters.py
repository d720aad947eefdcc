"""Parameters that several commands take beside the options of the table."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Files: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--file", "-f", metavar="FILE", help="text to read first; may be repeated; - is standard input"
    ),
]
Workspace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--workspace", "-w", metavar="NAME", help="go on in this durable workspace; it is made if need be"
    ),
]
GoOn: TypeAlias = Annotated[
    bool, typer.Option("--continue", help="go on in the durable workspace that was used last")
]
ReadOnly: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--read-only", help="use the durable workspace as it is now, also while it is in use; keep nothing"
    ),
]
ShowRecall: TypeAlias = Annotated[
    bool, typer.Option("--show-recall", help="show which blocks were recalled, and why")
]
