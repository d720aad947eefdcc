"""The folder of all durable workspaces: finds them by name, makes, renames, lists and deletes them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvmem_llama.errors import (
    CatalogDamaged,
    FormatTooNew,
    FormatTooOld,
    KvmemError,
    StoreError,
    WorkspaceExists,
    WorkspaceNotFound,
)

from . import files as files_module
from .binding import Binding
from .catalog import names_in
from .family import Families, Family, FamilyPaths, create_family, remove_folder
from .files import Files
from .lock import try_lock, wait_lock
from .names import NameCache, Place, checked_name, is_id, new_id
from .rows import WorkspaceRow
from .small_files import read_file, remove_if_there, replace_file
from .tables import WORKSPACES, Db, storable

NEW: Final = ".new-"  # a family that is being made, under the root's lock
OLD: Final = ".old-"  # one that was deleted
IMPORT: Final = ".import-"  # one that is being imported, under a lock of its own

_families: Final = Families()


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of a list: a workspace, or a family that cannot be read."""

    place: Place
    row: WorkspaceRow | None
    binding: Binding | None
    error: StoreError | None = None
    names: frozenset[str] | None = None  # in a family of another format, if they can be read

    def may_be(self, name: str) -> bool:
        """A workspace of this name may be here."""
        if self.row is not None:
            return self.row.name == name
        return self.names is None or name in self.names


class Root:
    """Any thread, any process; holds nothing open between calls."""

    def __init__(self, folder: Path, files: Files | None = None, *, durability: str = "full") -> None:
        self.folder: Final = folder
        self.files: Final = files or files_module.current()
        self.durability: Final = durability
        self._names: Final = NameCache(folder, self.files)
        self._last: Final = folder / "last"

    # -- families

    @contextlib.contextmanager
    def family(self, id: str, *, read_only: bool = False) -> Iterator[Family]:
        """An open family for the length of a `with`."""
        family = self.open_family(id, read_only=read_only)
        try:
            yield family
        finally:
            self.close_family(family)

    def open_family(self, id: str, *, read_only: bool = False) -> Family:
        """Shared with everybody in this process who has it open; to be given back with `close_family`.

        Raises WorkspaceNotFound, and what Family raises.
        """
        if not self.files.exists(self.folder / id):
            raise WorkspaceNotFound(id)
        return _families.open(self.folder / id, self.files, durability=self.durability, read_only=read_only)

    def close_family(self, family: Family) -> None:
        _families.close(family)

    def family_ids(self) -> list[str]:
        """Ids of the families that are there, oldest first; none if there is no folder."""
        if not self.files.exists(self.folder):
            return []
        return [name for name in self.files.listdir(self.folder) if is_id(name)]

    # -- names

    def find(self, name: str) -> Place:
        """Where the workspace `name` is. Raises InvalidName, WorkspaceNotFound, or CatalogDamaged if two have
        this name."""
        name = checked_name(name)
        cached = self._names.read(set(self.family_ids()))
        if cached is not None:
            place = cached.get(name)
            if place is None:
                raise WorkspaceNotFound(name)
            if self._is_named(place, name):
                return place
        found = [(item.place, item.error) for item in self._scan() if item.may_be(name)]
        places = [place for place, error in found if error is None]
        if len(places) > 1:
            ids = ", ".join(place.workspace for place in places)
            raise CatalogDamaged(
                self.folder, f"{len(places)} workspaces are named {name!r}: {ids}",
                hint="Rename one of them by its id.",
            )  # fmt: skip
        if places:
            return places[0]
        unread = [f"{place.family}: {error}" for place, error in found]
        hint = f"It may be in a folder that cannot be read: {'; '.join(unread)}" if unread else ""
        raise WorkspaceNotFound(name, hint=hint, may_exist=bool(unread))

    def find_id(self, workspace: str) -> Place:
        """Where the workspace with this id is. Raises WorkspaceNotFound."""
        for item in self._scan():
            if item.row is not None and item.row.id == workspace:
                return item.place
        raise WorkspaceNotFound(workspace)

    def list(self, family: str = "") -> list[Listed]:
        """All workspaces by name, or those of one family; families that cannot be read come last, each with
        its error."""
        return sorted(
            self._scan_family(family) if family else self._scan(),
            key=lambda item: (item.row is None, item.row.name if item.row else item.place.family),
        )

    # -- changes

    def create(
        self, name: str, binding: Binding, *, policy: str = "kvmem", system: str | None = None
    ) -> Place:
        """Makes an empty workspace, in a family of its own; durable on return.

        Raises InvalidName, WorkspaceExists, StoreFull or StoreFailed.
        """
        name = checked_name(name)
        place = Place(new_id(), new_id())
        now = time.time()
        prompt = None if system is None else storable(system)
        first = WorkspaceRow(place.workspace, name, 0, 0, 0, policy, prompt, now, now)
        with self.renaming(name) as names:
            fresh = self.folder / f"{NEW}{place.family}"
            try:
                create_family(fresh, place.family, binding, self.files, first)
                self.files.at("create.folder")
                self.files.rename(fresh, self.folder / place.family)
                self.files.sync_dir(self.folder)
                self.files.at("create.after")
            except BaseException:
                with contextlib.suppress(KvmemError):
                    remove_folder(self.files, fresh)
                raise
            names[name] = place
        return place

    def rename(self, place: Place, name: str) -> None:
        """Raises InvalidName, WorkspaceExists, WorkspaceNotFound, StoreFull or StoreFailed."""
        name = checked_name(name)

        def change(db: Db) -> None:
            row = WORKSPACES.one(db, "id=?", (place.workspace,))
            if row is None:
                raise WorkspaceNotFound(place.workspace)
            WORKSPACES.insert(db, [replace(row, name=name)], replace=True)

        with self.renaming(name, besides=place) as names, self.family(place.family) as family:
            family.catalog.write(change, "rename")
            for old in [known for known, there in names.items() if there == place]:
                del names[old]
            names[name] = place

    @contextlib.contextmanager
    def renaming(self, name: str | None, *, besides: Place | None = None) -> Iterator[dict[str, Place]]:
        """Within: nobody else gives or takes names, and `name` is free (None: no name is given) -> the names
        and places there are; to be changed by whoever changes them.

        besides: a workspace that may have this name. Raises WorkspaceExists.
        """
        self._make_folder()
        with wait_lock(self.files, self.folder / "root.lock"):
            self._sweep()
            names = self._names.read(set(self.family_ids()))
            is_complete = names is not None
            if names is None:
                found = list(self._scan())
                names = {item.row.name: item.place for item in found if item.row is not None}
                if name is not None and any(item.names and name in item.names for item in found):
                    raise WorkspaceExists(name)
                is_complete = len(names) == len(found)
                self._sweep_empty({item.place.family for item in found})
            if name is not None and names.get(name, besides) != besides:
                raise WorkspaceExists(name)
            self._names.forget()
            yield names
            if is_complete:
                self._names.write(set(self.family_ids()), names)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within: no workspace is made, forked, imported, renamed or deleted by anybody."""
        with wait_lock(self.files, self.folder / "root.lock"):
            yield

    def forget_names(self) -> None:
        """Names are read from the catalogs the next time."""
        with self.quiet():
            self._names.forget()

    # -- the last one

    def used(self, place: Place) -> None:
        """Notes that the workspace was opened last, whatever the clock says. Never fails."""
        with contextlib.suppress(StoreError):
            data = f"{place.family} {place.workspace}\n".encode()
            replace_file(self.files, self._last, data, sync=False)

    def last(self) -> Place | None:
        """The workspace that was opened last; None if there is none any more."""
        try:
            family, _, workspace = read_file(self.files, self._last).decode().strip().partition(" ")
            place = Place(family, workspace)
            if is_id(family) and any(item.place == place for item in self._scan_family(family)):
                return place
        except (StoreError, UnicodeDecodeError):
            pass
        rows = [(item.row.used, item.place) for item in self._scan() if item.row is not None]
        return max(rows, key=lambda row: row[0])[1] if rows else None

    def last_name(self) -> str | None:
        """The name of the workspace that was opened last; None if there is none any more."""
        place = self.last()
        rows = [] if place is None else [item.row for item in self._scan_family(place.family)]
        for row in rows:
            if row is not None and place is not None and row.id == place.workspace:
                return row.name
        return None

    # -- private

    def _make_folder(self) -> None:
        for folder in (*reversed(self.folder.parents), self.folder):
            if not self.files.exists(folder):
                self.files.mkdir(folder)
                self.files.sync_dir(folder.parent)

    def _scan(self) -> Iterator[Listed]:
        for id in self.family_ids():
            yield from self._scan_family(id)

    def _scan_family(self, id: str) -> Iterator[Listed]:
        rows: list[WorkspaceRow] = []
        try:
            with self.family(id, read_only=True) as family:
                rows = family.present()
                family.workspaces()
        except StoreError as error:
            if self.files.exists(FamilyPaths(self.folder / id).folder):  # else it was just deleted
                is_other = isinstance(error, (FormatTooNew, FormatTooOld))
                names = names_in(FamilyPaths(self.folder / id).catalog) if is_other else None
                yield Listed(Place(id, ""), None, None, error, names)
        for row in rows:
            yield Listed(Place(id, row.id), row, family.binding)

    def _is_named(self, place: Place, name: str) -> bool:
        return any(
            item.place == place and item.row is not None and item.row.name == name
            for item in self._scan_family(place.family)
        )

    def _sweep(self) -> None:
        """Removes what unfinished work left behind: families that were never named, those that were deleted,
        imports whose process is gone."""
        for name in self.files.listdir(self.folder):
            path = self.folder / name
            if name.startswith((NEW, OLD)):
                remove_folder(self.files, path)
            elif name.startswith(IMPORT):
                lock = try_lock(self.files, FamilyPaths(path).locks / "import.lock")
                if lock is not None:
                    lock.release()
                    remove_folder(self.files, path)
            elif name.startswith(".") and name.endswith(".tmp"):
                remove_if_there(self.files, path)

    def _sweep_empty(self, listed: set[str]) -> None:
        """Removes families that can be read and hold no workspace."""
        for id in set(self.family_ids()) - listed:
            self.remove_family(id)

    def remove_family(self, id: str) -> None:
        """Deletes a family with everything in it; under the root's lock. It is gone, or it is there."""
        old = self.folder / f"{OLD}{id}"
        self.files.at("delete.before")
        self.files.rename(self.folder / id, old)
        self.files.sync_dir(self.folder)
        self.files.at("delete.after")
        remove_folder(self.files, old)
