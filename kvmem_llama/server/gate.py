"""What every request passes before its route: CORS, the wait for the model, the API key, the log."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import is_address
from .errors import ApiError, error_body, loading
from .flags import ServerOptions
from .responses import Json, error_response
from .state import ServerState

log: Final = logging.getLogger("kvmem.server")

PUBLIC: Final = frozenset({"/health", "/v1/health"})
_QUIET: Final = frozenset({"/health", "/v1/health", "/models", "/v1/models", "/props", "/metrics"})
"""Asked again and again by programs that watch; not logged."""
_MAX_PATH: Final = 300  # characters of a path in the log
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """An ASGI application around another one. The owner of a request is `request.state.owner`."""

    def __init__(self, app: ASGIApp, state: ServerState, page: frozenset[str]) -> None:
        """page: paths of the page at /, which anybody may see, also while the model loads."""
        self._app: Final = app
        self._state: Final = state
        self._page: Final = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        told = _Told(send, self._cors(headers, scope["method"]), without_body=scope["method"] == "HEAD")
        if scope["method"] == "HEAD":  # as GET, but for the body
            scope["method"] = "GET"
        answer = self._answer(scope, headers)
        began = time.monotonic()
        try:
            if answer is not None:
                await answer(scope, receive, told)
            else:
                await self._app(scope, receive, told)
        except Exception as error:  # a defect; whoever reads the log learns where, but no word of the request
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: %s\n%s", _what(scope), type(error).__name__, where)
            if not told.status:
                await error_response(error)(scope, receive, told)
            # Else the answer has begun: the connection is closed before its end, and so the client knows.
        finally:
            if self._path(scope) not in _QUIET and not self._state.options.log_disable:
                ms = (time.monotonic() - began) * 1000
                log.info("%s %s %d %.0f ms", _client(scope), _what(scope), told.status, ms)

    def _answer(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request that does not reach its route."""
        if scope["method"] == "OPTIONS":
            return Response("", media_type="text/html")
        path = self._path(scope)
        foreign = self._foreign(headers)
        if foreign:
            return error_response(ApiError(403, foreign))
        if not self._state.is_ready and path not in self._page:
            return error_response(loading())
        owner = self._state.keys.owner(headers)
        if owner is None and path not in self._page and path not in PUBLIC:
            return Json(error_body(ApiError(401, "Invalid API Key")), status_code=401)
        scope.setdefault("state", {})["owner"] = owner or ""
        return None

    def _path(self, scope: Scope) -> str:
        """Of the request, without the prefix that all routes have."""
        path: str = scope["path"]
        return path.removeprefix(self._state.options.api_prefix)

    def _foreign(self, headers: Headers) -> str:
        """Why a browser that shows somebody else's page may not do this; empty: it is no such request."""
        origin, options = headers.get("origin", ""), self._state.options
        is_ours = not origin or _is_same_origin(origin, headers.get("host", ""))
        if not is_ours and not _allowed_origin(options, origin):
            return "pages of other origins may not use this server; see --cors-origins"
        if not self._state.keys.are_needed and _is_rebound(headers):
            return "without an API key, name the server by its address or as localhost"
        return ""

    def _cors(self, headers: Headers, method: str) -> dict[str, str]:
        """Headers that let the page of another origin use the server; none by default."""
        options = self._state.options
        origin = headers.get("origin", "")
        allowed = _allowed_origin(options, origin)
        if not allowed:
            return {}
        found = {"access-control-allow-origin": allowed}
        if allowed != "*":
            found["vary"] = "Origin"
        if method == "OPTIONS":
            found["access-control-allow-credentials"] = "true" if options.cors_credentials else "false"
            found["access-control-allow-methods"] = options.cors_methods
            found["access-control-allow-headers"] = options.cors_headers
        return found


class _Told:
    """A `send` that adds headers, and remembers the status."""

    def __init__(self, send: Send, headers: dict[str, str], *, without_body: bool = False) -> None:
        self._send = send
        self._headers = headers
        self._without_body = without_body
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in self._headers.items():
                headers[name] = value
            message = {**message, "headers": [(_usual(name), value) for name, value in headers.raw]}
        elif self._without_body:
            message = {**message, "body": b""}
        await self._send(message)


def _usual(name: bytes) -> bytes:
    """A header's name as llama-server writes it: to some clients `content-type` is another one."""
    return b"-".join(part.capitalize() for part in name.split(b"-"))


def _allowed_origin(options: ServerOptions, origin: str) -> str:
    """The value of Access-Control-Allow-Origin; empty: none."""
    if options.cors_origins == "*":
        return origin if options.cors_credentials else "*"
    if not origin or not options.cors_origins:
        return ""
    if options.cors_origins == "localhost":
        return origin if _is_local(origin) else ""
    return origin if origin in [part.strip() for part in options.cors_origins.split(",")] else ""


def _is_local(origin: str) -> bool:
    with contextlib.suppress(ValueError):
        return urlsplit(origin).hostname in _LOCAL
    return False


def _what(scope: Scope) -> str:
    """Verb and path; no path of a request makes a line of its own."""
    path = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in scope["path"])
    return f"{scope['method']} {path[:_MAX_PATH]}"


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "-"


def _is_same_origin(origin: str, host: str) -> bool:
    with contextlib.suppress(ValueError):
        return urlsplit(origin).netloc == host
    return False


def _is_rebound(headers: Headers) -> bool:
    """The name in the request is not one of this machine: a page of somebody else's, whose name was made to
    point here, would count as of the same origin."""
    with contextlib.suppress(ValueError):
        return not is_address(urlsplit("//" + headers.get("host", "localhost")).hostname or "localhost")
    return True
