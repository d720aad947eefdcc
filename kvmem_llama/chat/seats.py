"""The workspaces that a chat has open: one it talks in, and those without a name that wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..errors import WorkspaceExists, WorkspaceNotFound
from ..settings import Settings
from .refusing import refused

if TYPE_CHECKING:
    from ..memory.report import StepResult
    from ..policies.policy import MemoryStats
    from ..store.root import Root
    from ..workspace import Workspace, WorkspaceEngine

UNNAMED: Final = "unnamed"


@dataclass(slots=True)
class Seat:
    """A workspace, and what this chat knows of it."""

    label: str  # its name; of one without a name, what this chat calls it
    workspace: Workspace
    last: StepResult | None = None  # of the newest answer
    stats: MemoryStats | None = None  # after the newest step

    @property
    def durable(self) -> bool:
        return self.workspace.name is not None


class Seats:
    """Durable workspaces are closed when they are left, so that others can use them; those without a name
    would be lost, so they stay until the end."""

    def __init__(self, engine: WorkspaceEngine, settings: Settings, first: Workspace) -> None:
        """first: the workspace to begin in; closed by `close`, like the others."""
        self._engine = engine
        self._settings = settings
        self._waiting: dict[str, Seat] = {}
        self._n_unnamed = 0
        self.now = Seat(first.name or self._next_label(), first)

    def new(self, name: str | None, system: str | None) -> Seat:
        """Makes a workspace and goes there. Raises WorkspaceExists, and as WorkspaceEngine.workspace."""
        if name is not None and name in self.names():
            raise WorkspaceExists(name, hint=f"Go there with /switch {name}, or choose another name.")
        workspace = self._engine.workspace(name, policy=self._settings.policy, system=system)
        return self._go(Seat(name or self._next_label(), workspace))

    def switch(self, label: str) -> Seat:
        """Goes to a workspace that exists. Raises WorkspaceNotFound, and as WorkspaceEngine.workspace."""
        if label == self.now.label:
            return self.now
        if label in self._waiting:
            return self._go(self._waiting.pop(label))
        if label not in self._stored():
            raise WorkspaceNotFound(label, hint="See /workspaces.")
        workspace = self._engine.workspace(label, create=False, policy=self._settings.policy)
        return self._go(Seat(label, workspace))

    def fork(self, name: str | None) -> Seat:
        """Forks this workspace and goes there. Raises as Workspace.fork."""
        was = self.now
        workspace = was.workspace.fork(name)
        return self._go(Seat(name or self._next_label(), workspace, was.last))

    def remove(self, label: str) -> None:
        """Deletes a workspace for good. Raises InvalidOption for this one, WorkspaceNotFound, StoreLocked."""
        if label == self.now.label:
            raise refused(f"/rm {label}", "you are in it", "Go to another one first: /switch, /new.")
        if label in self._waiting:
            self._waiting.pop(label).workspace.close()
            return
        from ..store.deleting import delete_workspace

        root = self._root()
        delete_workspace(root, root.find(label))

    def listing(self) -> Iterator[tuple[str, int | None, str]]:
        """(label, tokens, remark) of every workspace; this one first."""
        yield (
            self.now.label,
            self.now.workspace.n_tokens,
            "this one" + ("" if self.now.durable else ", in RAM"),
        )
        for label, seat in self._waiting.items():
            yield label, seat.workspace.n_tokens, "in RAM"
        for item in self._root().list():
            if item.row is None:
                yield f"({item.place.family})", None, str(item.error)
            elif item.row.name != self.now.label:
                yield (
                    item.row.name,
                    item.row.n_tokens,
                    "" if item.binding is None else item.binding.model_name,
                )

    def names(self) -> list[str]:
        """Labels of all workspaces there are."""
        return [self.now.label, *self._waiting, *(name for name in self._stored() if name != self.now.label)]

    def verify(self) -> list[str]:
        """Checks every stored byte of this workspace and its forks -> what was found, one thing a line."""
        from ..store.repair import verify_family

        root = self._root()
        report = verify_family(root, root.find(self.now.label).family)
        found = [f"{finding.kind}: {finding.where}: {finding.what}" for finding in report.findings]
        looked = f"{report.n_records:,} records, {report.n_index_rows:,} index rows, {report.n_rows:,} rows"
        return [*found, f"{looked}: {f'{len(found)} findings' if found else 'all as written'}"]

    def close(self) -> None:
        for seat in (self.now, *self._waiting.values()):
            seat.workspace.close()

    # -- private

    def _go(self, seat: Seat) -> Seat:
        was, self.now = self.now, seat
        if was.durable:
            was.workspace.close()
        else:
            self._waiting[was.label] = was
        return seat

    def _next_label(self) -> str:
        self._n_unnamed += 1
        return UNNAMED if self._n_unnamed == 1 else f"{UNNAMED}-{self._n_unnamed}"

    def _root(self) -> Root:
        from ..store.root import Root

        return Root(self._settings.data_path, durability=self._settings.durability)

    def _stored(self) -> list[str]:
        return [item.row.name for item in self._root().list() if item.row is not None]
