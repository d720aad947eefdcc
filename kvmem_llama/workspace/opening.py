"""From the name of a model to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .. import models
from ..ahead import importing
from ..calibration import find
from ..engine.core import EngineCore
from ..engine.resources import open_resources
from ..fitting import machine_for, make_plan
from ..gguf_info import read_model_info
from ..memory.channels import Channels
from ..memory.scoring import make_scorer
from ..native import library
from ..option import Value
from ..settings import Settings
from .engine import WorkspaceEngine


class Engine(WorkspaceEngine):
    """The weights of one model, a context for them, and the store of durable workspaces.

    Any thread, and many at once. Close it, or use it in a `with`; its workspaces end with it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        settings: Settings | None = None,
        *,
        notify: Callable[[str], None] | None = None,
        **options: Value,
    ) -> None:
        """Loads a model and starts the thread that it runs on. Sizes that are left open (0 or auto) are
        chosen to fit this machine; `plan` says how.

        model: path of a GGUF file, or a name as `kvmem model` knows it; None: that of the settings, else the
            default model.
        settings: all options; without them the environment (KVMEM_*) gives those that `options` does not.
        options: fields of Settings by name, in place of those of `settings`.
        notify: gets a line before anything is downloaded.
        Raises ModelError, LibraryError, InvalidOption (also for an option that does not exist), DoesNotFit or
        EngineError.
        """
        given = {**options} if model is None else {**options, "model": os.fspath(model)}
        asked = Settings.from_sources(given) if settings is None else settings.with_options(given)
        path = models.resolve(asked.model, asked.cache_path, notify)
        plan = make_plan(asked, read_model_info(Path(path)), machine_for(asked)).check()
        chosen = plan.settings

        def prepare(core: EngineCore) -> None:
            core.scorer = make_scorer(chosen)
            core.calibration = find(chosen, core.model.info.fingerprint)
            Channels.of(chosen, core.calibration)  # an option that cannot be met is told now

        library.load()  # what the importing thread loads needs it
        with importing():
            super().__init__(lambda: open_resources(path, chosen, prepare))
        self.plan = plan


def open_engine(model_path: str | Path, settings: Settings) -> Engine:
    """An engine of the GGUF file at this path."""
    return Engine(model_path, settings)
