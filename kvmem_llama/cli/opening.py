"""From settings to an open workspace, for the commands that talk to a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import models
from ..settings import Settings
from .messages import note, warn

if TYPE_CHECKING:
    from ..engine.sampler import SamplingParams
    from ..workspace import Workspace


@contextmanager
def opened_workspace(settings: Settings, system: str) -> Iterator[Workspace]:
    """An empty workspace on a fresh engine; both are closed at the end. Raises KvmemError."""
    path = models.resolve(settings.model, settings.cache_path, note)

    from ..workspace import open_engine  # loads the native libraries: only after the cheap checks

    with (
        open_engine(path, settings) as engine,
        engine.workspace(policy=settings.policy, system=system or None) as workspace,
    ):
        if settings.n_ctx - workspace.n_view >= settings.block_size:
            warn(f"-c {settings.n_ctx} is cut to the {workspace.n_view} tokens the model was trained with")
        yield workspace


def sampling_of(settings: Settings, workspace: Workspace) -> SamplingParams:
    """The sampling options of `settings`, for answers in `workspace`."""
    from ..engine.sampler import SamplingParams

    return SamplingParams.of(settings, workspace.n_view)
