"""The page at /: chat and inspector, from files of this package; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from .state import ServerState

_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/index.html": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
PATHS: Final = frozenset(_FILES)

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def router(_state: ServerState) -> APIRouter:
    """GET / and the files it needs."""
    routes = APIRouter(include_in_schema=False)
    folder = resources.files(__package__) / "page"
    for path, (name, media_type) in _FILES.items():
        routes.add_api_route(path, _sender((folder / name).read_bytes(), media_type), methods=["GET"])
    return routes


def _sender(data: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(data, media_type=media_type, headers=HEADERS)

    return send
