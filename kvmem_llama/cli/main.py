"""Entry point of the `kvmem` command: dispatch, error lines, exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from .. import __version__
from ..errors import Cancelled, KvmemError, exit_code
from ..settings import BY_NAME, Settings
from . import model, workspaces
from .ask import ask
from .calibrate import OPTIONS as CALIBRATING
from .calibrate import calibrate
from .chat import chat
from .demo import demo
from .doctor import doctor
from .messages import note, report_defect, report_error
from .options import PlainCommand, PlainGroup, command, spell_out
from .recall import recall
from .serve import serve
from .streams import OutputClosed, OutputFailed, safe_streams

_USAGE: Final = 2
_OUTPUT_CLOSED: Final = 141  # 128 + SIGPIPE, as a shell shows a process that died of it
_OUTPUT_FAILED: Final = 1
_INTERRUPTED: Final = 130  # 128 + SIGINT
_MORE: Final = "More options, for measuring and research: docs/options.md."

# Plain help: rich would take longer to import than everything else together.
app = typer.Typer(
    name="kvmem",
    cls=PlainGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command(cls=PlainCommand, epilog=_MORE)(command(ask))
app.command(cls=PlainCommand, epilog=_MORE)(command(chat))
app.command(cls=PlainCommand, epilog=_MORE)(command(doctor))
app.command(cls=PlainCommand, epilog=_MORE)(command(recall))
app.command(cls=PlainCommand)(command(calibrate, only=CALIBRATING))
app.command(cls=PlainCommand, epilog=_MORE)(command(demo))
app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)(serve)
app.add_typer(workspaces.app, name="workspace")
app.add_typer(model.app, name="model")

# Typer carries its own copy of click, or uses the installed one, depending on its version.
_UsageError: Final[type[Exception]] = next(
    cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "UsageError"
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvmem {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _kvmem(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Virtual memory for the KV cache of long-running agents, on llama.cpp."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command -> its exit code (errors.EXIT_CODES). Never raises, shows no traceback unasked.

    arguments: without the program name; by default those of the process.
    """
    try:
        with safe_streams():
            return _run_to_the_end(spell_out(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # between the steps below
        return _INTERRUPTED


def _run_to_the_end(argv: list[str]) -> int:
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except OutputClosed:
        return _OUTPUT_CLOSED
    except OutputFailed as error:
        note(f"error: cannot write the answer: {error}")
        note("Make room on the disk, or send standard output elsewhere.")
        return _OUTPUT_FAILED


def _run(argv: list[str]) -> int:
    try:
        return app(argv, prog_name="kvmem", standalone_mode=False) or 0
    except (OutputClosed, OutputFailed):
        raise
    except Cancelled as error:
        note(error.what)
        return exit_code(error)
    except KvmemError as error:
        report_error(error)
        if _verbose(argv):
            traceback.print_exc()
        return exit_code(error)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except _UsageError as error:
        _report_usage(error)
        return _USAGE
    except Exception as error:
        report_defect(error)
        if _verbose(argv):
            traceback.print_exc()
        return exit_code(error)


def _report_usage(error: BaseException) -> None:
    message = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    note(f"error: {message.strip().removesuffix('.')}")
    note(f"See `{context.command_path if context is not None else 'kvmem'} --help`.")


def _verbose(argv: Sequence[str]) -> bool:
    if any(flag in argv for flag in BY_NAME["verbose"].flags):
        return True
    try:
        return Settings.from_sources().verbose
    except KvmemError:
        return False


if __name__ == "__main__":
    sys.exit(main())
