"""The error object of llama-server, and the HTTP status of every error a request can meet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ..errors import (
    BudgetError,
    Cancelled,
    EngineClosed,
    EngineError,
    InputError,
    InvalidName,
    InvalidRequest,
    KvmemError,
    MandatoryTooLarge,
    StoreError,
    StoreFull,
    StoreLocked,
    TemplateUnsupported,
    WorkspaceBusy,
    WorkspaceExists,
    WorkspaceMismatch,
    WorkspaceNotFound,
)

TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    507: "server_error",
}
"""The `type` of the error object by status; llama-server's are in tools/server/server-common.cpp."""

EXCEEDED: Final = "exceed_context_size_error"

# A class not named here has the status of its nearest named base.
STATUSES: Final[Mapping[type[KvmemError], int]] = {
    KvmemError: 500,
    BudgetError: 400,
    InputError: 400,
    InvalidName: 400,
    TemplateUnsupported: 400,  # the template refuses these messages
    EngineError: 500,
    EngineClosed: 503,
    StoreError: 500,
    WorkspaceNotFound: 404,
    WorkspaceExists: 409,
    WorkspaceBusy: 409,
    WorkspaceMismatch: 409,
    StoreLocked: 409,
    StoreFull: 507,
    Cancelled: 503,
}


_OWNER: Final = re.compile(r"\bkey-[0-9a-f]{24}/")  # in the store's names of workspaces; no client knows it


class ApiError(Exception):
    """What a client is told: `code` (the HTTP status), `message`, `type`, and `extra` members."""

    def __init__(
        self, code: int, message: str, type: str = "", extra: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.code: Final = code
        self.message: Final = message
        self.type: Final = type or TYPES.get(code, TYPES[500])
        self.extra: Final[dict[str, object]] = dict(extra or {})


def bad_request(message: str) -> ApiError:
    """400: the request cannot be used as it is."""
    return ApiError(400, message)


def not_supported(message: str) -> ApiError:
    """501: the feature is switched off, or there is none."""
    return ApiError(501, message)


def loading() -> ApiError:
    """503, as llama-server says it until the model is there."""
    return ApiError(503, "Loading model")


def not_found() -> ApiError:
    """404 of a path that is no route."""
    return ApiError(404, "File Not Found")


def context_exceeded(message: str, *, n_prompt_tokens: int, n_ctx: int, n_workspace: int = 0) -> ApiError:
    """400: what must be in the view does not fit, or the workspace is full. Counts in tokens.

    n_ctx: of the view. n_workspace: tokens that the workspace holds.
    """
    extra = {"n_prompt_tokens": n_prompt_tokens, "n_ctx": n_ctx, "n_workspace": n_workspace}
    return ApiError(400, message, EXCEEDED, extra)


def api_error(error: BaseException) -> ApiError:
    """`error` as a client is told it; of one nobody foresaw, only its class."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MandatoryTooLarge):
        return context_exceeded(str(error), n_prompt_tokens=error.n_needed, n_ctx=error.n_view)
    if isinstance(error, (InvalidRequest, TemplateUnsupported)):
        return ApiError(400, error.why)  # in llama.cpp's words, which clients know
    if isinstance(error, KvmemError):
        return ApiError(status_of(error), _OWNER.sub("", str(error)))
    return ApiError(500, f"internal error: {type(error).__name__}")


def status_of(error: KvmemError) -> int:
    """HTTP status of an answer that tells of `error`."""
    return next(STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES)


def error_object(error: BaseException) -> dict[str, object]:
    """The object under the key `error`."""
    told = api_error(error)
    return {"code": told.code, "message": told.message, "type": told.type, **told.extra}


def error_body(error: BaseException) -> dict[str, object]:
    """The whole body of an answer that tells of `error`."""
    return {"error": error_object(error)}
