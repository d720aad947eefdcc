"""A request to Anthropic's Messages API as a chat completion (tools/server/server-chat.cpp has the rules)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from . import fields
from .errors import bad_request

MAX_TOKENS: Final = 4096
"""Of a request that does not say how many."""

# Claude Code puts a stamp into the head of its system prompt that differs in every request; with it no two
# prompts would have a beginning in common.
_STAMP: Final = re.compile(r"\A(x-anthropic-billing-header:.*?cch=)[^;]{5}(?=;)", re.DOTALL)
_PASSED_ON: Final = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "kvmem", "id_slot")


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion. Raises ApiError (400)."""
    if "messages" not in body:
        raise bad_request("'messages' is required")
    if not isinstance(body["messages"], list):
        raise bad_request("Expected 'messages' to be an array")
    chat: dict[str, Any] = {"messages": _system(body)}
    for message in body["messages"]:
        if not isinstance(message, dict):
            raise bad_request("Expected 'messages' to be an array of objects")
        chat["messages"] += _messages(message)
    if isinstance(body.get("tools"), list):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = fields.text(fields.mapping(body, "tool_choice"), "type")
    if choice:
        chosen = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
        if choice in chosen:
            chat["tool_choice"] = chosen[choice]
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    chat["max_tokens"] = body["max_tokens"] if body.get("max_tokens") is not None else MAX_TOKENS
    chat |= {name: body[name] for name in _PASSED_ON if name in body}
    thinking = fields.mapping(body, "thinking")
    if fields.text(thinking, "type") == "enabled":
        chat["thinking_budget_tokens"] = fields.whole(thinking, "budget_tokens", 10000)
    return chat


def _system(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = body.get("system")
    if system is None:
        return []
    if isinstance(system, str):
        texts = [system]
    else:
        blocks = system if isinstance(system, list) else []
        texts = [fields.text(block, "text") for block in blocks if fields.kind(block) == "text"]
    return [{"role": "system", "content": "".join(_STAMP.sub(r"\1fffff", text) for text in texts)}]


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """One message as those of a chat: results of tools are messages of their own, after the rest."""
    role = fields.text(message, "role")
    if "content" not in message:
        return [] if role == "assistant" else [message]
    content = message["content"]
    if not isinstance(content, list):
        return [message]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning = ""
    for block in content:
        kind = fields.kind(block)
        if kind == "text":
            parts.append(block)
        elif kind == "thinking":
            reasoning += fields.text(block, "thinking")
        elif kind == "image":
            parts += _image(block)
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            results.append(_result(block))
    if not (parts or calls or reasoning):
        return results
    whole: dict[str, Any] = {"role": role, "content": parts or ""}
    if calls:
        whole["tool_calls"] = calls
    if reasoning:
        whole["reasoning_content"] = reasoning
    return [whole, *results]


def _image(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    source = fields.mapping(block, "source")
    kind = fields.text(source, "type")
    if kind == "base64":
        url = f"data:{fields.text(source, 'media_type', 'image/jpeg')};base64,{fields.text(source, 'data')}"
    elif kind == "url":
        url = fields.text(source, "url")
    else:
        return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, separators=(",", ":"))
    function = {"name": fields.text(block, "name"), "arguments": text}
    return {"id": fields.text(block, "id"), "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    found: str | list[dict[str, Any]] = content if isinstance(content, str) else ""
    if isinstance(content, list):
        parts: list[dict[str, Any]] = []
        for part in content:
            if fields.kind(part) == "text":
                parts.append({"type": "text", "text": fields.text(part, "text")})
            elif fields.kind(part) == "image":
                parts += _image(part)
        has_images = any(part["type"] != "text" for part in parts)
        found = parts if has_images else "".join(part["text"] for part in parts)
    return {"role": "tool", "tool_call_id": fields.text(block, "tool_use_id"), "content": found}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise bad_request("'tools' must be an array of objects")
    schema = tool.get("input_schema")
    function = {
        "name": fields.text(tool, "name"),
        "description": fields.text(tool, "description"),
        "parameters": {} if schema is None else schema,
    }
    return {"type": "function", "function": function}
