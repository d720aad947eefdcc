"""What a request may be: how large, how deep, how long; and JSON that is JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request

from .errors import ApiError, bad_request
from .flags import ServerOptions

log: Final = logging.getLogger("kvmem.server")

_LONG: Final = 65536  # bytes of a body that takes its time to be read
_MAX_DIGITS: Final = 400  # of a whole number; more is no number anybody means
_MAX_INTEGER: Final = 2**64 - 1  # beyond these llama-server reads a float, too
_MIN_INTEGER: Final = -(2**63)


async def read_body(request: Request, options: ServerOptions) -> dict[str, Any]:
    """The JSON object that a request holds. Raises ApiError: 400, or 413 for a body that is too large."""
    data = await read_bytes(request, options)
    if options.log_prompts:
        log.info("%s: %s", request.url.path, data.decode("utf-8", "backslashreplace"))
    if len(data) < _LONG:
        body = parse_json(data, options)
    else:  # meanwhile others are answered
        body = await asyncio.to_thread(parse_json, data, options)
    if not isinstance(body, dict):
        raise bad_request("the body of the request must be a JSON object")
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > options.max_messages:
        raise bad_request(f"Field 'messages': {len(messages)} messages, {options.max_messages} are allowed")
    return body


async def read_bytes(request: Request, options: ServerOptions) -> bytes:
    """The body of a request. Raises ApiError (413) as soon as it is too large."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > options.max_body:
        raise _too_large(options)
    parts, n = [], 0
    async for part in _parts(request):
        n += len(part)
        if n > options.max_body:
            raise _too_large(options)
        parts.append(part)
    return b"".join(parts)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect:
        raise bad_request("the request ended before its body did") from None


def parse_json(data: bytes, options: ServerOptions) -> Any:
    """The value that `data` is. Raises ApiError (400) for anything that is not JSON of a sane depth.

    Unlike Python's own reader it takes no NaN, no infinity, no number beyond the range of float64, no half
    characters. Whole numbers outside of 64 bits become floats.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(
            text.removeprefix("\ufeff"),
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_real,
        )
    except RecursionError:
        raise _too_deep(options) from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    _check_depth(value, options, halves="\\ud" in text or "\\uD" in text)
    return value


def _too_large(options: ServerOptions) -> ApiError:
    return ApiError(413, f"the body is too large: {options.max_body} bytes are allowed")


def _too_deep(options: ServerOptions) -> ApiError:
    return bad_request(f"the JSON is nested too deeply: {options.max_json_depth} levels are allowed")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _integer(text: str) -> int | float:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large")
    number = int(text)
    return number if _MIN_INTEGER <= number <= _MAX_INTEGER else _real(text)


def _real(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text:.40} is too large")
    return number


def _check_depth(value: Any, options: ServerOptions, *, halves: bool) -> None:
    """halves: the text may hold half characters (surrogates), which are looked for."""
    level: list[Any] = [value]
    for _ in range(options.max_json_depth):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
                if halves:
                    below += item.keys()
            elif isinstance(item, list):
                below += item
            elif halves and isinstance(item, str) and not _is_whole(item):
                raise bad_request("the body is not JSON: it holds half of a surrogate pair")
        if not below:
            return
        level = below
    if any(isinstance(item, (dict, list)) for item in level):
        raise _too_deep(options)


def _is_whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
