"""What the server tells about itself: model, properties, slots, metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ..engine.sampling_params import SamplingParams
from . import metrics
from .documenting import json_body
from .errors import ApiError, not_supported
from .facts import BUILD_INFO, ModelFacts
from .generation_settings import generation_settings
from .limits import read_body
from .responses import Json
from .state import ServerState


def router(state: ServerState) -> APIRouter:
    """GET /models, /props, /slots, /metrics and their aliases; POST /props."""
    routes = APIRouter(tags=["server"])
    media_marker: Final = f"<__media_{secrets.token_hex(16)}__>"  # nothing is ever put in its place

    @routes.get("/v1/models", summary="The model")
    @routes.get("/models", include_in_schema=False)
    async def get_models() -> Response:
        return Json(models(state.facts))

    @routes.get("/props", summary="Properties of the server and its model")
    async def get_props() -> Response:
        return Json(await asyncio.to_thread(props, state, media_marker))

    @routes.post("/props", summary="There are no properties to be changed", openapi_extra=json_body({}))
    async def post_props(request: Request) -> Response:
        if not state.options.props:
            raise not_supported(
                "This server does not support changing global properties. Start it with `--props`"
            )
        await read_body(request, state.options)
        return Json({"success": True})

    @routes.get("/slots", summary="What the slots do")
    async def get_slots(fail_on_no_slot: str = Query("", description="503 if no slot is idle")) -> Response:
        if not state.options.slots:
            raise not_supported("This server does not support slots endpoint. Start it with `--slots`")
        if fail_on_no_slot and state.slots.n_idle == 0:
            raise ApiError(503, "no slot available")
        return Json(await asyncio.to_thread(state.slots.describe))

    @routes.get("/metrics", summary="Counts, in Prometheus' text format")
    async def get_metrics() -> Response:
        if not state.options.metrics:
            raise not_supported("This server does not support metrics endpoint. Start it with `--metrics`")
        text = await asyncio.to_thread(state.metrics.text)
        headers = {"Process-Start-Time-Unix": str(state.metrics.started)}
        # The type is given as a header: Starlette would add a charset to it.
        return Response(text, headers=headers | {"content-type": metrics.CONTENT_TYPE})

    return routes


def models(facts: ModelFacts) -> dict[str, Any]:
    """OpenAI's list of models, with a second one beside it that clients of other servers look for."""
    names = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), "")
    return {
        "models": [
            {
                "name": facts.name,
                "model": facts.name,
                "modified_at": "",
                "size": "",
                "digest": "",
                "type": "model",
                "description": "",
                "tags": [""],
                "capabilities": ["completion"],
                "parameters": "",
                "details": names | {"format": "gguf", "families": [""]},
            }
        ],
        "object": "list",
        "data": [model_info(facts)],
    }


def model_info(facts: ModelFacts) -> dict[str, Any]:
    """The model as an element of OpenAI's list."""
    return {
        "id": facts.name,
        "aliases": list(facts.aliases),
        "tags": list(facts.tags),
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": facts.vocab_type,
            "n_vocab": facts.n_vocab,
            "n_ctx": facts.n_ctx,
            "n_ctx_train": facts.n_ctx_train,
            "n_embd": facts.n_embd,
            "n_params": facts.n_params,
            "size": facts.size,
            "ftype": facts.ftype,
        },
    }


def props(state: ServerState, media_marker: str) -> dict[str, Any]:
    """What GET /props answers."""
    facts, options, settings, templates = state.facts, state.options, state.settings, state.templates
    defaults = generation_settings(SamplingParams.of(settings, facts.n_ctx), n_predict=settings.n_predict)
    found: dict[str, Any] = {
        "default_generation_settings": {"params": defaults, "n_ctx": facts.n_ctx},
        "total_slots": settings.n_parallel,
        "model_alias": facts.name,
        "model_ftype": facts.ftype,
        "model_path": facts.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": media_marker,
        "endpoint_slots": options.slots,
        "endpoint_props": options.props,
        "endpoint_metrics": options.metrics,
        "ui": options.ui,
        "ui_settings": {},
        "chat_template": "" if state.template.is_plain else templates.source,
        "chat_template_caps": dict(templates.caps),
        "bos_token": facts.bos_token,
        "eos_token": facts.eos_token,
        "build_info": BUILD_INFO,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }
    if settings.jinja and templates.tool_use_source:
        found["chat_template_tool_use"] = templates.tool_use_source
    return found
