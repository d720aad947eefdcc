"""A request to OpenAI's Responses API as a chat completion (tools/server/server-chat.cpp has the rules)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from . import fields
from .errors import bad_request

_ROLES: Final = ("user", "system", "developer")


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion. Raises ApiError (400)."""
    if "input" not in body:
        raise bad_request("'input' is required")
    if fields.text(body, "previous_response_id"):
        raise bad_request("llama.cpp does not support 'previous_response_id'.")
    chat = {name: value for name, value in body.items() if name not in ("input", "instructions")}
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": fields.text(body, "instructions")})
    wanted = body["input"]
    if isinstance(wanted, str):
        messages.append({"role": "user", "content": wanted})
    elif isinstance(wanted, list):
        for item in wanted:
            _add_item(messages, item)
    else:
        raise bad_request("'input' must be a string or array of objects")
    chat["messages"] = messages

    if "tools" in body:
        if not isinstance(body["tools"], list):
            raise bad_request("'tools' must be an array of objects")
        del chat["tools"]
        tools = [
            _tool(tool)
            for tool in body["tools"]
            if isinstance(tool, dict) and fields.kind(tool) == "function"
        ]
        if tools:
            chat["tools"] = tools
    if "max_output_tokens" in body:
        chat["max_tokens"] = chat.pop("max_output_tokens")
    reasoning = chat.pop("reasoning", None)
    if isinstance(reasoning, dict) and "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Adds one item of the input; what an assistant says in several items is one message."""
    if not isinstance(item, dict):
        raise bad_request("Cannot determine type of 'item'")
    kind, role, content = fields.kind(item), item.get("role"), item.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    answer = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if isinstance(content, list) and isinstance(role, str) and role in _ROLES:
        kept = {name: value for name, value in item.items() if name not in ("type", "status")}
        messages.append(kept | {"content": [_input_part(part) for part in content]})
    elif role == "assistant" and kind == "message":
        parts = [_output_part(part) for part in (content if isinstance(content, list) else [])]
        if answer is None:
            kept = {name: value for name, value in item.items() if name not in ("type", "status")}
            messages.append(kept | {"content": parts})
        else:
            before = answer.get("content")
            answer["content"] = [*(before if isinstance(before, list) else []), *parts]
    elif kind == "function_call" and _has_texts(item, "arguments", "call_id", "name"):
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if answer is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            answer["tool_calls"] = [*fields.items(answer, "tool_calls"), call]
    elif kind == "function_call_output" and _has_texts(item, "call_id") and _has_output(item):
        output = item["output"]
        found = output if isinstance(output, str) else [_tool_part(part) for part in output]
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": found})
    elif kind == "reasoning" and isinstance(item.get("summary"), list):
        text = _reasoning(item)
        if answer is None:
            messages.append({"role": "assistant", "content": [], "reasoning_content": text})
        else:
            answer["reasoning_content"] = text
    else:
        raise bad_request("Cannot determine type of 'item'")


def _input_part(part: Any) -> dict[str, Any]:
    kind = fields.kind(part)
    if kind == "input_text":
        if "text" not in part:
            raise bad_request("'Input text' requires 'text'")
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        return _image(part)
    if kind == "input_file":
        raise bad_request("'input_file' is not supported by llamacpp at this moment")
    raise bad_request("'type' must be one of 'input_text', 'input_image', or 'input_file'")


def _output_part(part: Any) -> dict[str, Any]:
    kind = fields.kind(part)
    if kind in ("output_text", "input_text"):
        if not _has_texts(part, "text"):
            raise bad_request("'Output text' requires 'text'")
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        if not _has_texts(part, "refusal"):
            raise bad_request("'Refusal' requires 'refusal'")
        return {"type": "refusal", "refusal": part["refusal"]}
    raise bad_request("'type' must be one of 'output_text' or 'refusal'")


def _tool_part(part: Any) -> dict[str, Any]:
    kind = fields.kind(part)
    if not kind:
        raise bad_request("Output of tool call missing 'type' field")
    if kind == "input_text":
        return {**part, "type": "text"}
    if kind == "input_image":
        return _image(part)
    raise bad_request("Output of tool call should be 'Input text' or 'Input image'")


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    if "image_url" not in part:
        raise bad_request("'image_url' is required")
    return {"type": "image_url", "image_url": {"url": part["image_url"]}}


def _reasoning(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    if not isinstance(content, list):
        raise bad_request("item['content'] is not an array")
    if not content:
        raise bad_request("item['content'] is empty")
    if not isinstance(content[0], dict) or not _has_texts(content[0], "text"):
        raise bad_request("item['content']['text'] is not a string")
    text: str = content[0]["text"]
    return text


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": {"strict": True} | function}


def _has_texts(item: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(item.get(name), str) for name in names)


def _has_output(item: Mapping[str, Any]) -> bool:
    return isinstance(item.get("output"), (str, list))
