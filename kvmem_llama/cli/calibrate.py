"""`kvmem calibrate`: which heads of a model find text; about as long as reading 25,000 tokens takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .. import models
from ..calibration import Calibration, dump, path_of
from ..errors import Cancelled, InvalidOption
from ..settings import Settings
from .messages import note

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..calibrating.calibrate import Progress

_SPEED: Final = ("n_ubatch", "n_threads", "n_threads_batch", "n_gpu_layers", "use_mmap")
OPTIONS: Final = frozenset((*_SPEED, "data_dir", "cache_dir", "verbose"))
"""Of the table: what changes how fast it is, and where files are. The rest is set here."""


def calibrate(
    settings: Settings,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="path of a GGUF file; by default the built-in model", show_default=False
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="PATH",
            help="file to write; by default where it is found by itself",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it is there")] = False,
) -> None:
    """Find out which attention heads of MODEL find text, and write it where every command looks for it."""
    from ..gguf_info import check_policy, read_model_info

    path = models.resolve(model or settings.model, settings.cache_path, note)
    info = read_model_info(path)
    check_policy(info, "kvmem")
    goal = out if out is not None else path_of(settings, info.fingerprint)
    _check_goal(goal, force)

    from ..calibrating.calibrate import calibrate as run

    note(f"calibrating {info.name} ...")
    try:
        with _bar() as report:
            found = run(path, settings, report)
    except KeyboardInterrupt:
        raise Cancelled from None
    dump(found, goal)
    for line in _lines(found, goal):
        print(line)


def _check_goal(goal: Path, force: bool) -> None:
    """Before minutes of work: what cannot be written at their end. Raises InvalidOption."""
    if goal.is_dir():
        raise InvalidOption("--out", str(goal), "it is a folder", hint="Name a file in it.")
    if goal.exists() and not force:
        raise InvalidOption(
            "--out", str(goal), "it is there already", hint="Use --force to replace it, or name another file."
        )
    folder = next(parent for parent in goal.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidOption(
            "--out", str(goal), f"{str(folder)!r} cannot be written to",
            hint="Choose a file in a folder that you may write to.",
        )  # fmt: skip


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn())
    with Bar(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True,
        redirect_stdout=False, redirect_stderr=False, disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("calibrating", total=None)
        yield lambda progress: bar.update(task, completed=progress.done, total=progress.total)


def _lines(found: Calibration, goal: Path) -> Iterator[str]:
    measured = found.measured
    names = " ".join(f"{head.layer}.{head.head}" for head in found.heads)
    yield f"{len(found.heads)} of {measured['n_heads_of_model']} heads (layer.head): {names}"
    yield f"{measured['n_heads_by_prose_and_by_code']} heads are among the best by prose and by code alike"
    yield (
        f"their index takes {measured['index_bytes_per_token']} bytes per token, "
        f"that of Mean-K {measured['mean_k_bytes_per_token']}"
    )
    shares = ", ".join(f"{channel} {share:g}" for channel, share in found.shares.items())
    spread = ", ".join(f"{channel} {part:g}" for channel, part in found.spread.items())
    centred = "queries centred" if found.centred else "queries as they are"
    yield f"shares: {shares}; spread: {spread}; {centred}"
    yield "found of known passages at 512 tokens, all questions / those in other words:"
    for way in ("mean_k", "lexical", "heads", "fused"):
        every, other = (measured.get(f"coverage_512_{way}{suffix}", 0.0) for suffix in ("", "_reworded"))
        yield f"  {way:8} {every:.3f} / {other:.3f}"
    yield f"written to {goal}"
