"""The message of an answer: while its text comes, at its end, and where it has not the right form."""

from __future__ import annotations

import json

import pytest
from families import ARGUMENTS, FAMILIES, FOLDER, THOUGHT, TOOLS

from kvmem_llama.engine.answer_parser import MessageDelta, ParsedMessage
from kvmem_llama.engine.message_reader import MessageReader
from kvmem_llama.engine.templates import CONTENT_ONLY, AppliedTemplate, ChatTemplates, TemplateOptions

QUESTION = {"role": "user", "content": "What will the weather be?"}
HERMES = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"

needs_templates = pytest.mark.skipif(not FOLDER.is_dir(), reason="llama.cpp's source is not here")


def applied(name: str) -> AppliedTemplate:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    with ChatTemplates(None, source, bos_token="<s>", eos_token="</s>") as templates:
        return templates.apply([QUESTION], TemplateOptions(tools=TOOLS))


def added(deltas: list[MessageDelta]) -> tuple[str, str, str]:
    """(content, reasoning, arguments of all calls)."""
    calls = [delta.tool_call for delta in deltas if delta.tool_call]
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning_content for delta in deltas),
        "".join(call.arguments for call in calls),
    )


@needs_templates
@pytest.mark.parametrize("name", FAMILIES)
def test_the_deltas_add_up_to_the_message(name: str) -> None:
    template, answer = applied(name), FAMILIES[name].answer
    reader = MessageReader(template)
    deltas = [delta for character in answer for delta in reader.push(character)]
    deltas += reader.finish(answer)
    message = reader.message(answer)
    (call,) = message.tool_calls
    assert added(deltas) == (message.content, message.reasoning_content, call.arguments)
    assert json.loads(call.arguments) == ARGUMENTS
    assert [d.tool_call.id for d in deltas if d.tool_call and d.tool_call.id] == [call.id]
    assert reader.message(answer) is message  # it stays what it is: ids are made up once
    whole = MessageReader(template).message(answer)  # nobody read the pieces
    assert (whole.content, whole.reasoning_content) == (message.content, message.reasoning_content)
    assert [c.arguments for c in whole.tool_calls] == [call.arguments]


@needs_templates
def test_an_answer_without_the_right_form_is_content() -> None:
    broken = 'I look. <tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call> and more'
    reader = MessageReader(applied(HERMES))
    deltas = [delta for character in broken for delta in reader.push(character)]
    deltas += reader.finish(broken)
    assert reader.message(broken) == ParsedMessage(broken, "", ())
    content, _, _ = added(deltas)
    assert not any(delta.tool_call for delta in deltas) and content == broken


@needs_templates
def test_what_a_slow_reader_has_lost_is_in_the_message() -> None:
    answer = FAMILIES["Qwen-Qwen3-0.6B"].answer
    reader = MessageReader(applied("Qwen-Qwen3-0.6B"))
    reader.push(answer[:10])
    reader.push(answer[30:40])
    assert reader.finish(answer) == []
    message = reader.message(answer)
    assert message.reasoning_content.strip() == THOUGHT and len(message.tool_calls) == 1


def test_without_a_template_all_is_content() -> None:
    reader = MessageReader(CONTENT_ONLY)
    deltas = [delta for piece in ("<think>a", "", "</think>", " b") for delta in reader.push(piece)]
    assert deltas == [MessageDelta("<think>a"), MessageDelta("</think>"), MessageDelta(" b")]
    assert reader.finish("<think>a</think> b and the rest") == [MessageDelta(" and the rest")]
    assert MessageReader(CONTENT_ONLY).message("") == ParsedMessage("", "", ())
