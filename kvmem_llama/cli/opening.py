"""From settings to an open workspace, for the commands that talk to a model."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from .. import models
from ..errors import InputError, InvalidOption, KvmemError, WorkspaceNotFound
from ..settings import BY_NAME, Settings
from .inputs import Document, read_documents
from .messages import note, warn

if TYPE_CHECKING:
    from ..engine.sampler import SamplingParams
    from ..workspace import Workspace, WorkspaceEngine


_MANY_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Chosen:
    """The durable workspace that a command uses."""

    name: str
    must_exist: bool = False
    read_only: bool = False
    is_last: bool = False  # not named: the one that was used last


def chosen_workspace(
    settings: Settings, name: str | None, *, go_on: bool, read_only: bool = False
) -> Chosen | None:
    """The durable workspace to use: `name`, or the one used last; None: none is wanted.

    Raises InvalidOption if both are given, there is none to go on with, or none was named to be only read;
    InvalidName.
    """
    if not go_on:
        if name is None:
            if read_only:
                raise InvalidOption(
                    "--read-only", True, "there is nothing to read",
                    hint="Name a workspace with -w NAME, or use --continue.",
                )  # fmt: skip
            return None
        from ..store.names import checked_name

        return Chosen(checked_name(name), must_exist=read_only, read_only=read_only)
    if name is not None:
        raise InvalidOption("--continue", name, "--workspace names one already", hint="Give one of them.")

    from ..store.root import Root

    last = Root(settings.data_path).last_name()
    if last is None:
        raise InvalidOption(
            "--continue", True, f"there is no workspace in {str(settings.data_path)!r}",
            hint="Begin one with -w NAME.",
        )  # fmt: skip
    return Chosen(last, must_exist=True, read_only=read_only, is_last=True)


@contextmanager
def opened_workspace(settings: Settings, system: str, chosen: Chosen | None = None) -> Iterator[Workspace]:
    """A workspace on a fresh engine; both are closed at the end. chosen: a durable one; None: an empty one.
    Raises KvmemError."""
    with opened_engine(settings) as engine, workspace_on(engine, settings, system, chosen) as workspace:
        yield workspace


@contextmanager
def opened_engine(settings: Settings) -> Iterator[WorkspaceEngine]:
    """A fresh engine, closed at the end. Raises KvmemError."""
    path = models.resolve(settings.model, settings.cache_path, note)
    with _collecting_later():
        from ..workspace import open_engine  # loads the native libraries: only after the cheap checks

        engine = open_engine(path, settings)
    with engine:
        for warning in engine.plan.warnings if engine.plan else ():
            warn(warning)
        engine.on_rows = _rows_made
        yield engine


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Within, no garbage is collected: imports make little, and looking for it takes a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what was imported stays: it need not be looked at again
        gc.enable()


def _rows_made(done: int, n: int) -> None:
    """An index is made from stored records: with many of them, opening a workspace takes its time."""
    if not done and n >= _MANY_ROWS:
        note(f"making the index of {n:,} blocks from what is stored of them; the next time it is there")


def workspace_on(
    engine: WorkspaceEngine,
    settings: Settings,
    system: str,
    chosen: Chosen | None = None,
    *,
    name_last: bool = True,
) -> Workspace:
    """The workspace `chosen`, or an empty one; says what may surprise. Raises KvmemError.

    name_last: says which one it goes on in, if that was not named.
    """
    is_new = chosen is not None and not chosen.must_exist and _is_missing(settings, chosen.name)
    workspace = engine.workspace(
        chosen.name if chosen else None,
        create=chosen is None or not chosen.must_exist,
        policy=settings.policy,
        system=system or None,
        read_only=chosen is not None and chosen.read_only,
    )
    if settings.n_ctx - workspace.n_view >= settings.block_size:
        warn(f"-c {settings.n_ctx} is cut to the {workspace.n_view} tokens the model was trained with")
    if chosen is not None and is_new:
        note(f"note: new workspace {chosen.name!r}")
    elif chosen is not None and chosen.is_last and name_last:
        note(f"note: going on in {chosen.name!r}")
    if chosen is not None and chosen.read_only:
        note(f"{chosen.name} is open read-only: nothing of this is kept")
    return workspace


def _is_missing(settings: Settings, name: str) -> bool:
    """Nothing is stored under `name`. What is wrong with a store is told when it is opened."""
    from ..store.root import Root

    try:
        Root(settings.data_path).find(name)
    except WorkspaceNotFound:
        return True
    except KvmemError:
        pass
    return False


def sampling_of(settings: Settings, workspace: Workspace) -> SamplingParams:
    """The sampling options of `settings`, for answers in `workspace`. Raises InputError."""
    from ..engine.sampler import SamplingParams

    params = SamplingParams.of(settings, workspace.n_view)
    grammar = grammar_of(settings)
    return replace(params, grammar=grammar) if grammar else params


def grammar_of(settings: Settings) -> str:
    """The grammar (GBNF) that answers must follow; empty: none.

    Raises InputError for a file or a schema that cannot be read, InvalidOption if there are several.
    """
    given = [name for name in ("grammar", "grammar_file", "json_schema") if getattr(settings, name)]
    if len(given) > 1:
        raise InvalidOption(
            BY_NAME[given[1]].flags[-1], getattr(settings, given[1]), f"there is a {given[0]} already",
            hint="Give one of --grammar, --grammar-file and --json-schema.",
        )  # fmt: skip
    if settings.grammar_file:
        (document,) = read_documents([settings.grammar_file], warn, stdin=False) or [Document("", "")]
        return document.text
    if not settings.json_schema:
        return settings.grammar
    try:
        schema = json.loads(settings.json_schema)
    except ValueError as error:
        raise InputError("the JSON schema", str(error), hint="Give a JSON object, for example {}.") from None

    from ..engine.templates import json_schema_to_grammar

    return json_schema_to_grammar(schema)
