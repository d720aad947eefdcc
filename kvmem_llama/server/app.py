"""The application: its routes behind the gate, its errors, its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from .. import __version__
from ..errors import EngineClosed, KvmemError
from .counting import router as counting_router
from .errors import ApiError, bad_request, not_found
from .features_off import router as features_off_router
from .gate import Gate
from .generate import router as generate_router
from .health import router as health_router
from .info import router as info_router
from .page_routes import PATHS
from .page_routes import router as page_router
from .responses import error_response
from .state import ServerState
from .tokens import router as tokens_router
from .workspace_routes import router as workspace_router

log: Final = logging.getLogger("kvmem.server")

Failed = Callable[[BaseException], None]


def create_app(state: ServerState, failed: Failed | None = None) -> ASGIApp:
    """The application of `state`, which loads its model in the background once the application starts.

    failed: called when the model cannot be loaded; None: `state` is loaded already, or by somebody else.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loading = None if failed is None else asyncio.create_task(_load(state, failed))
        try:
            yield
        finally:
            await asyncio.to_thread(state.close)
            if loading is not None:
                await loading

    app = FastAPI(
        title="kvmem_llama",
        version=__version__,
        summary="A llama-server-compatible endpoint with memory",
        exception_handlers={Exception: _answer_error},
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{state.options.api_prefix}/openapi.json",
    )
    for router in (
        health_router, info_router, tokens_router, counting_router, features_off_router, workspace_router,
        generate_router,
    ):  # fmt: skip
        app.include_router(router(state), prefix=state.options.api_prefix)
    for kind in (ApiError, KvmemError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    if state.options.ui:
        app.include_router(page_router(state), prefix=state.options.api_prefix)
    return Gate(app, state, PATHS if state.options.ui else frozenset())


async def _load(state: ServerState, failed: Failed) -> None:
    try:
        await asyncio.to_thread(state.load)
    except EngineClosed:  # the end came first
        return
    except BaseException as error:
        failed(error)
        return
    settings, facts = state.settings, state.facts
    log.info(
        "model loaded: %s; %d slots, each with a view of %d tokens; workspaces in %s",
        facts.name, settings.n_parallel, facts.n_ctx, settings.data_path,
    )  # fmt: skip


async def _answer_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return error_response(bad_request(_field_error(error)))
    if isinstance(
        error, HTTPException
    ):  # of the router: an unknown path, or a verb that a path does not have
        return error_response(not_found() if error.status_code in (404, 405) else _told(error))
    return error_response(error)


def _told(error: HTTPException) -> ApiError:
    return ApiError(error.status_code, str(error.detail))


def _field_error(error: RequestValidationError) -> str:
    """As llama-server names a field that cannot be used."""
    first: dict[str, Any] = error.errors()[0]
    where = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path")]
    return f"Field '{'.'.join(where)}': {first.get('msg', 'it cannot be used')}"
