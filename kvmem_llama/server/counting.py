"""Prompts that are rendered and counted, not answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from . import from_anthropic, from_responses
from .chat_request import chat_request
from .documenting import json_body
from .limits import read_body
from .responses import Json
from .state import ServerState
from .tokens import tokenize_mixed

Convert = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_MESSAGES: Final = {"type": "array", "items": {"type": "object"}}
_TOOLS: Final = {"type": "array", "items": {"type": "object"}}
_CHAT: Final = json_body({"messages": _MESSAGES, "tools": _TOOLS}, ["messages"])


def router(state: ServerState) -> APIRouter:
    """POST /apply-template, .../input_tokens and /v1/messages/count_tokens."""
    routes = APIRouter(tags=["tokens"])

    async def count(request: Request, convert: Convert) -> int:
        body = await read_body(request, state.options)
        return await asyncio.to_thread(n_prompt_tokens, state, body, convert)

    @routes.post("/apply-template", summary="The prompt that messages become", openapi_extra=_CHAT)
    async def apply_template(request: Request) -> Response:
        body = await read_body(request, state.options)
        return Json({"prompt": await asyncio.to_thread(prompt_of, state, body)})

    @routes.post("/v1/chat/completions/input_tokens", summary="Tokens of a chat", openapi_extra=_CHAT)
    @routes.post("/chat/completions/input_tokens", include_in_schema=False)
    async def chat_tokens(request: Request) -> Response:
        return _counted(await count(request, lambda body: body))

    @routes.post(
        "/v1/responses/input_tokens",
        summary="Tokens of a request to the Responses API",
        openapi_extra=json_body({"input": {}, "instructions": {"type": "string"}}, ["input"]),
    )
    @routes.post("/responses/input_tokens", include_in_schema=False)
    async def responses_tokens(request: Request) -> Response:
        return _counted(await count(request, from_responses.to_chat))

    @routes.post("/v1/messages/count_tokens", summary="Tokens of Anthropic's messages", openapi_extra=_CHAT)
    async def count_tokens(request: Request) -> Response:
        return Json({"input_tokens": await count(request, from_anthropic.to_chat)})

    return routes


def prompt_of(state: ServerState, body: Mapping[str, Any]) -> str:
    """The text of a chat completion's prompt. Raises ApiError, InvalidRequest or TemplateUnsupported."""
    return chat_request(body, state).apply(state).prompt


def n_prompt_tokens(state: ServerState, body: Mapping[str, Any], convert: Convert) -> int:
    """Tokens of the prompt of a request. Raises as `prompt_of`."""
    prompt = prompt_of(state, convert(body))
    return len(tokenize_mixed(state.engine.core.model.vocab, prompt, add_special=True))


def _counted(n: int) -> Response:
    return Json({"input_tokens": n, "object": "response.input_tokens"})
