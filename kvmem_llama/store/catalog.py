"""The catalog of one family: an SQLite file in WAL mode. All writing goes through one thread; a transaction
is durable when `write` returns."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from kvmem_llama.errors import (
    CatalogDamaged,
    FormatTooNew,
    FormatTooOld,
    KvmemError,
    StoreFailed,
    StoreFull,
)

from . import files as operating_system
from .files import Files
from .lock import wait_lock
from .schema import APPLICATION_ID, FORMAT, SCHEMA
from .tables import SQLITE_ERRORS, BadRow, Db

T = TypeVar("T")
Connect = Callable[[str], Db]

_WAL_LIMIT: Final = 4 << 20  # bytes; a longer write-ahead log is copied into the catalog after a transaction
_BUSY: Final = 30_000  # ms


def connect_sqlite(uri: str) -> Db:
    """The connection tests replace by one that fails."""
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


class Catalog:
    """Any thread. Between processes, writers take turns by a lock file."""

    def __init__(
        self,
        path: Path,
        *,
        durability: str = "full",
        read_only: bool = False,
        files: Files | None = None,
        connect: Connect = connect_sqlite,
    ) -> None:
        """Opens the catalog at `path`; nothing is read but its header.

        durability: relaxed does not wait for the disk: a power cut may take the newest transactions.
        Raises FormatTooNew, FormatTooOld, CatalogDamaged or StoreFailed.
        """
        self.path: Final = path
        self.durability: Final = durability
        self.read_only: Final = read_only
        self._files: Final = files or operating_system.current()
        self._connect_sqlite: Final = connect
        self.turn_path: Final = path.parent / "locks" / "catalog.lock"
        self._writer: Db | None = None
        self._is_uncertain = False  # whether the last commit came to its end
        self._closed = False
        self._lock: Final = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        with self.snapshot() as db:
            _check_format(db, path)

    @classmethod
    def create(cls, path: Path, files: Files | None = None, connect: Connect = connect_sqlite) -> None:
        """Makes an empty catalog, durable but for its name. Raises StoreFull or StoreFailed."""
        files = files or operating_system.current()
        try:
            # Made here for its mode; SQLite gives its other files the same one. It must be closed before
            # SQLite opens it: closing a file drops all locks that the process has on it.
            files.close(files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            db = connect(f"file:{quote(str(path))}")
            with contextlib.closing(db):
                db.execute("PRAGMA page_size=4096")
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=FULL")
                db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
                db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                db.execute(f"PRAGMA user_version={FORMAT}")
        except (OSError, *SQLITE_ERRORS) as error:
            raise told(error, path) from error

    # -- reading

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Db]:
        """A connection that sees the catalog as it is now, whatever is written meanwhile. Keep it short: the
        log grows while it is open. Raises CatalogDamaged or StoreFailed, also for errors within."""
        db: Db | None = None
        try:
            db = self._connect(write=False)
            db.execute("BEGIN")
            yield db
        except (*SQLITE_ERRORS, BadRow, OSError) as error:
            raise told(error, self.path) from error
        finally:
            if db is not None:
                db.close()

    # -- writing

    def write(self, what: Callable[[Db], T], point: str = "row_commit") -> T:
        """Runs `what` in a transaction on the writer thread and returns its result when it is durable.

        point: prefix of the named points passed: `.before`, `.statements` (not committed yet), `.after`.
        Whatever is raised, nothing was changed: StoreFull, StoreFailed, CatalogDamaged or what `what` raises.
        """
        return self.submit(what, point).result()

    def submit(self, what: Callable[[Db], T], point: str = "row_commit") -> Future[T]:
        """As `write`, but does not wait."""
        return self._on_writer(lambda: self._transact(what, point))

    def checkpoint(self) -> None:
        """Copies the write-ahead log into the catalog and empties it, if nobody else is reading."""
        self._on_writer(lambda: self._alone("wal_checkpoint(TRUNCATE)")).result()

    def vacuum(self) -> None:
        """Gives free pages back to the file system."""

        def run() -> None:
            self._alone(None)
            self._alone("wal_checkpoint(TRUNCATE)")

        self._on_writer(run).result()

    def close(self) -> None:
        """Idempotent; waits for what was submitted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
        if thread is None:
            return
        # When the interpreter goes down its threads are gone; whatever was acknowledged is on disk.
        with contextlib.suppress(RuntimeError):
            thread.submit(self._close_writer).result()
        thread.shutdown()

    # -- private, the writer thread

    def _on_writer(self, run: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._closed or self.read_only:
                why = "the catalog is closed" if self._closed else "the workspace was opened read-only"
                raise StoreFailed(self.path, why, hint="Open the workspace again for writing.")
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvmem-catalog")
            return self._thread.submit(run)

    def _transact(self, what: Callable[[Db], T], point: str) -> T:
        self._files.at(f"{point}.before")
        with wait_lock(self._files, self.turn_path):
            try:
                self._bury()
                db = self._open_writer()
                db.execute("BEGIN IMMEDIATE")
                result = what(db)
                self._files.at(f"{point}.statements")
                self._is_uncertain = True
                db.execute("COMMIT")
                self._is_uncertain = False
            except BaseException as error:
                self._undo()
                with contextlib.suppress(*SQLITE_ERRORS, OSError):  # the next transaction tries it again
                    self._bury()
                if isinstance(error, (*SQLITE_ERRORS, BadRow, OSError)):
                    raise told(error, self.path) from error
                raise
            self._files.at(f"{point}.after")
            # The transaction is durable: what fails from here on is tried again after the next one.
            with contextlib.suppress(*SQLITE_ERRORS, OSError):
                if os.stat(f"{self.path}-wal").st_size > _WAL_LIMIT:
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return result

    def _alone(self, pragma: str | None) -> None:
        """A checkpoint, or VACUUM, while no other process writes."""
        with wait_lock(self._files, self.turn_path):
            try:
                self._open_writer().execute("VACUUM" if pragma is None else f"PRAGMA {pragma}").fetchall()
            except (*SQLITE_ERRORS, OSError) as error:
                raise told(error, self.path) from error

    def _open_writer(self) -> Db:
        if self._writer is None:
            db = self._connect(write=True)
            db.execute(f"PRAGMA synchronous={'FULL' if self.durability == 'full' else 'NORMAL'}")
            # Checkpoints run above, in turn with the writers of other processes.
            db.execute("PRAGMA wal_autocheckpoint=0")
            self._writer = db
        return self._writer

    def _bury(self) -> None:
        """After a commit that failed: what it left in the write-ahead log might be taken for a transaction
        after a crash. The next one is written over it; so one that changes nothing is made at once."""
        if not self._is_uncertain:
            return
        db = self._open_writer()
        try:
            db.execute("BEGIN IMMEDIATE")
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
        except SQLITE_ERRORS:
            self._undo()  # else other processes would wait for the end of this transaction
            raise
        self._is_uncertain = False

    def _undo(self) -> None:
        """Rolls back; a connection that cannot even do that is given up."""
        db = self._writer
        if db is None:
            return
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
        except SQLITE_ERRORS:
            self._writer = None
            with contextlib.suppress(*SQLITE_ERRORS):
                db.close()

    def _close_writer(self) -> None:
        db, self._writer = self._writer, None
        if db is None:
            return
        with contextlib.suppress(*SQLITE_ERRORS, KvmemError):
            with wait_lock(self._files, self.turn_path):
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                db.close()
            return
        with contextlib.suppress(*SQLITE_ERRORS):
            db.close()

    def _connect(self, *, write: bool) -> Db:
        name = f"file:{quote(str(self.path))}"
        if not self.path.exists():  # SQLite would make one
            raise FileNotFoundError(2, "the catalog is missing", str(self.path))
        db = self._connect_sqlite(f"{name}?mode={'ro' if self.read_only else 'rw'}")
        try:
            return _prepare(db, write=write)
        except sqlite3.OperationalError:
            db.close()
            # A folder that cannot be written to and has no log: nobody can change the catalog meanwhile.
            if not self.read_only or os.access(self.path.parent, os.W_OK) or _has_log(self.path):
                raise
        return _prepare(self._connect_sqlite(f"{name}?mode=ro&immutable=1"), write=write)


def names_in(path: Path, connect: Connect = connect_sqlite) -> frozenset[str] | None:
    """Names of the workspaces in a catalog of another format; None if it does not have them where this one
    does. Nothing else of it is read."""
    try:
        with contextlib.closing(connect(f"file:{quote(str(path))}?mode=ro")) as db:
            return frozenset(str(name) for (name,) in db.execute("SELECT name FROM workspaces"))
    except (OSError, *SQLITE_ERRORS):
        return None


def told(error: BaseException, path: Path) -> KvmemError:
    """The error a user is told about for one of SQLite, of a row, or of the operating system."""
    if isinstance(error, OSError):
        return StoreFailed(path, error.strerror or str(error))
    if not isinstance(error, sqlite3.Error):
        return CatalogDamaged(path, str(error))
    code = (getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(path, 4096)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreFailed(path, f"another process keeps the catalog busy ({error})", hint="Try again.")
    if code in (
        sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM,
    ):  # fmt: skip
        return StoreFailed(path, str(error))
    return CatalogDamaged(path, str(error))


def _prepare(db: Db, *, write: bool) -> Db:
    db.execute(f"PRAGMA busy_timeout={_BUSY}")
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA cell_size_check=ON")  # a damaged page is found when it is loaded
    db.execute("PRAGMA mmap_size=0")  # a failing disk is an error, not a signal
    db.execute("PRAGMA secure_delete=ON")  # what was deleted is overwritten
    db.execute("PRAGMA temp_store=MEMORY")
    if not write:
        db.execute("PRAGMA query_only=ON")
    db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # fails here if it is not readable
    return db


def _check_format(db: Db, path: Path) -> None:
    """Raises FormatTooNew, FormatTooOld or CatalogDamaged."""
    application = db.execute("PRAGMA application_id").fetchone()[0]
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID or version < 1:
        raise CatalogDamaged(path, f"it says application {application:#x}, format {version}")
    if version > FORMAT:
        raise FormatTooNew(path, version, FORMAT)
    if version < FORMAT:
        raise FormatTooOld(path, version, FORMAT)


def _has_log(path: Path) -> bool:
    log = Path(f"{path}-wal")
    return log.exists() and log.stat().st_size > 0
