"""The durable workspaces of one owner, as the routes under /kvmem/v1/ show and change them.

What is only shown comes from the catalogs, so it is there also while an answer is written. A name here is the
one its owner uses; nobody learns that a workspace of somebody else is there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import EngineError, InvalidOption, WorkspaceError, WorkspaceNotFound
from ..memory.search import FoundBlock
from ..store.ahead import n_tokens_ahead
from ..store.append import read_heat, workspace_row
from ..store.content import iter_blocks, iter_steps, read_tokens
from ..store.deleting import delete_workspace
from ..store.disk_records import DiskRecords
from ..store.export import Exported, export_workspace
from ..store.family import Family
from ..store.forking import fork_workspace
from ..store.holding import Holding
from ..store.location import Origin, Tier
from ..store.names import Place
from ..store.root import Root
from ..store.rows import WorkspaceRow
from ..store.tables import PINS, Db
from .auth import new_name, shown_name, stored_name
from .state import ServerState

MAX_TEXT_BLOCKS: Final = 1024
"""Blocks whose texts one answer holds at most."""

MAX_LIVE_TOKENS: Final = 2**20
"""Of a longer history the catalog tells: looking at every block would keep all answers waiting."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A workspace in its catalog, at one moment."""

    family: Family
    db: Db
    row: WorkspaceRow


class Workspaces:
    """Those of one owner. Methods raise StoreError: WorkspaceNotFound, too, for what is not the owner's."""

    def __init__(self, state: ServerState, owner: str) -> None:
        """owner: of a request (Keys.owner)."""
        self._state: Final = state
        self._owner: Final = owner
        self._root: Final = Root(state.settings.data_path, durability=state.settings.durability)

    # -- shown

    def all(self) -> list[dict[str, Any]]:
        """Name, length and age of each, by name."""
        found = []
        for item in self._root.list():
            name = None if item.row is None else shown_name(self._owner, item.row.name)
            if item.row is None or name is None:
                continue
            found.append(
                {
                    "name": name,
                    "id": item.row.id,
                    "n_tokens": item.row.n_tokens,
                    "n_steps": item.row.n_steps,
                    "model": item.binding.model_name if item.binding else "",
                    "created": item.row.created,
                    "used": item.row.used,
                }
            )
        return found

    def show(self, name: str) -> dict[str, Any]:
        """What a workspace holds: counts of tokens and blocks, sizes in bytes."""
        with self._reading(name) as found:
            row, db, binding = found.row, found.db, found.family.binding
            blocks = list(iter_blocks(db, row.lineage))
            tiers = Counter(block.tier for block in blocks)
            pins = PINS.rows(db, "workspace=?", (row.id,), "ORDER BY number")
            return {
                "name": name,
                "id": row.id,
                "n_tokens": row.n_tokens,
                "n_tokens_read_ahead": n_tokens_ahead(db, row.id),
                "n_steps": row.n_steps,
                "n_blocks": len(blocks),
                "n_blocks_on_disk": tiers[Tier.DISK],
                "n_blocks_as_tokens": tiers[Tier.TOKENS],
                "n_blocks_recomputed": sum(block.origin == Origin.RECOMPUTED for block in blocks),
                "record_bytes": tiers[Tier.DISK] * binding.record_nbytes,
                "block_size": binding.block_size,
                "pins": [{"start": pin.start, "end": pin.end} for pin in pins],
                "n_relatives": len(found.family.workspaces()) - 1,
                "model": binding.model_name,
                "cache_types": [binding.cache_type_k, binding.cache_type_v],
                "raw_k_type": binding.raw_k_type,
                "created": row.created,
                "used": row.used,
            }

    def blocks(self, name: str, start: int, end: int | None, *, with_text: bool) -> dict[str, Any]:
        """Blocks that hold tokens of start .. end-1 (None: to the end, with what a step that runs has read).

        Raises InvalidOption for a range that is none, or that has more blocks than texts are given of.
        """
        live = self._live_tiers(name)
        with self._reading(name) as found:
            row, db = found.row, found.db
            to_the_end = end is None
            end = row.n_tokens if end is None else end
            if not 0 <= start <= end:
                raise InvalidOption(
                    "start", start, f"must be from 0 to {end}", hint="Give a range of tokens."
                )
            pins = [(pin.start, pin.end) for pin in PINS.rows(db, "workspace=?", (row.id,))]
            heat = {heat.number: heat.total for heat in read_heat(db, row.lineage)}
            rows = [
                block
                for block in iter_blocks(db, row.lineage)
                if block.start < end and start < block.start + block.count
            ]
            if with_text and len(rows) > MAX_TEXT_BLOCKS:
                raise InvalidOption(
                    "text", True, f"{len(rows)} blocks are in this range",
                    hint=f"Ask for at most {MAX_TEXT_BLOCKS} blocks with their texts.",
                )  # fmt: skip
            blocks: list[dict[str, Any]] = [
                {
                    "start": block.start,
                    "count": block.count,
                    "tier": live.get(block.start, "tokens" if block.tier == Tier.TOKENS else "disk"),
                    "pinned": any(first < block.end and block.start < last for first, last in pins),
                    "recalls": heat.get(block.number, 0),
                    "origin": Origin(block.origin).name.lower(),
                }
                for block in rows
            ]
            at = blocks[-1]["start"] + blocks[-1]["count"] if blocks else start
            blocks += [
                _unfinished(first, found.family.binding.block_size, tier)
                for first, tier in live.items()
                if not with_text and to_the_end and first >= max(at, row.n_tokens)
            ]
            if with_text and blocks:
                self._state.engine.shelf.binding.check(found.family.binding)
                first = blocks[0]["start"]
                tokens = read_tokens(db, row.lineage, first, at)  # the blocks lie one after the other
                for block in blocks:
                    ids = tokens[block["start"] - first :][: block["count"]]
                    text = self._state.engine.core.model.vocab.detokenize(ids)
                    block["text"] = text.decode("utf-8", "replace")
            return {"name": name, "n_tokens": row.n_tokens, "blocks": blocks}

    def steps(self, name: str, n_newest: int) -> list[dict[str, Any]]:
        """The newest steps, oldest first; no texts."""
        with self._reading(name) as found:
            steps = list(iter_steps(found.db, found.row.lineage))
            first = max(len(steps) - n_newest, 0)
            return [
                {
                    "number": number,
                    "kind": step.kind,
                    "start": step.start,
                    "query_start": step.query_start,
                    "end": step.end,
                    "scorer": step.scorer,
                    "time": step.time,
                }
                for number, step in enumerate(steps[first:], first)
            ]

    def recalls(self, name: str, since: int) -> list[dict[str, Any]]:
        """The newest recalls since the server has started, oldest first."""
        return self._state.recalls.since(self._existing(name), since)

    # -- asked and changed

    def search(self, name: str, text: str, n_blocks: int) -> list[dict[str, Any]]:
        """The blocks that a question with this text would recall, best first. Raises as Workspace.search."""
        with self._state.slots.borrow(self._existing(name)) as workspace:
            return [_found(block) for block in workspace.search(text, n_blocks).blocks]

    def pin(self, name: str, start: int, end: int) -> None:
        """Keeps the blocks of the tokens start .. end-1 in every view. Raises as Workspace.pin."""
        with self._state.slots.borrow(self._existing(name)) as workspace:
            workspace.pin(start, end)

    def unpin(self, name: str, start: int, end: int) -> None:
        """Takes back a pin. Raises as Workspace.unpin."""
        with self._state.slots.borrow(self._existing(name)) as workspace:
            workspace.unpin(start, end)

    def fork(self, name: str, new: str) -> None:
        """A workspace with the same history. Raises InvalidName, WorkspaceExists, WorkspaceBusy."""
        stored = new_name(self._owner, new)
        with self._managing(name) as (holding, records):
            fork_workspace(holding, records, stored).close()

    def delete(self, name: str) -> None:
        """Deletes a workspace. Raises WorkspaceBusy while an answer is written into it."""
        stored = self._existing(name)
        self._state.slots.forget(stored)
        delete_workspace(self._root, self._root.find(stored))
        self._state.recalls.forget(stored)

    def export(self, name: str, path: Path) -> Exported:
        """Writes a workspace to a file. Raises WorkspaceBusy while an answer is written into it."""
        with self._managing(name) as (holding, records):
            return export_workspace(holding, records, path)

    # -- private

    def _stored(self, name: str) -> str:
        return stored_name(self._owner, name)

    def _existing(self, name: str) -> str:
        """The name in the store. Raises WorkspaceNotFound with the owner's name for it."""
        self._find(name)
        return self._stored(name)

    def _find(self, name: str) -> Place:
        try:
            return self._root.find(self._stored(name))
        except WorkspaceNotFound as error:
            hint = error.hint if error.may_exist else "See GET /kvmem/v1/workspaces for the names."
            raise WorkspaceNotFound(name, hint=hint, may_exist=error.may_exist) from None

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[_Read]:
        place = self._find(name)
        with (
            self._root.family(place.family, read_only=True) as family,
            family.catalog.snapshot() as db,
        ):
            yield _Read(family, db, workspace_row(db, place.workspace))

    @contextlib.contextmanager
    def _managing(self, name: str) -> Iterator[tuple[Holding, DiskRecords]]:
        """A workspace that no slot has open, for work on what is stored."""
        settings = self._state.settings
        with (
            self._state.slots.closed(self._existing(name)),
            Holding.open(self._root, self._find(name)) as holding,
            holding.records(segment_records=settings.segment_records) as records,
        ):
            yield holding, records

    def _live_tiers(self, name: str) -> dict[int, str]:
        """Where the rows of blocks are now, by first token, if a slot has the workspace open."""
        stored = self._stored(name)
        for workspace in self._state.slots.workspaces():
            if workspace.name == stored and workspace.n_tokens <= MAX_LIVE_TOKENS:
                with contextlib.suppress(WorkspaceError, EngineError):  # it may be closed just now
                    return dict(workspace.tiers())
        return {}


def _unfinished(start: int, count: int, tier: str) -> dict[str, Any]:
    """A block that a running step has read, and that is not committed."""
    return {
        "start": start, "count": count, "tier": tier, "pinned": False, "recalls": 0, "origin": "unfinished"
    }  # fmt: skip


def _found(block: FoundBlock) -> dict[str, Any]:
    return {
        "start": int(block.start),
        "count": block.count,
        "score": block.score,
        "ranks": {name: int(rank) for name, rank in block.ranks.items()},
        "tier": block.tier,
        "age": block.age,
        "text": block.text,
    }
