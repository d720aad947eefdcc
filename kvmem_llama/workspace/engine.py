"""An engine with workspaces on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..engine.engine import Engine as TaskEngine
from ..engine.resources import Resources
from ..errors import InvalidOption, ModelUnsupported
from ..fitting import Plan
from ..memory.channels import Channels
from ..native.layout import I32

# Memory, policies and the store are imported where they are used: a model is loaded meanwhile (see ahead.py).
if TYPE_CHECKING:
    from ..durable import Opened, Shelf
    from ..engine.chat_template import ChatTemplate
    from .workspace import Workspace


class WorkspaceEngine(TaskEngine):
    """An engine with workspaces on it. Any thread."""

    plan: Plan | None = None
    """What it takes of the machine, and why; None if its resources were made elsewhere."""

    on_rows: Callable[[int, int], None] | None = None
    """Called with (blocks done, all of them) while rows of an index are made from stored records, which takes
    as long as to read these: when a workspace is opened with another score or other heads than before."""

    def __init__(self, make: Callable[[], Resources]) -> None:
        self._shelf_lock = threading.Lock()
        self._shelf: Shelf | None = None
        super().__init__(make)

    def workspace(
        self,
        name: str | None = None,
        *,
        create: bool = True,
        policy: str | None = None,
        system: str | None = None,
        read_only: bool = False,
    ) -> Workspace:
        """A workspace. name: of a durable one, which is opened as it was left, or made if there is none and
        `create` is set; None: an empty one that ends with the engine.

        policy: what its model attends to; None: that of the settings.
        read_only: of a durable one: as it is now, also while somebody else writes to it. Everything but a
        fork works, and all of it is in RAM only: what is stored does not change.
        Raises InvalidOption, ModelUnsupported (the model cannot serve the policy), EngineClosed, or
        StoreError: a durable workspace is not there, is in use, does not fit the model, cannot be read ...
        """
        from ..conversation import Conversation
        from ..policies import KVMem, make_policy
        from .workspace import Workspace

        self._refuse_if_closed()
        chosen = policy or self.core.settings.policy
        if name is None:
            if read_only:
                raise InvalidOption("read_only", True, "only a workspace with a name can be read-only")
            memory = self.call(lambda core: make_policy(chosen, core))
            return Workspace(self, memory, Conversation(self.core.model.vocab, self._template(), system))
        if chosen != KVMem.name:
            raise InvalidOption(
                "--policy", chosen, "its workspaces are not kept",
                hint=f"Leave out the name of the workspace, or use --policy {KVMem.name}.",
            )  # fmt: skip
        opened = self.shelf.open(name, create=create, policy=chosen, system=system, read_only=read_only)
        return self._on(opened)

    @property
    def shelf(self) -> Shelf:
        """The durable workspaces of this engine. Raises ModelUnsupported for a model without hooks,
        EngineClosed."""
        core = self.core
        if core.hooks is None:
            raise ModelUnsupported(
                core.model.arch, "its keys cannot be captured",
                hint="Leave out the name: a workspace that ends with the program works.",
            )  # fmt: skip
        from ..durable import Shelf
        from ..memory.index import mean_of
        from ..memory.session import token_source_of
        from ..store.binding import Binding
        from ..store.raw_k import RawK

        with self._shelf_lock:
            self._refuse_if_closed()
            if self._shelf is None:
                hooks = core.hooks
                binding = Binding.of(core.model.info, hooks.layers, hooks.layout, core.settings)
                mean = mean_of(hooks.layers, hooks.layout)
                self._shelf = Shelf(
                    core.settings,
                    binding,
                    RawK.of(hooks.layout),
                    mean,
                    means="mean_k" in Channels.of(core.settings, core.calibration),
                    tokens=token_source_of(core),
                    told=lambda done, n: self.on_rows(done, n) if self.on_rows else None,
                )
            return self._shelf

    def tokenize(self, text: str, *, special: bool = False) -> I32:
        """Token ids of a text, [n], as it is in the midst of a history. special: text that names a control
        token stands for it. Raises EngineClosed."""
        self._refuse_if_closed()
        return self.core.model.vocab.tokenize(text, parse_special=special)

    def detokenize(self, tokens: Sequence[int] | I32, *, special: bool = False) -> str:
        """The text of token ids, [n]; characters cut at its edges are replaced. special: control tokens have
        a text, too. Raises InvalidOption for tokens that are not ids of the vocabulary, EngineClosed."""
        from ..memory.query import token_ids

        self._refuse_if_closed()
        vocab = self.core.model.vocab
        return vocab.detokenize(token_ids(tokens, vocab.n_tokens), special=special).decode("utf-8", "replace")

    def close(self) -> None:
        """As Engine.close; then closes the durable workspaces that are still open."""
        super().close()
        with self._shelf_lock:
            if self._shelf is not None:
                self._shelf.close()

    def _close_one(self, opened: Opened) -> None:
        """Also after `close`."""
        with self._shelf_lock:
            shelf = self._shelf
        assert shelf is not None  # it has opened it
        shelf.close_one(opened)

    def _on(self, opened: Opened) -> Workspace:
        from ..conversation import Conversation
        from ..policies import KVMem
        from .workspace import Workspace

        vocab, restored = self.core.model.vocab, opened.restored
        try:
            memory = self.call(lambda core: KVMem(core, opened))
            conversation = Conversation.resumed(
                vocab, self._template(), restored.system, restored.steps, restored.tokens
            )
        except BaseException:
            self._close_one(opened)
            raise
        opened.taken_over()
        return Workspace(self, memory, conversation, opened)

    def _template(self) -> ChatTemplate:
        return self.core.chat_template()
