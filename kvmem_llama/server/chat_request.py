"""From the body of a chat completion to messages, and what is asked of the answer to them.

The rules, and the messages of errors, are those of llama-server (tools/server/server-common.cpp); where it
answers 500 to what is wrong with a request, this answers 400.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..engine.templates import AppliedTemplate, TemplateOptions
from . import fields
from .errors import bad_request
from .flags import ServerOptions
from .schema import schema_grammar
from .state import ServerState

_MEDIA: Final = {
    "image_url": "image",
    "input_audio": "audio",
    "input_video": "video",
    "video_url": "video",
}
_TOP_LOGPROBS: Final = 20


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion; what it says of sampling and stop strings is in its body, as in a completion's."""

    messages: tuple[dict[str, Any], ...]
    options: TemplateOptions
    n_probs: int | None  # None: as the body says

    def apply(self, state: ServerState) -> AppliedTemplate:
        """The prompt. Raises InvalidRequest or TemplateUnsupported."""
        return state.template.apply(self.messages, self.options)


def chat_request(body: Mapping[str, Any], state: ServerState) -> ChatRequest:
    """What `body` asks for. Raises ApiError (400) for what cannot be."""
    options, jinja = state.options, state.settings.jinja
    tools = body.get("tools")
    tools = [] if tools is None else tools
    if not isinstance(tools, list):
        raise bad_request("'tools' must be an array")
    tool_choice = body.get("tool_choice")
    if not isinstance(tool_choice, (str, dict)):
        tool_choice = "auto"
    if not jinja and tools:
        raise bad_request("tools param requires --jinja flag")
    if not jinja and tool_choice != "auto":
        raise bad_request("tool_choice param requires --jinja flag")

    json_schema, grammar = _schema(body), fields.text(body, "grammar")
    if not jinja and json_schema is not None:  # an answer of nothing else, with no room before it
        json_schema, grammar = None, schema_grammar(json_schema)
    messages = _messages(body)
    continued = _continued(body, messages, options)
    if tools and tool_choice != "none" and body.get("grammar") is not None:
        raise bad_request("Cannot use custom grammar constraints with tools.")
    kwargs, thinking = _template_kwargs(body, state)
    parallel = body.get("parallel_tool_calls")
    return ChatRequest(
        messages=tuple(messages),
        options=TemplateOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel if isinstance(parallel, bool) else None,
            json_schema=json_schema,
            grammar=grammar,
            add_generation_prompt=False if continued else fields.flag(body, "add_generation_prompt", True),
            continue_final_message=continued,
            reasoning_format=_reasoning_format(body, options),
            enable_thinking=thinking,
            template_kwargs=kwargs,
            force_pure_content=options.skip_chat_parsing,
            reasoning_budget=_reasoning_budget(body, options),
            reasoning_budget_message=fields.text(
                body, "reasoning_budget_message", options.reasoning_budget_message
            ),
        ),
        n_probs=_n_probs(body, has_tools=bool(tools)),
    )


def _schema(body: Mapping[str, Any]) -> Any:
    schema = body.get("json_schema")
    if schema is not None and fields.text(body, "grammar"):
        raise bad_request("Cannot use both json_schema and grammar")
    wanted = fields.mapping(body, "response_format")
    kind = fields.text(wanted, "type")
    if kind == "json_object":
        if "schema" in wanted or schema is None:
            schema = _given(wanted)
    elif kind == "json_schema":
        schema = _given(fields.mapping(wanted, "json_schema"))
    elif kind and kind != "text":
        raise bad_request(
            f'response_format type must be one of "text" or "json_object", but got: {kind:.100}'
        )
    return schema


def _given(wanted: Mapping[str, Any]) -> Any:
    """Its `schema`, whatever it is: what is none is refused where it is read."""
    schema = wanted.get("schema")
    return {} if schema is None else schema


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "messages" not in body:
        raise bad_request("'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise bad_request("Expected 'messages' to be an array")
    for message in messages:
        if not isinstance(message, dict):
            raise bad_request("Expected 'messages' to be an array of objects")
        is_assistant = message.get("role") == "assistant"
        if "content" not in message:
            if not is_assistant:
                raise bad_request("All non-assistant messages must contain 'content'")
            if "tool_calls" not in message:
                raise bad_request("Assistant message must contain either 'content' or 'tool_calls'!")
            continue
        content = message["content"]
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise bad_request("Expected 'content' to be a string or an array")
        _check_parts(content)
    return messages


def _check_parts(parts: Sequence[Any]) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise bad_request(f"{_MEDIA[kind]} input is not supported")
        if kind != "text":
            raise bad_request("unsupported content[].type")


def _continued(
    body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], options: ServerOptions
) -> bool | str:
    """How the last message goes on, as TemplateOptions.continue_final_message."""
    wanted = body.get("continue_final_message")
    continued: bool | str = wanted is True or (
        wanted if wanted in ("content", "reasoning_content") else False
    )
    is_assistant = bool(messages) and messages[-1].get("role") == "assistant"
    adds_prompt = fields.flag(body, "add_generation_prompt", True)
    if not continued and options.prefill_assistant and is_assistant:
        if len(messages) > 1 and messages[-2].get("role") == "assistant":
            raise bad_request("Cannot have 2 or more assistant messages at the end of the list.")
        continued, adds_prompt = True, False
    if continued and adds_prompt:
        raise bad_request("Cannot set both add_generation_prompt and continue_final_message to true.")
    if continued and is_assistant and messages[-1].get("tool_calls"):
        raise bad_request("Cannot continue an assistant message that contains tool calls.")
    return continued


def _template_kwargs(body: Mapping[str, Any], state: ServerState) -> tuple[dict[str, object], bool]:
    """Variables of the template, and whether the model may reason."""
    kwargs = state.template_kwargs | fields.mapping(body, "chat_template_kwargs")
    thinking = kwargs.get("enable_thinking", True)
    if isinstance(thinking, str):
        raise bad_request('invalid type for "enable_thinking" (expected boolean, got string)')
    effort = fields.text(body, "reasoning_effort")
    if effort == "none":
        kwargs.pop("reasoning_effort", None)
        kwargs.pop("enable_thinking", None)  # what the request says of its effort goes first
        return kwargs, False
    if effort:
        kwargs["reasoning_effort"] = effort
    if not isinstance(thinking, bool):  # any other value leaves the default
        kwargs.pop("enable_thinking", None)
        thinking = True
    return kwargs, thinking


def _reasoning_format(body: Mapping[str, Any], options: ServerOptions) -> str:
    if body.get("reasoning_format") is None:
        return options.reasoning_format
    wanted = body["reasoning_format"]
    if not isinstance(wanted, str):
        raise bad_request("Field 'reasoning_format': must be a string")
    return wanted


def _reasoning_budget(body: Mapping[str, Any], options: ServerOptions) -> int:
    budget = fields.whole(body, "reasoning_budget_tokens", fields.whole(body, "thinking_budget_tokens", -1))
    return max(options.reasoning_budget if budget == -1 else budget, -1)


def _n_probs(body: Mapping[str, Any], *, has_tools: bool) -> int | None:
    if fields.flag(body, "logprobs"):
        if has_tools and fields.flag(body, "stream"):
            raise bad_request("logprobs is not supported with tools + stream")
        return fields.whole(body, "top_logprobs", _TOP_LOGPROBS)
    if body.get("top_logprobs") is not None:
        raise bad_request("top_logprobs requires logprobs to be set to true")
    return None
