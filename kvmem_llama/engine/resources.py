"""Opens what an engine runs on, in order, and closes it in the opposite order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidOption, ModelUnsupported
from ..native import library
from ..native.hooks import Hooks
from ..settings import Settings
from . import llama_log
from .cells import CellPool
from .context import Context, cells_needed, view_size
from .core import EngineCore
from .model import Model

Prepare = Callable[[EngineCore], None]


@dataclass(frozen=True, slots=True)
class Resources:
    """The core, and what frees all it is made of."""

    core: EngineCore
    close: Callable[[], None]


def open_resources(path: str | Path, settings: Settings, prepare: Prepare | None = None) -> Resources:
    """Loads library, model, context and hooks. Called on the owner thread.

    prepare: lets the layers above put their parts (kernels, scorer) into the core.
    Raises LibraryError, ModelError, InvalidOption or EngineError; then nothing stays open.
    """
    native = library.load()
    llama_log.install()
    llama_log.show(settings.verbose)
    with ExitStack() as stack:
        model = Model.load(path, settings)
        stack.callback(model.close)
        n_view = view_size(settings, model)
        context = Context(model, settings, cells_needed(settings, n_view))
        stack.callback(context.close)
        hooks = _open_hooks(native, model, context, settings)
        if hooks is not None:
            stack.callback(hooks.close)
        core = EngineCore(
            model=model,
            decoder=context,
            hooks=hooks,
            pool=CellPool(context.n_cells),
            settings=settings,
            n_view=n_view,
        )
        stack.callback(core.close_template)
        if prepare is not None:
            prepare(core)
        return Resources(core, stack.pop_all().close)


def _open_hooks(
    native: library.NativeLibrary, model: Model, context: Context, settings: Settings
) -> Hooks | None:
    """The hooks; None where the architecture has none and the policy can do without."""
    try:
        hooks = Hooks(
            native,
            context.pointer,
            n_rows=context.n_batch,
            raw_k_type="f32" if settings.exact else settings.raw_k_type,
            block_size=settings.block_size,
            arch=model.arch,
            n_threads=context.n_threads,
        )
    except ModelUnsupported as error:
        if settings.policy == "kvmem":
            if not context.can_shift:
                raise
            raise ModelUnsupported(
                error.arch, error.reason,
                hint="These still work: --policy full_context, --policy sliding_window.",
            ) from error  # fmt: skip
        if settings.exact:
            raise InvalidOption("--exact", True, f"it needs the memory hooks ({error.reason})") from error
        return None
    if settings.exact:
        try:
            hooks.set_exact(True)
        except BaseException:
            hooks.close()
            raise
    return hooks
