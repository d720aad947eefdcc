"""The durable workspaces that an engine has open: where they lie, and what their stores share."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .engine.machine import SHARE_OF_RAM, total_memory
from .errors import InvalidOption, RecordDamaged, WorkspaceExists, WorkspaceNotFound
from .memory.block_rows import CHUNK_BLOCKS
from .native.host_memory import host_memory
from .native.layout import U8
from .settings import Settings
from .store.binding import Binding
from .store.durable import Durable
from .store.holding import Holding
from .store.loading import Told, restore
from .store.location import Location
from .store.names import Place
from .store.pool import HostPool
from .store.raw_k import RawK
from .store.readers import Readers
from .store.records import NotStored, Record
from .store.root import Root
from .store.steps import MeanOf, Restored
from .store.tiered import TieredStore
from .store.token_file import TokenSource


class Opened:
    """A durable workspace that is open. Close it: until then nobody else can write to it, unless it is only
    read here."""

    def __init__(
        self, holding: Holding, store: TieredStore, journal: Durable | None, restored: Restored
    ) -> None:
        """journal: None if it is only read; then what is added to it is gone when it is closed."""
        self.holding: Final = holding
        self.store: Final = store
        self.journal: Final = journal
        self.restored = restored  # its history, as it was when it was opened
        self._lock = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return self.holding.name

    @property
    def read_only(self) -> bool:
        return self.journal is None

    def taken_over(self) -> None:
        """The history is in use: what was read of it is not kept twice."""
        no_tokens = np.zeros(0, np.int32)
        self.restored = replace(
            self.restored, tokens=no_tokens, blocks=(), chunks=(), token_chunks=(), ahead=(), steps=()
        )

    def close(self) -> None:
        """Everything acknowledged is durable already; the rest is dropped. Idempotent, any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self.store.close()
            finally:
                self.holding.close()


@dataclass(frozen=True, slots=True)
class _Shared:
    pool: HostPool
    readers: Readers


class Shelf:
    """Opens durable workspaces that fit one engine. Any thread."""

    def __init__(
        self,
        settings: Settings,
        binding: Binding,
        raw_k: RawK,
        mean_of: MeanOf,
        *,
        means: bool = True,
        tokens: TokenSource | None = None,
        told: Told | None = None,
    ) -> None:
        """binding, raw_k, mean_of: of the engine's model and layout (store.binding, store.raw_k,
        memory.index). means: the Mean-K index is used. tokens: of the token index (memory.token_index);
        None: it is not used. told: see store.loading.restore."""
        self.root: Final = Root(settings.data_path, durability=settings.durability)
        self._settings: Final = settings
        self.binding: Final = binding
        self._raw_k: Final = raw_k
        self._mean_of: Final = mean_of
        self._means: Final = means
        self._tokens: Final = tokens
        self._told: Final = told
        self._lock: Final = threading.Lock()
        self._shared: _Shared | None = None
        self._open: list[Opened] = []

    def open(
        self, name: str, *, create: bool, policy: str, system: str | None, read_only: bool = False
    ) -> Opened:
        """The workspace `name`, made if there is none and `create` is set.

        read_only: as it is now, whoever writes to it; nothing is made or written.
        Raises InvalidName, WorkspaceNotFound, StoreLocked, WorkspaceMismatch, FormatTooNew, FormatTooOld,
        StoreFull, StoreFailed, StoreDamaged; InvalidOption if it was made with another policy or system
        prompt.
        """
        place = self._place(name, create=create and not read_only, policy=policy, system=system)
        opened = self._load(Holding.open(self.root, place, self.binding, read_only=read_only))
        restored = opened.restored
        try:
            if restored.policy != policy:
                raise InvalidOption("--policy", policy, f"the workspace {name!r} has {restored.policy}")
            if system and system != (restored.system or ""):
                raise InvalidOption(
                    "--system-prompt", f"{system:.60}", f"the workspace {name!r} has another one",
                    hint="Leave it out: the one it was made with stays.",
                )  # fmt: skip
        except BaseException:
            self.close_one(opened)
            raise
        return opened

    def fork(self, opened: Opened, name: str) -> Opened:
        """A new workspace with the same committed history. On the owner thread of the old one's engine; not
        of one that is only read."""
        assert opened.journal is not None
        return self._load(opened.journal.fork(name))

    def close_one(self, opened: Opened) -> None:
        with self._lock:
            if opened in self._open:
                self._open.remove(opened)
        opened.close()

    def close(self) -> None:
        """Closes all of them, and what they share."""
        with self._lock:
            opened, self._open = self._open, []
            shared, self._shared = self._shared, None
        try:
            for one in opened:
                one.close()
        finally:
            if shared is not None:
                shared.readers.close()

    # -- private

    def _place(self, name: str, *, create: bool, policy: str, system: str | None) -> Place:
        try:
            return self.root.find(name)
        except WorkspaceNotFound as error:
            if not create or error.may_exist:  # an empty one must not take the place of one that is damaged
                raise
        try:
            return self.root.create(name, self.binding, policy=policy, system=system)
        except WorkspaceExists:  # somebody was faster
            return self.root.find(name)

    def _load(self, holding: Holding) -> Opened:
        shared, settings = self._sharing(), self._settings
        journals: list[Durable] = []

        def fall(locations: Sequence[Location]) -> None:
            journals[0].fall(locations)

        def mean_of(stored: Record, count: int) -> NDArray[np.float16]:
            return self._mean_of(self._raw_k.decode(stored), count)

        def row_of(stored: Record, count: int) -> U8:
            assert self._tokens is not None
            return self._tokens.row_of(self._raw_k.decode(stored), count)

        tokens = None if self._tokens is None else replace(self._tokens, row_of=row_of)
        store: TieredStore | None = None
        try:
            disk = holding.open_disk(
                segment_records=settings.segment_records, budget=settings.disk_budget, readers=shared.readers
            )
            try:
                store = TieredStore(
                    shared.pool,
                    disk,
                    fall=fall,
                    raw_k=self._raw_k,
                    stage_out=settings.stage_out,
                    durable=settings.durability == "full",
                    read_only=holding.read_only,
                )
            except BaseException:
                disk.close()
                raise
            if not holding.read_only:
                journals.append(Durable(holding, store, None if tokens is None else tokens.shape))
            restored = restore(
                holding,
                store,
                mean_of,
                scored=settings.scored_layers(),
                chunk_blocks=CHUNK_BLOCKS,
                means=self._means,
                token_source=tokens,
                told=self._told,
            )
            last = restored.blocks[-1] if restored.blocks else None
            if holding.read_only and last is not None and last.count < settings.block_size:
                with contextlib.suppress(NotStored, RecordDamaged):  # then it is computed again
                    store.hold(last.ref)  # the writer's next commit takes its place
        except BaseException:
            if store is not None:
                store.close()
            holding.close()
            raise
        opened = Opened(holding, store, journals[0] if journals else None, restored)
        with self._lock:
            self._open.append(opened)
        return opened

    def _sharing(self) -> _Shared:
        with self._lock:
            if self._shared is None:
                budget = self._settings.host_budget or total_memory() // SHARE_OF_RAM
                memory = host_memory(self._settings)
                self._shared = _Shared(HostPool(budget, memory=memory), Readers())
            return self._shared
