"""What the commands of a group (`kvmem workspace`, `kvmem model`) have in common: --json, and tables."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from ..errors import KvmemError
from ..settings import Settings
from .options import PlainCommand, command

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="print one line of JSON")]
Add: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]


def adder(app: typer.Typer) -> Callable[[str, Sequence[str]], Add]:
    """Decorators that add `function(settings, *, as_json, ...)` to a group under a name, with these options
    of the table. With --json an error is an object on standard output, too."""

    def named(name: str, options: Sequence[str]) -> Add:
        def add(function: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(function)
            def told(settings: Settings, *, as_json: bool, **own: Any) -> None:
                try:
                    function(settings, as_json=as_json, **own)
                except KvmemError as error:
                    if as_json:
                        from .json_lines import error_fields

                        emit_object(**error_fields(error))
                    raise

            app.command(name, cls=PlainCommand)(command(told, options))
            return function

        return add

    return named


def emit_object(**fields: Any) -> None:
    """One line of JSON on standard output."""
    from .json_lines import plain

    sys.stdout.write(json.dumps(plain(fields), allow_nan=False) + "\n")


def number(key: str, n: int) -> str:
    """`n` as text; in larger units too, if `key` says that it counts bytes."""
    if n < 1_000_000 or "bytes" not in key.split("_"):
        return f"{n:,}"
    return f"{n:,} ({n / 1e9:,.2f} GB)" if n >= 1_000_000_000 else f"{n:,} ({n / 1e6:,.1f} MB)"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on standard output. right: numbers of the columns that are set right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=any(head), pad_edge=False)
    for i, title in enumerate(head):
        table.add_column(title, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("".join(c if c.isprintable() else " " for c in cell)) for cell in row))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)
