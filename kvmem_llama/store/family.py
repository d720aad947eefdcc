"""The folder of one family: a workspace and everything forked from it. Families share nothing."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmem_llama.errors import CatalogDamaged, WorkspaceMismatch

from .binding import Binding
from .catalog import Catalog
from .content import check_workspaces
from .files import Files
from .index_file import IndexFiles
from .lineage import new_workspace
from .lock import try_lock
from .names import is_id
from .rows import MetaRow, WorkspaceRow
from .segment import SegmentFormat
from .small_files import remove_if_there
from .tables import LINEAGES, META, SEGMENTS, WORKSPACES, BadRow, Db
from .token_file import TokenFiles

_INDEX_FILE: Final = re.compile(r"(\d+)\.(mk|tk)")
_SEGMENT_FILE: Final = re.compile(r"(\d{6,})\.gguf(\.tmp)?")


@dataclass(frozen=True, slots=True)
class FamilyPaths:
    """Where things lie in the folder of a family."""

    folder: Path

    @property
    def catalog(self) -> Path:
        return self.folder / "catalog.sqlite"

    @property
    def segments(self) -> Path:
        return self.folder / "segments"

    @property
    def index(self) -> Path:
        return self.folder / "index"

    @property
    def locks(self) -> Path:
        return self.folder / "locks"

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.folder, self.segments, self.index, self.locks)


class Family:
    """An open family. Any thread."""

    def __init__(self, folder: Path, files: Files, *, durability: str, read_only: bool) -> None:
        """Reads the catalog's header and what the family is bound to.

        Raises FormatTooNew, FormatTooOld, CatalogDamaged, WorkspaceMismatch (it is another folder) or
        StoreFailed.
        """
        self.paths: Final = FamilyPaths(folder)
        self.files: Final = files
        self.id: Final = folder.name.rpartition("-")[2]  # one that is made has a prefix
        self.durability: Final = durability
        self.catalog: Final = Catalog(
            self.paths.catalog, durability=durability, read_only=read_only, files=files
        )
        try:
            with self.catalog.snapshot() as db:
                meta = {row.key: row.value for row in META.rows(db)}
            try:
                self.binding: Final = Binding.from_json(meta["binding"])
                stored = meta["family"]
            except (KeyError, ValueError) as error:
                raise CatalogDamaged(
                    self.paths.catalog, f"what it is bound to is missing: {error}"
                ) from error
            if stored != self.id:
                raise WorkspaceMismatch(
                    "family", stored, self.id, hint="Do not copy or rename its folder: use export and import."
                )
        except BaseException:
            self.catalog.close()
            raise
        self.index: Final = IndexFiles(
            self.paths.index, stored, self.binding.index_shape, files, durable=durability == "full"
        )
        self.tokens: Final = TokenFiles(self.paths.index, stored, self.binding.layout, files)
        self.segment_format: Final = SegmentFormat(
            stored,
            self.binding.layout,
            self.binding.k_type,
            self.binding.k_nbytes,
            self.binding.v_type,
            self.binding.v_nbytes,
        )

    def workspaces(self) -> list[WorkspaceRow]:
        """By name. Raises CatalogDamaged, also if one is missing."""
        with self.catalog.snapshot() as db:
            check_workspaces(db)
            return list(WORKSPACES.rows(db, tail="ORDER BY name"))

    def present(self) -> list[WorkspaceRow]:
        """Those that are there, whether or not others are missing."""
        with self.catalog.snapshot() as db:
            return list(WORKSPACES.rows(db, tail="ORDER BY name"))

    def has_workspace(self, id: str) -> bool:
        with self.catalog.snapshot() as db:
            return WORKSPACES.one(db, "id=?", (id,)) is not None

    def sweep(self, *, everything: bool = False) -> list[str]:
        """Deletes files that no row stands for -> their names.

        Without `everything` only what a crash left of the making of a file, which cannot hold anything. Runs
        in turn with the writers of other processes, so nothing is deleted that is being made.
        """

        def run(db: Db) -> list[str]:
            garbage = self._garbage(db) if everything else self._unborn(db)
            for path in garbage:
                if path.suffix != ".lock":
                    remove_if_there(self.files, path)
                elif (lock := try_lock(self.files, path)) is not None:
                    lock.remove()
            return [path.name for path in garbage]

        if not everything:
            with self.catalog.snapshot() as db:
                if not self._unborn(db):
                    return []
        return self.catalog.write(run, "sweep")

    def garbage(self) -> list[Path]:
        """Files that no row stands for. One that is just being made or deleted may be among them, unless the
        caller holds the root's lock and the family is open for writing."""
        if not self.catalog.read_only:
            return self.catalog.write(self._garbage, "garbage")
        with self.catalog.snapshot() as db:
            return self._garbage(db)

    def drop_files(self, *, segments: Sequence[int] = (), lineages: Sequence[int] = ()) -> None:
        """Deletes files whose rows are gone; durably: what was deleted must not come back."""
        for number in segments:
            remove_if_there(self.files, self.paths.segments / f"{number:06}.gguf")
        for lineage in lineages:
            self.index.drop(lineage)
            self.tokens.drop(lineage)
        if segments:
            self.files.sync_dir(self.paths.segments)
        if lineages:
            self.files.sync_dir(self.paths.index)

    def disk_bytes(self) -> int:
        """Bytes that the files of the family take, as the file system counts them."""
        n_bytes = 0
        for folder in self.paths.folders:
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):  # somebody else is at work
                    if entry.is_file():
                        n_bytes += entry.stat().st_blocks * 512
        return n_bytes

    def close(self) -> None:
        """Idempotent."""
        self.catalog.close()

    def _unborn(self, db: Db) -> list[Path]:
        """Segments whose making did not come to its end: their numbers were never given."""
        found = db.execute("SELECT seq FROM sqlite_sequence WHERE name='segments'").fetchone()
        highest = 0 if found is None else found[0]
        unborn = [
            (int(file[1]), self.paths.segments / name)
            for name in self.files.listdir(self.paths.segments)
            if (file := _SEGMENT_FILE.fullmatch(name)) and (file[2] or int(file[1]) > highest)
        ]
        known = _known_segments(db) if unborn else set()
        return [path for number, path in unborn if path.suffix == ".tmp" or number not in known]

    def _garbage(self, db: Db) -> list[Path]:
        """Files without a row; none if the catalog is not sound: then the row may be what is missing."""
        if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            return []
        try:
            check_workspaces(db)
            segments = {row.number for row in SEGMENTS.rows(db)} | _known_segments(db)
            lineages = {row.id for row in LINEAGES.rows(db)}
            workspaces = {row.id for row in WORKSPACES.rows(db)}
        except BadRow:
            return []
        garbage: list[Path] = []
        for name in self.files.listdir(self.paths.segments):
            found = _SEGMENT_FILE.fullmatch(name)
            if found and (found[2] or int(found[1]) not in segments):
                garbage.append(self.paths.segments / name)
        for name in self.files.listdir(self.paths.index):
            found = _INDEX_FILE.fullmatch(name)
            if found and int(found[1]) not in lineages:
                garbage.append(self.paths.index / name)
        for name in self.files.listdir(self.paths.locks):
            stem, _, kind = name.partition(".")
            if is_id(stem) and kind in ("head", "lock") and stem not in workspaces:
                garbage.append(self.paths.locks / name)
        return garbage


def _known_segments(db: Db) -> set[int]:
    """Numbers of the segments that any row names: a number that was never given, and a file without a row,
    are told by rows that have no checksum, or may be missing."""
    numbers = {number for (number,) in db.execute("SELECT number FROM segments")}
    for table in ("blocks", "ahead", "slots"):
        numbers |= {n for (n,) in db.execute(f"SELECT DISTINCT segment FROM {table} NOT INDEXED")}
    return numbers


class Families:
    """The families that this process has open: each once, whoever uses it."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, bool, str], tuple[Family, int]] = {}
        self._lock: Final = threading.Lock()

    def open(self, folder: Path, files: Files, *, durability: str, read_only: bool) -> Family:
        """See Family. To be given back with `close`."""
        key = (os.path.realpath(folder), read_only, durability)
        with self._lock:
            family, n_users = self._open.get(key, (None, 0))
            if family is None:
                family = Family(folder, files, durability=durability, read_only=read_only)
            self._open[key] = (family, n_users + 1)
            return family

    def close(self, family: Family) -> None:
        """The last one who gives it back closes it."""
        with self._lock:
            for key, (found, n_users) in self._open.items():
                if found is family:
                    if n_users > 1:
                        self._open[key] = (family, n_users - 1)
                        return
                    del self._open[key]
                    break
        family.close()


def create_family(
    folder: Path, family: str, binding: Binding, files: Files, first: WorkspaceRow | None = None
) -> None:
    """Makes the folder of a family, with a workspace in it; durable on return but for its own name.

    folder: a name that nobody looks at; the caller renames it to `family`. Raises StoreFull or StoreFailed.
    """
    paths = FamilyPaths(folder)
    for path in paths.folders:
        files.mkdir(path)
    Catalog.create(paths.catalog, files)
    files.at("create.catalog")
    catalog = Catalog(paths.catalog, files=files)

    def fill(db: Db) -> None:
        facts = {
            "family": family,
            "binding": binding.to_json(),
            "created": f"{time.time():.3f}",
            "salt": os.urandom(16).hex(),
        }
        META.insert(db, [MetaRow(key, value) for key, value in facts.items()])
        if first is not None:
            new_workspace(db, first)

    try:
        catalog.write(fill, "create")
    finally:
        catalog.close()
    files.sync_dir(folder)


def remove_folder(files: Files, folder: Path) -> None:
    """Deletes the folder of a family and the files in it. Raises StoreFailed if there are other folders."""
    paths = FamilyPaths(folder)
    for path in reversed(paths.folders):
        if not files.exists(path):
            continue
        for name in files.listdir(path):
            if path / name not in paths.folders:
                remove_if_there(files, path / name)
        files.rmdir(path)
