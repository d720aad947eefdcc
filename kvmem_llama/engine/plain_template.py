"""Messages as plain text, for a model that has no chat template: `User: ...`, `Assistant: ...`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import InvalidRequest, TemplateUnsupported
from .grammar import AnswerGrammar
from .templates import AppliedTemplate, TemplateOptions, json_schema_to_grammar

_SPEAKERS: Final = {"system": "", "developer": "", "user": "User: ", "assistant": "Assistant: "}
_STOPS: Final = ("\nUser:",)
_HINT: Final = "Name a chat template: --chat-template, --chat-template-file."


def apply(messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> AppliedTemplate:
    """See ChatTemplates.apply. Raises InvalidRequest, or TemplateUnsupported where tools are asked for."""
    if not messages:
        raise InvalidRequest("there are no messages", hint="Give at least one.")
    if options.tools or any(message.get("tool_calls") for message in messages):
        raise TemplateUnsupported("the model has none, so it knows no tools", hint=_HINT)
    if options.grammar and options.json_schema is not None:
        raise InvalidRequest("'json_schema' and 'grammar' cannot be used together", hint="Give one of them.")
    *before, last = [_paragraph(message) for message in messages]
    continues = bool(options.continue_final_message)
    if continues and messages[-1].get("role") != "assistant":
        raise InvalidRequest("the last message must be an assistant's to be continued", hint="Add one.")
    prompt = "".join(f"{text}\n\n" for text in before) + (last if continues else f"{last}\n\n")
    if not continues and options.add_generation_prompt is not False:
        prompt += "Assistant:"  # without the space: it is part of the answer's first token
    grammar = options.grammar
    if options.json_schema is not None:
        grammar = json_schema_to_grammar(options.json_schema or {"type": "object"})
    return AppliedTemplate(
        prompt,
        grammar=AnswerGrammar(grammar) if grammar else None,
        additional_stops=_STOPS,
        is_continuation=continues,
    )


def _paragraph(message: Mapping[str, Any]) -> str:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidRequest("a message has no role", hint='Give {"role": ..., "content": ...}.')
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content)
    return f"{_SPEAKERS.get(role, f'{role.capitalize()}: ')}{content or ''}"
