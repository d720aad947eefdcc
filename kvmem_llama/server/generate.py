"""The routes that generate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.sampling_params import SamplingParams
from ..native.layout import I32
from . import from_anthropic, from_responses
from .asked import WORKSPACE_HEADER, ChatPrompt, Constraints, MemoryRequest, Prompt, TextPrompt
from .chat_request import chat_request
from .documenting import json_body
from .formats.answer import Format
from .formats.anthropic import Anthropic
from .formats.completion import Completion
from .formats.oai_chat import OaiChat
from .formats.oai_completion import OaiCompletion
from .formats.responses import Responses
from .infill import infill_prompt
from .limits import read_body
from .prompts import read_prompts
from .responding import Asked, respond
from .schema import FIELDS, Field, Generation, read_generation
from .slot_files import router as slot_router
from .slots import SlotPool
from .state import ServerState

Body = Mapping[str, Any]
Make = Callable[[Body, MemoryRequest], Asked]

_N_BATCH: Final = 2048  # tokens of prefix and suffix in an infill prompt, llama-server's default batch


def router(state: ServerState) -> APIRouter:
    """POST /completion(s), /infill, and those of OpenAI's and Anthropic's APIs."""
    routes = APIRouter(tags=["generate"])

    async def answer(request: Request, make: Make) -> Response:
        body = await read_body(request, state.options)
        memory = MemoryRequest.of(body, request.headers.get(WORKSPACE_HEADER), request.state.owner)
        asked = await asyncio.to_thread(make, body, memory)
        return await respond(state, pool_of(state), request, asked)

    @routes.post("/completion", summary="llama-server's own completion", openapi_extra=_body(_PROMPT))
    @routes.post("/completions", include_in_schema=False)
    async def completion(request: Request) -> Response:
        return await answer(request, lambda body, memory: completion_of(state, body, memory, Completion()))

    @routes.post("/v1/completions", summary="OpenAI's text completion", openapi_extra=_body(_PROMPT))
    async def oai_completion(request: Request) -> Response:
        return await answer(request, lambda body, memory: completion_of(state, body, memory, OaiCompletion()))

    @routes.post("/infill", summary="What stands between two texts", openapi_extra=_body(_INFILL))
    async def infill(request: Request) -> Response:
        return await answer(request, lambda body, memory: infill_of(state, body, memory))

    @routes.post("/v1/chat/completions", summary="OpenAI's chat completion", openapi_extra=_body(_CHAT))
    @routes.post("/chat/completions", include_in_schema=False)
    async def chat(request: Request) -> Response:
        return await answer(request, lambda body, memory: chat_of(state, body, memory, OaiChat()))

    @routes.post("/v1/responses", summary="OpenAI's Responses", openapi_extra=_body(_RESPONSES))
    @routes.post("/responses", include_in_schema=False)
    async def responses(request: Request) -> Response:
        return await answer(
            request,
            lambda body, memory: chat_of(state, from_responses.to_chat(body), memory, Responses()),
        )

    @routes.post("/v1/messages", summary="Anthropic's messages", openapi_extra=_body(_CHAT))
    async def messages(request: Request) -> Response:
        return await answer(
            request,
            lambda body, memory: chat_of(state, from_anthropic.to_chat(body), memory, Anthropic()),
        )

    routes.include_router(slot_router(state, pool_of))
    return routes


def pool_of(state: ServerState) -> SlotPool:
    """The slots that `make_slots` has made. Raises ApiError (503) until the model is there."""
    slots = state.slots
    assert isinstance(slots, SlotPool)
    return slots


def make_slots(state: ServerState) -> SlotPool:
    """For ServerState."""
    return SlotPool(state)


# -- from bodies to what is asked


def completion_of(state: ServerState, body: Body, memory: MemoryRequest, form: Format) -> Asked:
    """A completion of a text. Raises ApiError (400)."""
    vocab = state.engine.core.model.vocab
    return _texts(state, body, read_prompts(body, vocab), memory, form)


def infill_of(state: ServerState, body: Body, memory: MemoryRequest) -> Asked:
    """Raises ApiError: 501 for a model that cannot, 400."""
    vocab = state.engine.core.model.vocab
    ids = infill_prompt(
        body, vocab, n_batch=_N_BATCH, n_predict=max(state.settings.n_predict, 0), n_ctx=state.facts.n_ctx
    )
    return _texts(state, body, [ids], memory, Completion())


def chat_of(state: ServerState, body: Body, memory: MemoryRequest, form: Format) -> Asked:
    """A chat completion. Raises ApiError (400), InvalidRequest or TemplateUnsupported."""
    chat, vocab = chat_request(body, state), state.engine.core.model.vocab
    generation = _generation(state, body, is_chat=True)
    if chat.n_probs is not None:
        generation = replace(generation, sampling=replace(generation.sampling, n_probs=max(chat.n_probs, 0)))
    is_explicit = bool(body.get("continue_final_message"))
    prompt = ChatPrompt(vocab, state.template, chat, is_explicit=is_explicit)
    constraints = Constraints.of(vocab, generation, chat, prompt)
    return Asked(generation, [(prompt, constraints)], memory, form, parses=True)


def _texts(
    state: ServerState, body: Body, prompts: Sequence[I32], memory: MemoryRequest, form: Format
) -> Asked:
    vocab, generation = state.engine.core.model.vocab, _generation(state, body)
    found: list[tuple[Prompt, Constraints]] = []
    for ids in prompts:
        prompt = TextPrompt(vocab, ids)
        found.append((prompt, Constraints.of(vocab, generation, None, prompt)))
    return Asked(generation, found, memory, form)


def _generation(state: ServerState, body: Body, *, is_chat: bool = False) -> Generation:
    settings, options = state.settings, state.options
    defaults = Generation(
        sampling=SamplingParams.of(settings, state.facts.n_ctx),
        cache_prompt=options.cache_prompt,
        verbose=settings.verbose,
        sse_ping_interval=options.sse_ping_interval,
        n_predict=settings.n_predict,
        # llama-server's own default is one of the names that mean the same
        reasoning_format="deepseek" if options.reasoning_format == "auto" else options.reasoning_format,
    )
    return read_generation(
        body,
        defaults,
        state.engine.core.model.vocab,
        n_parallel=state.engine.core.settings.n_parallel,
        is_chat=is_chat,
    )


# -- how bodies are described


def _shape(field: Field) -> dict[str, Any]:
    if field.kind == "bool":
        return {"type": "boolean"}
    shape: dict[str, Any] = {"type": "number" if field.kind == "float" else "integer"}
    if field.is_hard:
        shape |= {"minimum": field.low, "maximum": field.high}
    return shape


_FIELDS: Final = {name: _shape(field) for field in FIELDS for name in field.names if name != "logprobs"}
_PROMPT: Final[dict[str, Any]] = {
    "prompt": {"description": "text, token ids, a list of both, or a list of prompts"}
}
_INFILL: Final[dict[str, Any]] = {"input_prefix": {"type": "string"}, "input_suffix": {"type": "string"}}
_LIST: Final = {"type": "array", "items": {"type": "object"}}
_CHAT: Final[dict[str, Any]] = {"messages": _LIST}
_RESPONSES: Final[dict[str, Any]] = {"input": {"description": "text, or a list of items"}}
_MEMORY: Final = {
    "type": "object",
    "description": "which workspace it is answered in, and how it recalls",
    "properties": {
        "workspace": {"type": "string"},
        "recall": {"type": "object"},
        "report": {"type": "boolean"},
    },
}


def _body(required: Mapping[str, Any]) -> dict[str, Any]:
    stop = {"description": "a text, or a list of texts"}
    return json_body({**required, **_FIELDS, "stop": stop, "kvmem": _MEMORY}, list(required))
