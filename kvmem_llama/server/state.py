"""What the routes of one server share: options, the engine once it is loaded, slots, metrics."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar

from .. import models
from ..engine.chat_template import ChatTemplate, template_text
from ..engine.scheduler import BatchReport
from ..engine.templates import ChatTemplates
from ..errors import EngineClosed, EngineError, InvalidOption, WorkspaceError
from ..policies import MemoryStats
from ..settings import Settings
from ..workspace import Workspace, WorkspaceEngine, open_engine
from .auth import Keys, check_bind
from .errors import loading
from .facts import ModelFacts
from .flags import ServerOptions
from .metrics import Metrics
from .recalls import RecallHistory

T = TypeVar("T")

Told = Callable[[str], None]


class Slots(Protocol):
    """Where requests that generate run: what the other routes and the end of the server need of it."""

    def describe(self) -> list[dict[str, object]]:
        """One object for each slot, as GET /slots shows it."""
        ...

    @property
    def n_idle(self) -> int: ...

    def load(self) -> tuple[int, int]:
        """Requests that are processed, and that wait."""
        ...

    def workspaces(self) -> Sequence[Workspace]:
        """The durable ones that are open here; others may be using them."""
        ...

    def borrow(self, name: str) -> AbstractContextManager[Workspace]:
        """The workspace with this name in the store, for one use; it is opened if need be.

        Raises WorkspaceBusy, StoreError."""
        ...

    def closed(self, name: str) -> AbstractContextManager[None]:
        """Within: it is not open here, and nobody opens it: what is stored of it is used by somebody else.

        Raises WorkspaceBusy if it is in use."""
        ...

    def forget(self, name: str) -> None:
        """Closes it, if it is open here: it is about to be deleted. Raises WorkspaceBusy if it is in use."""
        ...

    def stop(self, seconds: float) -> None:
        """Refuses new requests, ends those that run and commits what they have; waits for it this long."""
        ...

    def close(self) -> None:
        """Closes the workspaces. Idempotent; after `stop`."""
        ...


class ServerState:
    """Any thread. The engine and what hangs on it are there once `load` has returned; until then they raise
    ApiError (503)."""

    def __init__(
        self,
        settings: Settings,
        options: ServerOptions,
        *,
        make_slots: Callable[[ServerState], Slots] | None = None,
        told: Told = lambda _text: None,
    ) -> None:
        """make_slots: called when the engine is there. told: takes lines about the model's way here.

        Raises InvalidOption for an address that needs a key, InputError for keys that cannot be read.
        """
        self.settings: Final = settings
        self.options: Final = options
        self.metrics: Final = Metrics()
        self.recalls: Final = RecallHistory(self.metrics.blocks_out)
        self.keys: Final = Keys(options.api_keys())
        check_bind(options.hosts, self.keys)
        self.template_kwargs: Final = _template_kwargs(options)
        self._make_slots: Final = make_slots
        self._told: Final = told
        self._lock: Final = threading.Lock()
        self._closed = False
        self._engine: WorkspaceEngine | None = None
        self._template: ChatTemplate | None = None
        self._templates: ChatTemplates | None = None
        self._facts: ModelFacts | None = None
        self._slots: Slots | None = None
        self._ready = threading.Event()

    # -- what is there

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    @property
    def engine(self) -> WorkspaceEngine:
        return _there(self._engine)

    @property
    def facts(self) -> ModelFacts:
        return _there(self._facts)

    @property
    def template(self) -> ChatTemplate:
        """From messages to text."""
        return _there(self._template)

    @property
    def templates(self) -> ChatTemplates:
        """Facts of the chat template."""
        return _there(self._templates)

    @property
    def slots(self) -> Slots:
        return _there(self._slots)

    # -- beginning and end

    def load(self) -> None:
        """Loads the model; takes its time. Raises ModelError, LibraryError, InvalidOption, EngineError ..."""
        path = models.resolve(self.settings.model, self.settings.cache_path, self._told)
        engine = open_engine(path, self.settings)
        for warning in engine.plan.warnings if engine.plan else ():
            self._told(f"warning: {warning}")
        n_view = engine.core.n_view
        if self.settings.n_ctx > n_view:
            self._told(f"warning: -c is cut to the {n_view} tokens that the model was trained with")
        self.adopt(engine)

    def adopt(self, engine: WorkspaceEngine) -> None:
        """Takes over an open engine, and is ready. Raises EngineClosed if the end came first."""
        core = engine.core
        with self._lock:
            if self._closed:
                engine.close()
                raise EngineClosed("the server was stopped while its model was loading")
            self._engine = engine
        self._template = core.chat_template()
        source, jinja = template_text(self.settings), self.settings.jinja
        with ChatTemplates(core.model, source, jinja=jinja) as self._templates:
            pass  # what is asked of it are facts
        self._facts = ModelFacts.of(core.model, core.n_view, self.options)
        engine.observe(self._count)
        if self._make_slots is not None:
            self._slots = self._make_slots(self)
            self.metrics.load = self._slots.load
            self.metrics.stats = self._stats
        self._ready.set()

    def stop_soon(self) -> None:
        """The end has been asked for: answers that run are ended, so that connections do not keep it waiting.
        From a signal handler; returns at once."""
        if self._slots is not None:
            slots = self._slots
            threading.Thread(target=slots.stop, args=(self.options.grace,), daemon=True).start()

    def close(self) -> None:
        """Ends what runs, commits it, and frees the model. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ready.clear()
        if self._slots is not None:
            self._slots.stop(self.options.grace)
            self._slots.close()
        if self._engine is not None:
            self._engine.close()

    def _stats(self) -> list[tuple[str, MemoryStats]]:
        """Of the workspaces that are open, with their names in the store."""
        found = []
        for workspace in self.slots.workspaces():
            with contextlib.suppress(WorkspaceError, EngineError):  # it may be closed just now
                found.append((workspace.name or "", workspace.stats()))
        return found

    def _count(self, report: BatchReport) -> None:
        self.metrics.decoded(len({piece.seq for piece in report.pieces}))


def _there(part: T | None) -> T:
    if part is None:
        raise loading()
    return part


def _template_kwargs(options: ServerOptions) -> dict[str, object]:
    """Variables of the chat template that hold where a request does not say otherwise."""
    values: dict[str, object] = {}
    if options.reasoning != "auto":
        values["enable_thinking"] = options.reasoning == "on"
    if options.chat_template_kwargs:
        try:
            found = json.loads(options.chat_template_kwargs)
        except ValueError as error:
            raise InvalidOption("--chat-template-kwargs", options.chat_template_kwargs, str(error)) from None
        if not isinstance(found, dict):
            raise InvalidOption(
                "--chat-template-kwargs", options.chat_template_kwargs, "must be a JSON object"
            )
        values |= found
    return values
