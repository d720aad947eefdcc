"""`kvmem demo`: the main job, start to end, on a text many times longer than the view."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..errors import InputError
from ..settings import Settings
from .inputs import read_documents
from .messages import note, warn

if TYPE_CHECKING:
    from ..memory.report import RecallReport
    from ..workspace import Workspace
    from .output import TextPresenter

MANUAL: Final = Path("vendor/build/stock/llama.cpp/tools/server/README.md")
QUESTIONS: Final = (
    "What does the health endpoint return while the model is still loading?",
    "Which option sets the path where the slot KV cache is saved?",
    "How does one turn on the Prometheus metrics endpoint?",
)
N_CHARACTERS: Final = 80_000  # of the manual: over three windows of the built-in model, minutes to read
N_VIEW: Final = 2048  # tokens: a quarter of the built-in model's window
N_ANSWER: Final = 48  # tokens
N_SHOWN: Final = 5  # recalled blocks


def demo(
    settings: Settings,
    file: Annotated[
        Path, typer.Argument(help="text to read; by default the manual of llama.cpp's server")
    ] = MANUAL,
) -> None:
    """Read a text much longer than the view, ask about it, show what was recalled and what it cost."""
    from .opening import opened_workspace
    from .output import TextPresenter, show

    if file == MANUAL and not file.is_file():
        raise InputError(
            str(file), "it is not here", hint="Run scripts/demo in the source tree, or name a text file."
        )
    (document,) = read_documents([str(file)], warn, stdin=False)
    text = document.text[:N_CHARACTERS] if file == MANUAL else document.text
    settings = replace(settings, n_ctx=settings.n_ctx or N_VIEW, temp=0.0)
    presenter = TextPresenter(show_recall=False)
    with opened_workspace(settings, settings.system_prompt) as workspace:
        note(f"reading {document.source} ...")
        began = time.monotonic()
        show(workspace.read(text, source=document.source), presenter)
        read_s = time.monotonic() - began
        n_read, n_view = workspace.n_tokens, workspace.n_view
        print(
            f"read {n_read:,} tokens of {document.source} in {read_s:.0f} s "
            f"({n_read / read_s:.0f} tokens/s): {n_read / n_view:.0f} times the view of {n_view:,} tokens"
        )
        for question in QUESTIONS:
            with workspace.fork() as fork:  # every question sees the same history
                _ask(fork, question, presenter, read_s / n_read)


def _ask(workspace: Workspace, question: str, presenter: TextPresenter, seconds_per_token: float) -> None:
    from ..engine.sampler import SamplingParams
    from .output import show

    print(f"\n> {question}", flush=True)
    n_read = workspace.n_tokens
    result = show(workspace.ask(question, sampling=SamplingParams(temp=0.0), max_tokens=N_ANSWER), presenter)
    if not result.recalls:
        print("(everything fits the view: nothing had to be recalled)")
        return
    report = result.recalls[0]
    _print_best(report)
    n_selected = sum(block.count for block in report.blocks if block.why == "selected")
    print(
        f"  recall took {report.timings.total_s:.2f} s; reading the {n_selected:,} recalled tokens again "
        f"would take {n_selected * seconds_per_token:.1f} s, the whole text "
        f"{n_read * seconds_per_token:.0f} s"
    )


def _print_best(report: RecallReport) -> None:
    from .recall_table import recall_lines, snippet

    print(f"  {next(iter(recall_lines(report)))}")
    ranked = sorted(
        (block for block in report.blocks if block.rank is not None), key=lambda block: block.rank or 0
    )
    for block in ranked[:N_SHOWN]:
        last = block.start + block.count - 1
        print(f"  {block.rank:>3}. tokens {block.start}..{last}: {snippet(block.text, 72)}")
