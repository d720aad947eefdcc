"""`kvmem demo`: the main job, start to end, on a text many times longer than the view."""

from __future__ import annotations

import shutil
import sys
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
    from ..memory.report import Progress, RecallReport
    from ..workspace import Workspace
    from .output import TextPresenter

MANUAL: Final = Path("vendor/build/stock/llama.cpp/tools/server/README.md")
MANUAL_NAME: Final = "llama.cpp's README of its server"
QUESTIONS: Final = (
    "What does the health endpoint return while the model is still loading?",
    "Which option sets the path where the slot KV cache is saved?",
    "How does one turn on the Prometheus metrics endpoint?",
)
N_WORDS: Final = 12  # of the beginning of a text, for a question about it
N_CHARACTERS: Final = 80_000  # of the manual: over three windows of the built-in model, minutes to read
N_VIEW: Final = 2048  # tokens: a quarter of the built-in model's window
N_ANSWER: Final = 48  # tokens
N_SHOWN: Final = 5  # recalled blocks
SURE: Final = 3.0  # seconds of reading before its speed is taken for that of the rest


def demo(
    settings: Settings,
    file: Annotated[
        Path, typer.Argument(help="text to read; by default the manual of llama.cpp's server")
    ] = MANUAL,
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "-q",
            metavar="QUESTION",
            help="to ask; none: what its beginning is about; may be repeated",
        ),
    ] = None,
) -> None:
    """Read a text much longer than the view, ask about it, show what was recalled and what it cost."""
    from .opening import opened_workspace
    from .output import TextPresenter, show

    is_manual = file == MANUAL
    if is_manual and not file.is_file():
        raise InputError(
            str(file), "it is not here", hint="Run scripts/demo in the source tree, or name a text file."
        )
    documents = read_documents([str(file)], warn, stdin=False)
    if not documents:
        raise InputError(str(file), "it is empty", hint="Name a text file, a long one.")
    (document,) = documents
    text, name = document.text, document.source
    if is_manual:
        text, name = text[:N_CHARACTERS], MANUAL_NAME
    questions = question or (QUESTIONS if is_manual else (_about_beginning(text),))
    settings = replace(settings, n_ctx=settings.n_ctx or N_VIEW, temp=0.0)
    presenter = TextPresenter(show_recall=False)
    with opened_workspace(settings, settings.system_prompt) as workspace:
        began = time.monotonic()
        show(workspace.read(text, source=document.source), _telling(name, workspace.n_view))
        read_s = max(time.monotonic() - began, 1e-3)
        n_read, n_view = workspace.n_tokens, workspace.n_view
        times = f"{n_read / n_view:.1f} times" if n_read > n_view else "all of it fits into"
        print(
            f"read {n_read:,} tokens of {name} in {read_s:.0f} s ({n_read / read_s:,.0f} tokens/s): "
            f"{times} the view of {n_view:,} tokens"
        )
        if not is_manual and not question:
            note("No question was given (-q QUESTION), so this asks what the beginning of the text is about.")
        recalled = False
        for one in questions:
            with workspace.fork() as fork:  # every question sees the same history
                recalled |= _ask(fork, one, presenter, read_s / max(n_read, 1))
    if not recalled:
        print(
            f"\nTo see recall at work, name a text of several times {n_view:,} tokens (a token is about 4 "
            "characters of English)."
        )
    kvmem = _program()
    print(
        f"\nNext: `{kvmem} chat -w NAME -f FILE` reads a text of yours, keeps it and talks about it; "
        f"`{kvmem} chat -w NAME` goes on there, any day."
    )


def _about_beginning(text: str) -> str:
    """A question that fits any text. Its words are there to be found: a small model needs them."""
    words = " ".join(text[:1000].split()[:N_WORDS])
    return f'The text begins with "{words[:200]}". What is it about?'


def _telling(name: str, n_view: int) -> TextPresenter:
    """Shows a read, and says what is read, and how long that takes at the speed of its beginning."""
    from .output import TextPresenter

    class Telling(TextPresenter):
        began = 0.0
        first = -1  # tokens that were done at the beginning; -1: nothing was told
        is_told = False  # how long it takes

        def progress(self, event: Progress) -> None:
            now = time.monotonic()
            if self.first < 0:
                self.began, self.first = now, event.done
                note(f"reading {name}: {event.total:,} tokens, with a view of {n_view:,}")
            elif not self.is_told and now - self.began >= SURE and event.done > self.first:
                self.is_told = True
                speed = (event.done - self.first) / (now - self.began)
                self.close_bar()
                note(f"at {speed:,.0f} tokens/s that takes about {_duration(event.total / speed)}")
            super().progress(event)

    return Telling(show_recall=False)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes"


def _program() -> str:
    """How to call it from a shell: scripts/demo runs one that is not on the path."""
    path = sys.argv[0]
    return path if Path(path).name == "kvmem" and shutil.which("kvmem") is None else "kvmem"


def _ask(workspace: Workspace, question: str, presenter: TextPresenter, seconds_per_token: float) -> bool:
    """Asks and prints. True: something was recalled."""
    from ..engine.sampling_params import SamplingParams
    from .output import show

    print(f"\n> {question}", flush=True)
    n_read = workspace.n_tokens
    result = show(workspace.ask(question, sampling=SamplingParams(temp=0.0), max_tokens=N_ANSWER), presenter)
    if not result.recalls:
        print("(everything fits the view: nothing had to be recalled)")
        return False
    report = result.recalls[0]
    _print_best(report)
    n_selected = sum(block.count for block in report.blocks if block.why == "selected")
    print(
        f"  recall took {report.timings.total_s:.2f} s; reading the {n_selected:,} recalled tokens again "
        f"would take {n_selected * seconds_per_token:.1f} s, the whole text "
        f"{n_read * seconds_per_token:.0f} s"
    )
    return True


def _print_best(report: RecallReport) -> None:
    from .recall_table import recall_lines, snippet

    print(f"  {next(iter(recall_lines(report)))}")
    ranked = sorted(
        (block for block in report.blocks if block.rank is not None), key=lambda block: block.rank or 0
    )
    for block in ranked[:N_SHOWN]:
        last = block.start + block.count - 1
        print(f"  {block.rank:>3}. tokens {block.start}..{last}: {snippet(block.text, 72)}")
