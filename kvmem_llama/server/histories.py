"""The histories that requests are answered in: which are known, which are open, which one a request gets."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ..errors import (
    Cancelled,
    EngineClosed,
    KvmemError,
    StoreError,
    StoreFull,
    WorkspaceBusy,
    WorkspaceError,
)
from ..native.layout import I32
from ..policies import KVMem
from ..store.deleting import delete_workspace
from ..store.root import Root
from ..workspace import Workspace, WorkspaceEngine
from .auth import split_name
from .auto_budget import AutoFamily, families_to_delete
from .choosing import MIN_SHARED, Choice, choose, goes_on, n_common, n_kept
from .history import History, Lease
from .stored_histories import find_stored, new_name, read_stored

log: Final = logging.getLogger("kvmem.server")

N_IN_RAM: Final = 32
"""Histories in RAM that are kept; those used last stay."""

N_TOKENS_IN_RAM: Final = 32768
N_OPEN: Final = 8
"""Stored histories that stay open beside one for each slot."""

MIN_STORED: Final = 1024
"""Tokens. A shorter prompt is answered in RAM only: it is read again as quickly as it is found."""

LOOK_SECONDS: Final = 60.0
"""The disk space of histories is looked at so often at most."""

_ASK_SECONDS: Final = 0.25  # how often one who waits is asked whether the client is still there
_SHARE_OF_PINS: Final = 4
_WORTH_WAITING: Final = 512  # tokens that need not be read
_NONE: Final = np.empty(0, np.int32)

JoinedAt: TypeAlias = Callable[[I32, int], int]


class Histories:
    """Any thread. Methods that open or make a workspace wait for the disk."""

    def __init__(self, engine: WorkspaceEngine, n_slots: int, *, auto_budget: int = 0) -> None:
        """auto_budget: bytes on disk for histories that no client has named; 0: no limit."""
        settings = engine.core.settings
        self._engine: Final = engine
        self._vocab: Final = engine.core.model.vocab
        self._spans: Final = settings.reuse == "spans"
        self._stores: Final = engine.core.hooks is not None and settings.policy == KVMem.name
        self._n_open: Final = n_slots + N_OPEN
        self.root: Final = Root(settings.data_path, durability=settings.durability)
        self._changed: Final = threading.Condition()
        self._clock: Final = itertools.count(1)
        self._all: list[History] = []
        self._auto_budget: Final = auto_budget
        self._look_next = 0.0  # by time.monotonic()
        self._is_scanned = not self._stores
        self._closed = False

    # -- requests

    def take(
        self,
        owner: str,
        wanted: I32,
        *,
        name: str | None = None,
        only: History | None = None,
        fresh: bool = False,
        timeout: float = 3600.0,
        is_wanted: Callable[[], bool] = lambda: True,
        slack: int = 0,
        may_edit: bool = True,
        joined_at: JoinedAt = lambda stored, prompt_end: 0,
    ) -> Lease:
        """The history that a prompt, [n] token ids, is answered in.

        name: in the store, of a workspace that the client has named. only: rather this history than another
        one. fresh: nothing that is stored is used. is_wanted: whether somebody still waits for the answer.
        slack, may_edit, joined_at: of one that the client has named: how many tokens before its last answer
        may differ, whether the prompt may change what is there, and where in its tokens, of which so many are
        before that answer, the prompt goes on with what is not at their beginning; 0: nowhere.
        Raises StoreError, WorkspaceBusy (after `timeout` seconds), Cancelled (nobody waits), EngineClosed.
        """
        if name is not None:
            patience = _Patience.of(timeout, is_wanted)
            return self._take_named(owner, name, wanted, slack, may_edit, joined_at, patience)
        if fresh:
            return self._new(owner, wanted)
        self._scan()
        patience = _Patience.of(timeout, is_wanted)
        while True:
            with self._changed:
                history, choice = self._choose(owner, wanted, only, patience)
            if choice.plan == "new":
                return self._new(owner, wanted)
            assert history is not None
            try:
                self._open(history)
                return self._go_on(history, wanted, choice)
            except StoreFull:  # it is there when there is room again
                self._release(history)
                raise
            except StoreError:  # somebody else has it, it is damaged, or of another model
                self._forget(history)
            except BaseException:
                self._release(history)
                raise

    def give_back(self, lease: Lease, *, n_prompt: int | None, unfinished: I32 | None = None) -> None:
        """The request has ended. n_prompt: tokens before the answer; None: its step failed. unfinished: of a
        prompt whose evaluation was cancelled: what was read of it is there when it comes again."""
        history = lease.history
        holds_nothing_else = lease.is_new or history.is_unfinished
        with contextlib.suppress(WorkspaceError, EngineClosed):
            history.tokens = lease.workspace.history()
            history.is_unfinished = False
        if n_prompt is not None:
            history.prompt_end = n_prompt
            self._pin_head(history, lease)
        elif unfinished is not None and holds_nothing_else:
            history.tokens, history.prompt_end, history.is_unfinished = unfinished, len(unfinished), True
        has_failed = n_prompt is None and lease.is_new and (unfinished is None or lease.source is not None)
        if has_failed or (history.is_auto and not len(history.tokens)):
            self._forget(history, delete=True)
        else:
            self._release(history)
        if lease.source is not None:
            if n_prompt is None:
                self._release(lease.source)
            else:  # the new one holds all of it
                self._forget(lease.source)
        self._trim()

    # -- for the other routes

    def workspaces(self, *, stored_only: bool = True) -> list[Workspace]:
        """Those that are open. stored_only: only durable ones."""
        with self._changed:
            found = [h for h in self._all if h.is_stored or not stored_only]
            return [h.workspace for h in found if h.workspace is not None]

    @contextlib.contextmanager
    def borrow(self, name: str) -> Iterator[Workspace]:
        """The workspace with this name in the store, for one use. Raises WorkspaceBusy, StoreError."""
        history = self._named(name)
        try:
            self._open(history)
            assert history.workspace is not None
            yield history.workspace
        finally:
            self._release_or_drop(history)
            self._trim()

    @contextlib.contextmanager
    def closed(self, name: str) -> Iterator[None]:
        """Within: the workspace with this name in the store is not open here. Raises WorkspaceBusy."""
        history = self._named(name)
        try:
            _close(history)
            yield
        finally:
            if history.is_read:
                self._release(history)
            else:  # it is found by its name
                self._forget(history)

    def forget(self, name: str) -> None:
        """Closes it. Raises WorkspaceBusy if it is in use."""
        with self._changed:
            found = [h for h in self._all if h.name == name]
            if any(h.is_busy for h in found):
                raise WorkspaceBusy()
            for history in found:
                history.is_busy = True
        for history in found:
            self._forget(history)

    def knows(self, history: History) -> bool:
        """Whether it is still kept."""
        with self._changed:
            return history in self._all

    def erase(self, history: History) -> bool:
        """Drops a history that no client has named, from the disk, too -> False if it is in use."""
        with self._changed:
            if history.is_busy:
                return False
            history.is_busy = True
        self._forget(history, delete=history.is_auto)
        return True

    @contextlib.contextmanager
    def on_disk(self, history: History) -> Iterator[str]:
        """Within: the history lies in the store under this name, and is open nowhere. Raises WorkspaceBusy,
        StoreError."""
        with self._changed:
            if history.is_busy or history not in self._all:
                raise WorkspaceBusy()
            history.is_busy = True
        copy: History | None = None
        try:
            stored = history
            if not history.is_stored:
                copy = stored = self._make(history.owner, new_name(history.owner), is_auto=True)
                assert copy.workspace is not None and history.workspace is not None
                copy.workspace.take_over(history.workspace, len(history.tokens))
                copy.workspace.read_tokens(history.tokens).result()
            _close(stored)
            assert stored.name is not None
            yield stored.name
        finally:
            if copy is not None:
                self._forget(copy, delete=True)
            self._release(history)

    def adopt(self, owner: str, name: str, tokens: I32, prompt_end: int) -> History:
        """Takes in a workspace that was just made in the store."""
        history = History(owner, name, is_auto=True)
        history.tokens, history.prompt_end = tokens, prompt_end
        with self._changed:
            history.used = next(self._clock)
            self._all.append(history)
        return history

    def close(self) -> None:
        """Closes all workspaces. Idempotent; no request runs any more."""
        with self._changed:
            self._closed = True
            found, self._all = self._all, []
            self._changed.notify_all()
        for history in found:
            _close(history)

    # -- private: choosing

    def _choose(
        self, owner: str, wanted: I32, only: History | None, patience: _Patience
    ) -> tuple[History | None, Choice]:
        """The history is busy from here on. Under the lock."""
        while True:
            self._refuse_if_closed()
            newest = sorted(self._all, key=lambda h: h.used, reverse=True)
            mine = [h for h in newest if h.owner == owner and h.is_auto and self._read(h)]
            if only is not None and only in mine:
                mine = [only]
            choices = choose(mine, wanted, self._vocab, spans=self._spans)
            best = choices[0]
            idle = next(c for c in choices if c.plan == "new" or not mine[c.number].is_busy)
            if best.n_kept - idle.n_kept < _WORTH_WAITING:
                best = idle
            if best.plan == "new":
                return None, best
            history = mine[best.number]
            if not history.is_busy:
                history.is_busy = True
                history.used = next(self._clock)
                return history, best
            patience.wait(self._changed)

    def _go_on(self, history: History, wanted: I32, choice: Choice) -> Lease:
        """Of a busy history, which is leased, too, or released; where this raises it is as it was."""
        assert history.workspace is not None
        grows = choice.plan == "go_on"
        if not history.is_stored and self._stores and len(wanted) >= MIN_STORED:
            stored = self._make(history.owner, new_name(history.owner), is_auto=True)
            assert stored.workspace is not None
            if grows:
                return Lease(stored, stored.workspace, is_new=True, source=history)
            self._release(history)
            return Lease(stored, stored.workspace, is_new=True)
        if grows:
            return Lease(history, history.workspace)
        name = new_name(history.owner) if history.is_stored else None
        fork = History(history.owner, name, is_auto=True)
        fork.workspace = history.workspace.fork(name)
        self._add(fork)
        self._release(history)
        return Lease(fork, fork.workspace, is_new=True)

    def _take_named(
        self,
        owner: str,
        name: str,
        wanted: I32,
        slack: int,
        may_edit: bool,
        joined_at: JoinedAt,
        patience: _Patience,
    ) -> Lease:
        history = self._named(name, patience, owner=owner)
        try:
            self._open(history, create=True)
            assert history.workspace is not None
            n = n_common(history.tokens, wanted, self._vocab)
            # What only shares its beginning comes after what is there: that is the client's.
            fits = not len(history.tokens) or goes_on(history, n, slack=slack)
            if may_edit and not fits and n >= MIN_SHARED:
                fits = n_kept(history, wanted, spans=self._spans) > 0
            start = 0 if fits else joined_at(history.tokens, history.prompt_end)
            return Lease(history, history.workspace, append=not fits and not start, start=start)
        except BaseException:
            self._release_or_drop(history)
            raise

    def _named(self, name: str, patience: _Patience | None = None, owner: str | None = None) -> History:
        """The history with this name, busy from here on; it may not exist yet."""
        self._scan()
        with self._changed:
            while True:
                self._refuse_if_closed()
                history = next((h for h in self._all if h.name == name), None)
                if history is None:
                    history = History(split_name(name)[0] if owner is None else owner, name, is_auto=False)
                    history.is_read = False
                    self._all.append(history)
                if not history.is_busy:
                    history.is_busy = True
                    history.used = next(self._clock)
                    return history
                if patience is None:
                    raise WorkspaceBusy()
                patience.wait(self._changed)

    # -- private: what is open

    def _new(self, owner: str, wanted: I32) -> Lease:
        name = new_name(owner) if self._stores and len(wanted) >= MIN_STORED else None
        history = self._make(owner, name, is_auto=True)
        assert history.workspace is not None
        return Lease(history, history.workspace, is_new=True)

    def _make(self, owner: str, name: str | None, *, is_auto: bool) -> History:
        history = History(owner, name, is_auto=is_auto)
        history.workspace = self._engine.workspace(name)
        self._add(history)
        return history

    def _add(self, history: History) -> None:
        with self._changed:
            self._refuse_if_closed()
            history.is_busy = True
            history.used = next(self._clock)
            self._all.append(history)

    def _open(self, history: History, *, create: bool = False) -> None:
        """Of a busy history."""
        if history.workspace is None:
            history.workspace = self._engine.workspace(history.name, create=create)
        is_known = history.is_read and len(history.tokens) == history.workspace.n_tokens
        if not is_known and not history.is_unfinished:
            history.tokens = history.workspace.history()
            turns = history.workspace.turns() if not history.is_read else ()
            history.prompt_end = turns[-1].answer_start if turns else len(history.tokens)
            history.is_read = True

    def _read(self, history: History) -> bool:
        """Whether the tokens of a history are known; those on disk are read when they are first wanted."""
        if not history.is_read and history.place is not None:
            try:
                stored = read_stored(self.root, history.place)
                history.tokens, history.prompt_end = stored.tokens, stored.prompt_end
                history.is_unfinished = stored.is_unfinished
            except StoreError:
                history.tokens = _NONE
            if len(history.tokens) and int(history.tokens.max()) >= self._vocab.n_tokens:
                history.tokens = _NONE  # of another model
            history.is_read = True
        return len(history.tokens) > 0 or history.is_busy

    def _release(self, history: History) -> None:
        with self._changed:
            history.is_busy = False
            history.used = next(self._clock)
            self._changed.notify_all()

    def _pin_head(self, history: History, lease: Lease) -> None:
        """Keeps the instructions at the beginning in every view, as far as they take a quarter of it; what a
        client has pinned is the client's affair."""
        if lease.source is not None:
            history.n_head = history.n_head or lease.source.n_head
        n = min(history.n_head, lease.workspace.n_view // _SHARE_OF_PINS, lease.workspace.n_tokens)
        if history.n_pinned or not n:
            return
        with contextlib.suppress(KvmemError):
            if not lease.workspace.stats().pins:
                lease.workspace.pin(0, n)
            history.n_pinned = n

    def _release_or_drop(self, history: History) -> None:
        """One that could not be opened is not looked at again."""
        if history.workspace is None:
            self._forget(history)
        else:
            self._release(history)

    def _forget(self, history: History, *, delete: bool = False) -> None:
        """Of a busy history: closes it, and deletes it from the disk."""
        _close(history)
        if delete and history.name is not None:
            with contextlib.suppress(StoreError):
                delete_workspace(self.root, self.root.find(history.name))
        with self._changed:
            if history in self._all:
                self._all.remove(history)
            history.is_busy = False
            self._changed.notify_all()

    def _trim(self) -> None:
        """Closes what was not used for longest: stored ones stay on disk, those in RAM are gone."""
        for history in self._excess():
            if history.is_stored:
                _close(history)
                self._release(history)
            else:
                self._forget(history)

    def _excess(self) -> list[History]:
        """Busy from here on."""
        with self._changed:
            newest = sorted(self._all, key=lambda h: h.used, reverse=True)
            opened = [h for h in newest if h.is_stored and h.workspace is not None]
            in_ram = [h for h in newest if not h.is_stored]
            sums = np.cumsum([len(h.tokens) for h in in_ram]) if in_ram else _NONE
            kept = min(N_IN_RAM, int(np.searchsorted(sums, N_TOKENS_IN_RAM, side="right")))
            found = [h for h in (*opened[self._n_open :], *in_ram[max(kept, 1) :]) if not h.is_busy]
            for history in found:
                history.is_busy = True
            return found

    def keep_to_budget(self) -> None:
        """Deletes the histories used longest ago, if those that no client has named take too much disk. It
        may take seconds."""
        with self._changed:
            if not self._auto_budget or time.monotonic() < self._look_next:
                return
            self._look_next = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(StoreError):
            for family in families_to_delete(self.root, self._auto_budget):
                self._delete_all(family)

    def _delete_all(self, family: AutoFamily) -> None:
        """Unless one of them is in use, or was since the family was looked at. Raises StoreError."""
        with self._changed:
            known = [h for h in self._all if h.name in family.names]
            if any(h.is_busy for h in known):
                return
            for history in known:
                history.is_busy = True
        is_unchanged = False
        try:
            is_unchanged = family.is_unchanged(self.root)
        finally:
            for history in known:
                if is_unchanged:
                    self._forget(history, delete=True)
                else:
                    self._release(history)
        if is_unchanged:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(family.used))
            log.info("deleted %s, last used %s: --auto-budget", ", ".join(sorted(family.names)), used)
        for name in family.names.difference(h.name for h in known) if is_unchanged else ():
            with contextlib.suppress(StoreError):  # of another server, or too many to be known
                delete_workspace(self.root, self.root.find(name))

    def _scan(self) -> None:
        """Finds what an earlier server has left, once."""
        with self._changed:
            if self._is_scanned:
                return
            self._is_scanned = True
            for stored in find_stored(self.root):
                history = History(stored.owner, stored.name, is_auto=True, place=stored.place)
                history.used = next(self._clock)
                self._all.append(history)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the server is stopping")


@dataclass(frozen=True, slots=True)
class _Patience:
    """How long somebody waits for a history that another request uses."""

    deadline: float  # by time.monotonic()
    is_wanted: Callable[[], bool]

    @classmethod
    def of(cls, timeout: float, is_wanted: Callable[[], bool]) -> _Patience:
        return cls(time.monotonic() + timeout, is_wanted)

    def wait(self, changed: threading.Condition) -> None:
        """Under the lock of `changed`. Raises WorkspaceBusy when it is over, Cancelled when nobody waits."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise WorkspaceBusy()
        if not self.is_wanted():
            raise Cancelled()
        changed.wait(min(left, _ASK_SECONDS))


def _close(history: History) -> None:
    """Closes the workspace of a busy history. What was acknowledged is on disk, whatever closing raises."""
    workspace, history.workspace = history.workspace, None
    if workspace is not None:
        with contextlib.suppress(KvmemError):
            workspace.close()
