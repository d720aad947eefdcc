"""POST /slots/{id}?action=save|restore|erase: the history of a slot's last request, as a file and back."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..errors import StoreError
from ..store.export import Exported, export_workspace
from ..store.holding import Holding
from ..store.importing import import_workspace
from .auth import as_seen
from .documenting import json_body
from .errors import bad_request, not_supported
from .history import History
from .limits import read_body
from .responses import Json
from .slots import SlotPool
from .state import ServerState
from .stored_histories import new_name, read_stored

_MAX_NAME: Final = 255
_REFUSED: Final = re.compile(
    r'[\x00-\x1f\x7f-\x9f/\\<>:"|?*]|\.\.|^[ .]|[ .]$|^(con|prn|aux|nul|com\d|lpt\d) *(\.|$)', re.IGNORECASE
)
"""What is no name of a file in some system, also in the form that characters which look like these have."""
_MAX_DIGITS: Final = 9  # of a slot's number

Action = Callable[[History | None, str, Path | None], dict[str, Any]]


def router(state: ServerState, pool_of: Callable[[ServerState], SlotPool]) -> APIRouter:
    """Saved, a slot's history is an export of a workspace: `kvmem workspace import` reads it, too."""
    routes = APIRouter(tags=["slots"])
    actions: dict[str, Callable[..., dict[str, Any]]] = {"save": _save, "restore": _restore, "erase": _erase}

    @routes.post(
        "/slots/{id_slot}",
        summary="Save, restore or erase what a slot holds",
        openapi_extra=json_body({"filename": {"type": "string"}}),
    )
    async def act(request: Request, id_slot: str, action: str = "") -> Response:
        folder = state.options.slot_save_path
        if not folder:
            raise not_supported("This server does not support slots action. Start it with `--slot-save-path`")
        pool = pool_of(state)
        if not id_slot.isascii() or not id_slot.isdigit() or len(id_slot) > _MAX_DIGITS:
            raise bad_request("Invalid slot ID")
        if int(id_slot) >= len(pool.slots):
            raise bad_request("Invalid slot ID")
        if action not in actions:
            raise bad_request("Invalid action")
        owner: str = request.state.owner
        path = None
        if action != "erase":
            path = _path(Path(folder), owner, (await read_body(request, state.options)).get("filename"))
        work = actions[action]
        return Json(await _in_slot(pool, int(id_slot), lambda: work(state, pool, int(id_slot), owner, path)))

    return routes


async def _in_slot(pool: SlotPool, id_slot: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs `work` when nothing else uses the slot."""
    slot = await pool.acquire(id_slot)
    try:
        waiting: Awaitable[dict[str, Any]] = asyncio.wrap_future(pool.run(work))
        return await asyncio.shield(waiting)
    finally:
        pool.release(slot)


def _path(folder: Path, owner: str, name: object) -> Path:
    """Where a slot is saved: the files of one key are another's business. Raises ApiError (400)."""
    if (
        not isinstance(name, str)
        or not name
        or len(name.encode()) > _MAX_NAME
        or _REFUSED.search(as_seen(name))
    ):
        raise bad_request("Invalid filename")
    path = (folder / f"key-{owner}" if owner else folder) / name
    if path.is_dir():  # such as that of another key
        raise bad_request("Invalid filename")
    return path


def _save(state: ServerState, pool: SlotPool, id_slot: int, owner: str, path: Path) -> dict[str, Any]:
    began = time.monotonic()
    history = _of(pool, id_slot, owner)
    if history is None:
        raise bad_request("Unable to save slot: it holds nothing")
    path.parent.mkdir(parents=True, exist_ok=True)
    with pool.histories.on_disk(history) as name:
        exported = _export(state, pool, name, path)
    return {
        "id_slot": id_slot,
        "filename": path.name,
        "n_saved": exported.n_tokens,
        "n_written": exported.nbytes,
        "timings": {"save_ms": (time.monotonic() - began) * 1000},
    }


def _export(state: ServerState, pool: SlotPool, name: str, path: Path) -> Exported:
    root, settings = pool.histories.root, state.settings
    with (
        Holding.open(root, root.find(name)) as holding,
        holding.records(segment_records=settings.segment_records) as records,
    ):
        return export_workspace(holding, records, path, replace=True)


def _restore(state: ServerState, pool: SlotPool, id_slot: int, owner: str, path: Path) -> dict[str, Any]:
    began = time.monotonic()
    root, name = pool.histories.root, new_name(owner)
    try:
        n_read = path.stat().st_size
        place = import_workspace(
            root, path, name,
            binding=state.engine.shelf.binding, segment_records=state.settings.segment_records,
        )  # fmt: skip
        stored = read_stored(root, place)
    except (OSError, StoreError):
        raise bad_request(
            "Unable to restore slot: No available space in KV cache or invalid slot save file"
        ) from None
    pool.set_history(id_slot, pool.histories.adopt(owner, name, stored.tokens, stored.prompt_end))
    return {
        "id_slot": id_slot,
        "filename": path.name,
        "n_restored": len(stored.tokens),
        "n_read": n_read,
        "timings": {"restore_ms": (time.monotonic() - began) * 1000},
    }


def _erase(_state: ServerState, pool: SlotPool, id_slot: int, owner: str, _path: None) -> dict[str, Any]:
    history = _of(pool, id_slot, owner)
    n = 0
    if history is not None:
        n = len(history.tokens) if history.is_auto else 0  # what a client has named is only let go
        if pool.histories.erase(history):
            pool.set_history(id_slot, None)
        else:  # somebody goes on with it
            n = 0
    return {"id_slot": id_slot, "n_erased": n}


def _of(pool: SlotPool, id_slot: int, owner: str) -> History | None:
    """What the slot holds, if it is this owner's."""
    history = pool.history_of(id_slot)
    if history is None or history.owner != owner or not pool.histories.knows(history):
        return None
    return history if len(history.tokens) else None
