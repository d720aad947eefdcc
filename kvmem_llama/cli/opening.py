"""From settings to an open workspace, for the commands that talk to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import models
from ..errors import InvalidOption
from ..settings import Settings
from .messages import note, warn

if TYPE_CHECKING:
    from ..engine.sampler import SamplingParams
    from ..workspace import Workspace


def chosen_workspace(settings: Settings, name: str | None, *, go_on: bool) -> str | None:
    """Name of the durable workspace to use: `name`, or of the one used last; None: none is wanted.

    Raises InvalidOption if both are given or there is none to go on with; InvalidName.
    """
    if not go_on:
        if name is None:
            return None
        from ..store.names import checked_name

        return checked_name(name)
    if name is not None:
        raise InvalidOption("--continue", name, "--workspace names one already", hint="Give one of them.")

    from ..store.root import Root

    last = Root(settings.data_path).last_name()
    if last is None:
        raise InvalidOption(
            "--continue", True, f"there is no workspace in {str(settings.data_path)!r}",
            hint="Begin one with -w NAME.",
        )  # fmt: skip
    return last


@contextmanager
def opened_workspace(settings: Settings, system: str, name: str | None = None) -> Iterator[Workspace]:
    """A workspace on a fresh engine; both are closed at the end. name: of a durable one; None: an empty one.
    Raises KvmemError."""
    path = models.resolve(settings.model, settings.cache_path, note)

    from ..workspace import open_engine  # loads the native libraries: only after the cheap checks

    with (
        open_engine(path, settings) as engine,
        engine.workspace(name, policy=settings.policy, system=system or None) as workspace,
    ):
        if settings.n_ctx - workspace.n_view >= settings.block_size:
            warn(f"-c {settings.n_ctx} is cut to the {workspace.n_view} tokens the model was trained with")
        yield workspace


def sampling_of(settings: Settings, workspace: Workspace) -> SamplingParams:
    """The sampling options of `settings`, for answers in `workspace`."""
    from ..engine.sampler import SamplingParams

    return SamplingParams.of(settings, workspace.n_view)
