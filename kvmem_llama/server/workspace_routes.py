"""The routes under /kvmem/v1/: workspaces, their blocks, and what was recalled of them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from .documenting import json_body
from .errors import bad_request
from .limits import read_body
from .responses import Json
from .state import ServerState
from .workspaces import Workspaces

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)

_MAX_TOKENS: Final = 2**40
_N_THREADS: Final = 4


class Fork(BaseModel):
    name: str = Field(description="of the new workspace", min_length=1, max_length=150)


class TokenRange(BaseModel):
    start: int = Field(description="first token", ge=0, le=_MAX_TOKENS)
    end: int = Field(description="the one after the last token", ge=1, le=_MAX_TOKENS)


class Search(BaseModel):
    query: str = Field(description="text that a question would have", min_length=1, max_length=100_000)
    n_blocks: int = Field(10, ge=1, le=1000)


class _Passing(FileResponse):
    """A file that is deleted with its folder, however the response ends."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, media_type="application/x-tar", filename=path.name)
        self._folder: Final = path.parent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def router(state: ServerState) -> APIRouter:
    """Everything here is the asking key's own; what belongs to another key answers 404.

    A name may hold slashes, so the route of a workspace itself comes after those of its parts.
    """
    routes = APIRouter(prefix="/kvmem/v1", tags=["workspaces"])

    # Of their own: what takes long here, such as an export, keeps no request for an answer waiting.
    threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="kvmem-workspaces")

    async def of(request: Request, work: Callable[[Workspaces], T]) -> T:
        own = Workspaces(state, request.state.owner)
        return await asyncio.get_running_loop().run_in_executor(threads, work, own)

    async def read(request: Request, shape: type[Body]) -> Body:
        body = await read_body(request, state.options)
        try:
            return shape.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise bad_request(f"Field '{'.'.join(map(str, first['loc']))}': {first['msg']}") from None

    @routes.get("/workspaces", summary="All workspaces")
    async def list_them(request: Request) -> Response:
        return Json({"workspaces": await of(request, lambda own: own.all())})

    @routes.get("/workspaces/{name:path}/blocks", summary="Where the blocks of a workspace are")
    async def blocks(
        request: Request,
        name: str,
        start: int = Query(0, ge=0, le=_MAX_TOKENS),
        end: int | None = Query(None, ge=0, le=_MAX_TOKENS),
        text: bool = Query(False, description="with the text of each block"),
    ) -> Response:
        return Json(await of(request, lambda own: own.blocks(name, start, end, with_text=text)))

    @routes.get("/workspaces/{name:path}/steps", summary="Its newest steps")
    async def steps(request: Request, name: str, n: int = Query(100, ge=1, le=10_000)) -> Response:
        return Json({"steps": await of(request, lambda own: own.steps(name, n))})

    @routes.get("/workspaces/{name:path}/recalls", summary="What was recalled since the server has started")
    async def recalls(request: Request, name: str, since: int = Query(0, ge=0)) -> Response:
        return Json({"recalls": await of(request, lambda own: own.recalls(name, since))})

    @routes.get(
        "/workspaces/{name:path}/export", summary="A workspace as one file, for kvmem workspace import"
    )
    async def export(request: Request, name: str) -> Response:
        folder = Path(tempfile.mkdtemp(prefix="kvmem-export-"))
        try:
            await of(request, lambda own: own.export(name, folder / "workspace.tar"))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return _Passing(folder / "workspace.tar")

    @routes.get("/workspaces/{name:path}", summary="What a workspace holds")
    async def show(request: Request, name: str) -> Response:
        return Json(await of(request, lambda own: own.show(name)))

    @routes.delete("/workspaces/{name:path}", summary="Delete a workspace")
    async def delete(request: Request, name: str) -> Response:
        await of(request, lambda own: own.delete(name))
        return Json({"deleted": name})

    @routes.post(
        "/workspaces/{name:path}/fork",
        summary="Make a workspace with the same history",
        openapi_extra=_body(Fork),
    )
    async def fork(request: Request, name: str) -> Response:
        body = await read(request, Fork)
        await of(request, lambda own: own.fork(name, body.name))
        return Json({"name": body.name, "forked_from": name})

    @routes.post(
        "/workspaces/{name:path}/search",
        summary="The blocks that a question would recall",
        openapi_extra=_body(Search),
    )
    async def search(request: Request, name: str) -> Response:
        body = await read(request, Search)
        found = await of(request, lambda own: own.search(name, body.query, body.n_blocks))
        return Json({"blocks": found})

    @routes.post(
        "/workspaces/{name:path}/pin", summary="Keep tokens in every view", openapi_extra=_body(TokenRange)
    )
    async def pin(request: Request, name: str) -> Response:
        body = await read(request, TokenRange)
        await of(request, lambda own: own.pin(name, body.start, body.end))
        return Json(_pinned(name, body))

    @routes.post("/workspaces/{name:path}/unpin", summary="Take back a pin", openapi_extra=_body(TokenRange))
    async def unpin(request: Request, name: str) -> Response:
        body = await read(request, TokenRange)
        await of(request, lambda own: own.unpin(name, body.start, body.end))
        return Json(_pinned(name, body))

    return routes


def _body(shape: type[BaseModel]) -> dict[str, Any]:
    schema = shape.model_json_schema()
    return json_body(schema["properties"], schema.get("required", ()))


def _pinned(name: str, body: TokenRange) -> dict[str, Any]:
    return {"name": name, "start": body.start, "end": body.end}
