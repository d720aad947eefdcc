"""A durable workspace that is open: the right to write to it, or to look at it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from kvmem_llama.errors import CatalogDamaged, StoreError, WorkspaceNotFound

from .append import workspace_row
from .binding import Binding
from .content import check_workspaces
from .disk import DiskStore
from .disk_records import DiskRecords
from .family import Family
from .family_disk import open_disk
from .head import Head
from .lock import CLOSE_FIRST, Lock, lock_workspace
from .names import Place
from .readers import Readers
from .root import Root
from .rows import WorkspaceRow
from .slot_rows import adopt_segments
from .tables import SEGMENTS, WORKSPACES


class Holding:
    """Any thread. Close it: until then nobody else can write to the workspace."""

    def __init__(self, root: Root, place: Place, family: Family, lock: Lock | None, name: str) -> None:
        self.root: Final = root
        self.place: Final = place
        self.family: Final = family
        self.name: Final = name
        self.head: Final = Head(root.files, family.paths.locks, place.workspace)
        self._lock = lock
        self._is_open = True

    @classmethod
    def open(
        cls,
        root: Root,
        place: Place,
        binding: Binding | None = None,
        *,
        read_only: bool = False,
        lock: Lock | None = None,
    ) -> Holding:
        """The workspace at `place`, locked unless it is only read.

        binding: of the engine that wants to use it; None: it is only managed. lock: if it is locked already.
        Raises WorkspaceNotFound, StoreLocked, WorkspaceMismatch, FormatTooNew, FormatTooOld, StoreDamaged or
        StoreFailed.
        """
        family = root.open_family(place.family, read_only=read_only)
        try:
            with family.catalog.snapshot() as db:
                row = WORKSPACES.one(db, "id=?", (place.workspace,))
                # Who writes must know all others: what only a missing one uses would count as free.
                if row is None or not read_only:
                    check_workspaces(db)
            if row is None:
                raise WorkspaceNotFound(place.workspace)
            if binding is not None:
                family.binding.check(binding)
            if not read_only and lock is None:
                hint = CLOSE_FIRST if binding is None else ""  # who manages it cannot do so read-only
                lock = lock_workspace(root.files, family.paths.locks, place.workspace, row.name, hint=hint)
                if not family.has_workspace(place.workspace):  # it was deleted just before
                    lock.remove()
                    raise WorkspaceNotFound(row.name)
            self = cls(root, place, family, lock, row.name)
            self._check_head()
            if not read_only:
                self._prepare()
                root.used(place)
        except BaseException:
            if lock is not None:
                lock.release()
            root.close_family(family)
            raise
        return self

    @property
    def read_only(self) -> bool:
        return self._lock is None

    def row(self) -> WorkspaceRow:
        """As it is now. Raises CatalogDamaged or StoreFailed."""
        with self.family.catalog.snapshot() as db:
            return workspace_row(db, self.place.workspace)

    def open_disk(
        self, *, segment_records: int = 64, budget: int = 0, readers: Readers | None = None
    ) -> DiskStore:
        """The records of the family, see family_disk.open_disk."""
        owner = None if self.read_only else self.place.workspace
        return open_disk(self.family, owner, segment_records=segment_records, budget=budget, readers=readers)

    @contextlib.contextmanager
    def records(self, *, segment_records: int) -> Iterator[DiskRecords]:
        """The records of the family, for work that needs no memory of them."""
        disk = self.open_disk(segment_records=segment_records)
        records = DiskRecords(disk, durable=self.family.durability == "full")
        try:
            yield records
        finally:
            records.close()

    def acknowledge(self, row: WorkspaceRow) -> None:
        """Notes that the commits of `row` are durable, where durability is full."""
        if self.family.durability == "full":
            with contextlib.suppress(StoreError):  # it only guards against what a disk does later
                self.head.write(row.commits)

    def close(self) -> None:
        """Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self.root.close_family(self.family)
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private

    def _check_head(self) -> None:
        """Raises CatalogDamaged if commits that were acknowledged are not in the catalog."""
        acknowledged = self.head.read()
        found = self.row().commits  # read after the head: a writer may be at work
        if found < acknowledged:
            raise CatalogDamaged(
                self.family.catalog.path,
                f"{acknowledged} commits of {self.name!r:.60} were acknowledged, it has {found}",
            )

    def _prepare(self) -> None:
        """Takes over the segments of deleted workspaces, and clears what unfinished work left behind."""
        with self.family.catalog.snapshot() as db:
            has_nobodys = SEGMENTS.one(db, "owner IS NULL", ()) is not None
        if has_nobodys:
            self.family.catalog.write(lambda db: adopt_segments(db, self.place.workspace), "adopt")
        self.family.sweep()
