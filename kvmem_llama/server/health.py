"""Whether the server is ready."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from .responses import Json
from .state import ServerState


def router(_state: ServerState) -> APIRouter:
    """GET /health. While the model loads, the gate answers."""
    routes = APIRouter(tags=["server"])

    @routes.get("/health", summary="Whether the server is ready")
    @routes.get("/v1/health", include_in_schema=False)
    async def health() -> Response:
        return Json({"status": "ok"})

    return routes
