"""Routes of llama-server for what this server does not do, with the answers that its clients know."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from .errors import bad_request, not_supported
from .limits import parse_json, read_bytes
from .responses import Json
from .state import ServerState

_EMBEDDINGS: Final = ("/v1/embeddings", "/embeddings", "/embedding")
_RERANK: Final = ("/v1/rerank", "/rerank", "/reranking", "/v1/reranking")
_AUDIO: Final = ("/v1/audio/transcriptions", "/audio/transcriptions")
_DISABLED: Final = {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}


def router(state: ServerState) -> APIRouter:
    """Embeddings, reranking and sound (501); tools and proxy of the web UI (403); no LoRA adapters."""
    routes = APIRouter(tags=["not supported"])

    # The texts are llama-server's, whose clients may know them; that these flags change nothing here is
    # told when the server is started with them.
    async def embeddings() -> Response:
        raise not_supported("This server does not support embeddings. Start it with `--embeddings`")

    async def rerank() -> Response:
        raise not_supported("This server does not support reranking. Start it with `--reranking`")

    async def transcribe() -> Response:
        raise not_supported("The current model does not support audio input.")

    async def disabled() -> Response:
        return Json(_DISABLED, status_code=403)

    for paths, answer in ((_EMBEDDINGS, embeddings), (_RERANK, rerank), (_AUDIO, transcribe)):
        for path in paths:
            routes.add_api_route(
                path, answer, methods=["POST"], include_in_schema=path == paths[0],
                summary="Answers 501", operation_id=path.strip("/").replace("/", "_"),
            )  # fmt: skip
    for path in ("/tools", "/cors-proxy"):
        routes.add_api_route(path, disabled, methods=["GET", "POST"], include_in_schema=False)

    @routes.get("/lora-adapters", summary="There are no LoRA adapters")
    async def get_lora() -> Response:
        return Json([])

    @routes.post("/lora-adapters", include_in_schema=False)
    async def post_lora(request: Request) -> Response:
        if not isinstance(parse_json(await read_bytes(request, state.options), state.options), list):
            raise bad_request("Request body must be an array")
        return Json({"success": True})

    return routes
