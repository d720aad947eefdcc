"""Answers as llama-server writes them: compact JSON, whole characters, the error object."""

from __future__ import annotations

import json
from typing import Final

from starlette.responses import Response

from .errors import api_error, error_body

JSON_TYPE: Final = "application/json; charset=utf-8"


def json_bytes(content: object) -> bytes:
    """Compact JSON in UTF-8; half characters are replaced. Raises ValueError for a number like NaN."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


class Json(Response):
    """A JSON answer."""

    media_type = JSON_TYPE

    def render(self, content: object) -> bytes:
        return json_bytes(content)


def error_response(error: BaseException) -> Json:
    """The answer that tells of `error`."""
    return Json(error_body(error), status_code=api_error(error).code)
