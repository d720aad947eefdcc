"""From settings to an open workspace, for the commands that talk to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import models
from ..errors import InvalidOption
from ..settings import Settings
from .messages import note, warn

if TYPE_CHECKING:
    from ..engine.sampler import SamplingParams
    from ..workspace import Workspace


@dataclass(frozen=True, slots=True)
class Chosen:
    """The durable workspace that a command uses."""

    name: str
    must_exist: bool = False
    read_only: bool = False


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
    return Chosen(last, must_exist=True, read_only=read_only)


@contextmanager
def opened_workspace(settings: Settings, system: str, chosen: Chosen | None = None) -> Iterator[Workspace]:
    """A workspace on a fresh engine; both are closed at the end. chosen: a durable one; None: an empty one.
    Raises KvmemError."""
    path = models.resolve(settings.model, settings.cache_path, note)

    from ..workspace import open_engine  # loads the native libraries: only after the cheap checks

    with (
        open_engine(path, settings) as engine,
        engine.workspace(
            chosen.name if chosen else None,
            create=chosen is None or not chosen.must_exist,
            policy=settings.policy,
            system=system or None,
            read_only=chosen is not None and chosen.read_only,
        ) as workspace,
    ):
        if settings.n_ctx - workspace.n_view >= settings.block_size:
            warn(f"-c {settings.n_ctx} is cut to the {workspace.n_view} tokens the model was trained with")
        if chosen is not None and chosen.read_only:
            note(f"{chosen.name} is open read-only: nothing of this is kept")
        yield workspace


def sampling_of(settings: Settings, workspace: Workspace) -> SamplingParams:
    """The sampling options of `settings`, for answers in `workspace`."""
    from ..engine.sampler import SamplingParams

    return SamplingParams.of(settings, workspace.n_view)
