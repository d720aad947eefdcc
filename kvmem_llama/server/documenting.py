"""How the bodies of requests are described in OpenAPI, where a route reads its body itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Shapes: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of fields by name."""


def json_body(properties: Shapes, required: Sequence[str] = ()) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a JSON object; fields that are not named are ignored."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: dict(shape) for name, shape in properties.items()},
        "additionalProperties": True,
    }
    if required:
        schema["required"] = list(required)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
