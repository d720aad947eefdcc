"""Command-line parameters made from the table of options, and llama.cpp's way of writing flags."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ..settings import BY_NAME, OPTIONS, Option, Settings

# Left out of --help, which is long enough without them; docs/options.md has them all.
_HIDDEN_SECTIONS: Final = frozenset({"Measuring and research"})


class _Plain:
    """Leaves text as it was typed: the table of options reads it, and Typer would import pydantic to do
    nothing with it, which takes as long as importing NumPy."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
            if kind in (str, bool, list[str]):
                parameter.get_runtime_param = _AsTyped
        return parameters


class PlainCommand(_Plain, TyperCommand):
    """A command, see _Plain."""


class PlainGroup(_Plain, TyperGroup):
    """A group of commands, see _Plain."""


class _AsTyped:
    """Stands for Typer's way to make a value of what was typed."""

    def coerce(self, value: Any, **_: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value


def command(function: Callable[..., None], only: Collection[str] | None = None) -> Callable[..., None]:
    """`function(settings, **own)` as a Typer callback: its own parameters and the options of the table.

    only: names of the options it takes; None: all.
    """
    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "settings"
    ]
    parameters = own + [_parameter(o) for o in OPTIONS if only is None or o.name in only]

    @functools.wraps(function)
    def callback(**values: Any) -> None:
        given = {name: joined(option, values.pop(name)) for name, option in BY_NAME.items() if name in values}
        settings = Settings.from_sources(given)
        function(settings, **values)

    # Typer reads both.
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return callback


def _parameter(option: Option) -> inspect.Parameter:
    """Typer only collects text; parsing and limits are the table's, and so are the messages."""
    flags = _click_flags(option)
    short = "".join(f" [{flag}]" for flag in option.flags if _is_clustered(flag))
    shown = "" if option.default == "" else f" [default: {_shown_default(option)}]"
    settings: dict[str, Any] = {
        "help": option.help + short + shown,
        "hidden": option.section in _HIDDEN_SECTIONS,
        "show_default": False,
    }
    if option.type is not bool:
        settings["metavar"] = "|".join(option.choices) or (option.unit or "number").upper()
    annotation: Any = bool | None if option.type is bool else str | None
    if option.separator:
        annotation = list[str] | None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, *flags, **settings),
        annotation=annotation,
    )


def joined(option: Option, value: Any) -> Any:
    """The values of a flag that was given several times as one text, in which each stays what it is."""
    if not isinstance(value, list):
        return value
    separator = option.separator
    if separator == ";":  # where a text may hold one, it can be written so
        value = [item.replace(";", r"\x3b") for item in value]
    return separator.join(value) or None


def _click_flags(option: Option) -> list[str]:
    flags = [flag for flag in option.flags if not _is_clustered(flag)]
    if option.type is bool:
        long = option.flags[-1]
        flags[flags.index(long)] = f"{long}/--no-{long.removeprefix('--')}"
    return flags


def _shown_default(option: Option) -> str:
    return {True: "on", False: "off"}[bool(option.default)] if option.type is bool else str(option.default)


def _is_clustered(flag: str) -> bool:
    """One dash and several letters (-ngl), which most parsers take for several one-letter flags."""
    return flag.startswith("-") and not flag.startswith("--") and len(flag) > 2


_LONG: Final = {flag: option.flags[-1] for option in OPTIONS for flag in option.flags if _is_clustered(flag)}
_TAKES_VALUE: Final = frozenset(
    ["-f", "--file", "-q", "--question", "-w", "--workspace"]
    + [flag for option in OPTIONS if option.type is not bool for flag in option.flags]
)


def spell_out(arguments: Sequence[str]) -> list[str]:
    """Arguments with llama.cpp's spellings replaced: -ngl by --gpu-layers, --ctx_size by --ctx-size.

    Values of options, and whatever follows --, stay as they are.
    """
    out: list[str] = []
    is_value = False
    for i, argument in enumerate(arguments):
        if is_value:
            is_value = False
        elif argument == "--":
            return out + list(arguments[i:])
        else:
            name, equals, value = argument.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            name = _LONG.get(name, name)
            is_value = not equals and name in _TAKES_VALUE
            argument = name + equals + value
        out.append(argument)
    return out
