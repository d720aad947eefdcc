"""Text to tokens and back."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..engine.vocab import Vocab
from .documenting import Shapes, json_body
from .errors import bad_request
from .limits import read_body
from .responses import Json
from .state import ServerState


def router(state: ServerState) -> APIRouter:
    """POST /tokenize and /detokenize."""
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", summary="Text to tokens", openapi_extra=json_body(_TOKENIZE))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, state.options)
        return Json(await asyncio.to_thread(_tokenize, state.engine.core.model.vocab, body))

    @routes.post("/detokenize", summary="Tokens to text", openapi_extra=json_body(_DETOKENIZE))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, state.options)
        return Json(await asyncio.to_thread(_detokenize, state.engine.core.model.vocab, body))

    return routes


_TOKENIZE: Final[Shapes] = {
    "content": {"description": "text, or a list of texts and token ids"},
    "add_special": {"type": "boolean", "default": False},
    "parse_special": {"type": "boolean", "default": True},
    "with_pieces": {"type": "boolean", "default": False},
}
_DETOKENIZE: Final[Shapes] = {"tokens": {"type": "array", "items": {"type": "integer"}}}


def tokenize_mixed(vocab: Vocab, content: Any, *, add_special: bool, parse_special: bool = True) -> list[int]:
    """Token ids of a text, or of a list of texts and ids; special tokens are added to the first text only.

    Raises ApiError for anything else, and for ids outside the vocabulary.
    """
    if isinstance(content, str):
        tokens = vocab.tokenize(content, add_bos=add_special, parse_special=parse_special)
        return [int(token) for token in tokens]
    if not isinstance(content, list):
        raise bad_request("the text must be a string, or a list of strings and token ids")
    found: list[int] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            add = add_special and i == 0
            found += vocab.tokenize(part, add_bos=add, parse_special=parse_special).tolist()
        else:
            found.append(checked_token(vocab, part))
    return found


def checked_token(vocab: Vocab, token: object) -> int:
    """`token` as an id of the vocabulary. Raises ApiError."""
    if isinstance(token, float) and token.is_integer():
        token = int(token)
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab.n_tokens:
        raise bad_request(f"token ids must be whole numbers from 0 to {vocab.n_tokens - 1}")
    return token


def _tokenize(vocab: Vocab, body: dict[str, Any]) -> dict[str, object]:
    content = body.get("content")
    if content is None:
        return {"tokens": []}
    tokens = tokenize_mixed(
        vocab,
        content,
        add_special=body.get("add_special") is True,
        parse_special=body.get("parse_special") is not False,
    )
    if body.get("with_pieces") is not True:
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _shown(vocab.piece(token))} for token in tokens]}


def _shown(piece: bytes) -> str | list[int]:
    """Text, or the bytes of a piece that is part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _detokenize(vocab: Vocab, body: dict[str, Any]) -> dict[str, object]:
    tokens = body.get("tokens", [])
    if not isinstance(tokens, list):
        raise bad_request("'tokens' must be a list of token ids")
    data = vocab.detokenize([checked_token(vocab, token) for token in tokens])
    return {"content": data.decode("utf-8", "replace")}
