"""Chat templates of many model families: prompts with tools, grammars, and answers read whole and in pieces.

The templates are those that lie in llama.cpp's source; what the models would write is in families.py.
"""

from __future__ import annotations

import json

import pytest
from fake_model import FakeVocab
from families import ARGUMENTS, ARGUMENTS_TEXT, CALL_TEXT, FAMILIES, FOLDER, THOUGHT, TOOLS
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvmem_llama.engine.answer_parser import AnswerParser, ParsedMessage, ToolCall
from kvmem_llama.engine.chat_template import ChatTemplate, Message
from kvmem_llama.engine.templates import (
    AppliedTemplate,
    ChatTemplates,
    TemplateOptions,
    json_schema_to_grammar,
)
from kvmem_llama.errors import InvalidRequest, OutputMismatch, TemplateUnsupported
from kvmem_llama.native import chat_shim

ALL = sorted(path.stem for path in FOLDER.glob("*.jinja"))
QUESTION = {"role": "user", "content": "What will the weather be?"}

pytestmark = pytest.mark.skipif(not ALL, reason="llama.cpp's source is not here")


def opened(name: str) -> ChatTemplates:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplates(None, source, bos_token="<s>", eos_token="</s>")


def applied(name: str, **options: object) -> AppliedTemplate:
    with opened(name) as templates:
        return templates.apply([QUESTION], TemplateOptions(**options))  # type: ignore[arg-type]


def streamed(parser: AnswerParser, pieces: list[str]) -> tuple[ParsedMessage, int]:
    """What the deltas add up to, and how many held a part of the arguments."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.feed("", is_partial=False)
    parts = [delta.tool_call for delta in deltas if delta.tool_call]
    calls = []
    for index in sorted({part.index for part in parts}):
        first, *rest = (part for part in parts if part.index == index)
        assert first.id and first.name and not any(part.id or part.name for part in rest)
        arguments = first.arguments + "".join(part.arguments for part in rest)
        calls.append(ToolCall(first.id, first.name, arguments, index))
    message = ParsedMessage(
        content="".join(delta.content for delta in deltas),
        reasoning_content="".join(delta.reasoning_content for delta in deltas),
        tool_calls=tuple(calls),
    )
    return message, sum(bool(part.arguments) for part in parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_call_is_read_whole_and_in_pieces(name: str) -> None:
    family = FAMILIES[name]
    template = applied(name, tools=TOOLS)
    assert "get_weather" in template.prompt and template.prompt.endswith(template.generation_prompt)
    assert (
        bool(template.grammar and template.grammar.lazy and template.grammar.triggers) == family.has_trigger
    )
    with template.open_parser() as parser:
        message = parser.parse(family.answer)
    assert message.content.strip() == family.content
    assert message.reasoning_content.strip() == family.reasoning
    (call,) = message.tool_calls
    assert call.name == "get_weather" and json.loads(call.arguments) == ARGUMENTS
    for size in (1, 3, 7):
        pieces = [family.answer[i : i + size] for i in range(0, len(family.answer), size)]
        with template.open_parser() as parser:
            streaming, n_argument_deltas = streamed(parser, pieces)
            assert streaming == parser.parse(family.answer)
        assert streaming.content == message.content
        assert [c.arguments for c in streaming.tool_calls] == [call.arguments]
        assert n_argument_deltas > 2, "the arguments must stream, not come at the end"


@pytest.mark.parametrize("name", FAMILIES)
def test_any_beginning_of_an_answer_can_be_read(name: str) -> None:
    template, answer = applied(name, tools=TOOLS), FAMILIES[name].answer
    with template.open_parser() as parser:
        whole = parser.parse(answer)
        for n in range(len(answer)):
            part = parser.parse(answer[:n], is_partial=True)
            assert len(part.tool_calls) <= 1
            assert whole.reasoning_content.startswith(part.reasoning_content)
            if part.tool_calls:
                assert whole.tool_calls[0].arguments.startswith(part.tool_calls[0].arguments)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_without_a_call_is_content(name: str) -> None:
    template = applied(name, tools=TOOLS)
    before = f"{THOUGHT}{template.thinking_end_tags[0]}" if template.thinking_forced_open else ""
    if template.format_name == "peg-native" and "<|channel|>" in template.thinking_start_tag:
        before = "<|channel|>final<|message|>"
    with template.open_parser() as parser:
        message = parser.parse(f"{before}It rains.")
    assert message.content.strip() == "It rains." and not message.tool_calls


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_and_their_results_become_part_of_the_next_prompt(name: str) -> None:
    template = applied(name, tools=TOOLS)
    with opened(name) as templates, template.open_parser() as parser:
        answer = parser.parse(FAMILIES[name].answer).to_dict()
        answer["tool_calls"][0]["id"] = "call00001"  # some templates want exactly 9 characters
        result = {"role": "tool", "content": "It rains.", "tool_call_id": "call00001", "name": "get_weather"}
        prompt = templates.apply([QUESTION, answer, result], TemplateOptions(tools=TOOLS)).prompt
    assert "get_weather" in prompt and "It rains." in prompt and "São" in prompt


def test_two_calls_in_one_answer_have_ids_of_their_own() -> None:
    second = '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    answer = CALL_TEXT + second
    template = applied("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", tools=TOOLS)
    with template.open_parser() as parser:
        message, _ = streamed(parser, list(answer))
        assert [call.name for call in message.tool_calls] == ["get_weather", "get_time"]
        assert [call.index for call in message.tool_calls] == [0, 1]
        assert len({call.id for call in message.tool_calls}) == 2
        assert message == parser.parse(answer)


def test_deltas_and_messages_are_those_of_openai() -> None:
    template = applied("Qwen-Qwen3-0.6B", tools=TOOLS)
    with template.open_parser() as parser:
        answer = FAMILIES["Qwen-Qwen3-0.6B"].answer
        deltas = [delta.to_dict() for piece in answer for delta in parser.feed(piece)]
        message = parser.parse(answer).to_dict()
    (call,) = message["tool_calls"]
    assert message["role"] == "assistant" and message["content"] == "I look."
    assert call["type"] == "function" and call["function"]["name"] == "get_weather"
    kinds = [next(iter(delta)) for delta in deltas]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    first = next(delta for delta in deltas if "tool_calls" in delta)["tool_calls"][0]
    assert first["index"] == 0 and first["id"] == call["id"] and first["type"] == "function"


def test_an_answer_that_breaks_off_in_a_call_keeps_what_there_is() -> None:
    template = applied("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", tools=TOOLS)
    with template.open_parser() as parser:
        (call,) = parser.parse(CALL_TEXT[:60]).tool_calls
    assert call.name == "get_weather" and call.arguments == '{"city": "S'


def test_a_piece_that_does_not_belong_there_is_refused_and_leaves_the_answer_as_it_was() -> None:
    template = applied("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", tools=TOOLS)
    with template.open_parser() as parser:
        parser.feed(CALL_TEXT[:60])
        with pytest.raises(OutputMismatch, match="peg-native"):
            parser.feed(f"{CALL_TEXT[60:]} and more", is_partial=False)
        rest = [delta.tool_call for delta in parser.feed(CALL_TEXT[60:], is_partial=False)]
        assert "".join(part.arguments for part in rest if part) == ARGUMENTS_TEXT.removeprefix('{"city": "S')


def test_reasoning_is_a_part_of_its_own_unless_that_is_not_wanted() -> None:
    answer = f"{THOUGHT}\n</think>\n\nIt rains."
    template = applied("Qwen-QwQ-32B")
    assert template.thinking_forced_open and template.supports_thinking
    assert (template.thinking_start_tag, template.thinking_end_tags) == ("<think>", ("</think>",))
    with template.open_parser() as parser:
        message = parser.parse(answer)
        assert message.reasoning_content.strip() == THOUGHT and message.content.strip() == "It rains."
    with applied("Qwen-QwQ-32B", reasoning_format="none").open_parser() as parser:
        message = parser.parse(answer)
        assert not message.reasoning_content and THOUGHT in message.content
    thinking = applied("Qwen-Qwen3-0.6B")
    silent = applied("Qwen-Qwen3-0.6B", enable_thinking=False)
    assert not thinking.thinking_forced_open and not silent.thinking_forced_open
    assert "</think>" in silent.prompt and "</think>" not in thinking.prompt
    by_variable = applied("Qwen-Qwen3-0.6B", template_kwargs={"enable_thinking": False})
    assert by_variable.prompt == silent.prompt


def test_a_last_message_can_be_continued() -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It will"}]
    name = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
    with opened(name) as templates:
        template = templates.apply(messages, TemplateOptions(continue_final_message=True))
    assert template.prompt.endswith("<|im_start|>assistant\nIt will")
    with template.open_parser() as parser:
        assert "".join(d.content for d in parser.feed(" rain.")) == " rain."
    with template.open_parser(echo=True) as parser:
        assert "".join(d.content for d in parser.feed(" rain.")) == "It will rain."


def test_the_choice_of_a_tool_decides_prompt_and_grammar() -> None:
    name = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
    auto, none = applied(name, tools=TOOLS), applied(name, tools=TOOLS, tool_choice="none")
    required = applied(name, tools=TOOLS, tool_choice="required")
    named = applied(name, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_time"}})
    assert (
        auto.grammar is not None and auto.grammar.lazy and auto.grammar.triggers and not auto.grammar.prefill
    )
    assert none.grammar is None
    assert required.grammar is not None and not required.grammar.lazy
    assert required.grammar.prefill == required.generation_prompt
    assert named.grammar is not None and "get_weather" not in named.grammar.grammar


@pytest.mark.parametrize("name", ["google-gemma-2-2b-it", "mistralai-Mistral-Nemo-Instruct-2407"])
def test_what_a_template_raises_reaches_the_caller(name: str) -> None:
    twice = [QUESTION, QUESTION]
    with opened(name) as templates, pytest.raises(TemplateUnsupported, match="alternate"):
        templates.apply(twice)


def test_a_system_prompt_goes_where_the_template_has_none() -> None:
    with opened("google-gemma-2-2b-it") as templates:
        assert not templates.caps["supports_system_role"]
        assert "Be short." in templates.apply([{"role": "system", "content": "Be short."}, QUESTION]).prompt


@pytest.mark.parametrize("name", ALL)
def test_every_template_of_llama_cpp_renders_and_reads_an_answer(name: str) -> None:
    with opened(name) as templates:
        template = templates.apply([QUESTION], TemplateOptions(tools=TOOLS))
    assert QUESTION["content"] in template.prompt
    with template.open_parser() as parser:
        assert parser.parse("", is_partial=True).tool_calls == ()


@pytest.mark.parametrize("name", ALL)
def test_texts_are_found_in_what_every_template_makes_of_them(name: str) -> None:
    with opened(name) as templates:
        template = ChatTemplate(FakeVocab(), templates)  # type: ignore[arg-type]
        first = template.turn("", [Message("system", "Be  brief."), Message("user", " Where? ")])
        assert [first.text[a:b].strip() for a, b in first.spans] == ["Be  brief.", "Where?"]
        assert first.roles == ("system", "user") and first.text == first.applied.prompt
        messages = [Message("user", "Where?"), Message("assistant", "There."), Message("user", "Why?")]
        turn = template.turn(f"...{first.text}There", messages, closed=False)
        assert [turn.text[a:b] for a, b in turn.spans] == ["Why?"]
        assert turn.text.endswith(turn.applied.generation_prompt) and "There" not in turn.text
        before, after = template.around()
        assert f"{before}Why?{after}" in turn.text and "Where?" not in turn.text


def test_a_json_schema_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert "root ::=" in json_schema_to_grammar(schema)
    template = applied("Qwen-Qwen2.5-7B-Instruct", json_schema=schema)
    assert (
        template.grammar is not None and not template.grammar.lazy and "integer" in template.grammar.grammar
    )
    with template.open_parser() as parser:
        assert parser.parse('{"n": 3}').content == '{"n": 3}'
    with pytest.raises(InvalidRequest, match="schema"):
        json_schema_to_grammar({"type": "nothing known"})


def test_a_grammar_of_the_callers_own_begins_with_the_answer() -> None:
    template = applied("Qwen-Qwen2.5-7B-Instruct", grammar='root ::= "yes"')
    assert template.grammar is not None
    assert (template.grammar.grammar, template.grammar.prefill) == ('root ::= "yes"', "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FULL_REQUEST = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        ]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "get_weather"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "get_time"}},
    "chat_template_kwargs": {"enable_thinking": True},
    "json_schema": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}},
}  # fmt: skip


@st.composite
def damaged_requests(draw: st.DrawFn) -> dict[str, object]:
    """A request in which one value, anywhere, is another one or is left out."""
    request = json.loads(json.dumps(FULL_REQUEST))
    place: list[object] | dict[str, object] = request
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        inner = place[key]  # type: ignore[index]
        if not inner or not isinstance(inner, (list, dict)) or draw(st.integers(0, 3)) == 0:
            break
        place = inner
    if draw(st.booleans()):
        place[key] = draw(JSON)  # type: ignore[index]
    else:
        del place[key]  # type: ignore[arg-type]
    return request


@hypothesis_settings(max_examples=60)
@given(request=damaged_requests(), name=st.sampled_from(sorted(FAMILIES)))
def test_a_damaged_request_is_answered_or_refused(request: dict[str, object], name: str) -> None:
    shim = chat_shim.load()
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    handle, _ = shim.open_templates(None, {"template": source})
    try:
        assert isinstance(shim.apply(handle, request)["prompt"], str)
    except (InvalidRequest, TemplateUnsupported) as error:
        assert error.why and "\n" not in str(error)
    finally:
        shim.close_templates(handle)


@hypothesis_settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(sorted(FAMILIES)))
def test_a_damaged_answer_is_read_or_refused(data: st.DataObject, name: str) -> None:
    answer = FAMILIES[name].answer
    start, end = sorted(data.draw(st.integers(0, len(answer))) for _ in range(2))
    damaged = answer[:start] + data.draw(st.text(max_size=8)) + answer[end:]
    with applied(name, tools=TOOLS).open_parser() as parser:
        for is_partial in (True, False):
            try:
                message = parser.parse(damaged, is_partial=is_partial)
            except OutputMismatch:
                continue
            assert all(call.id for call in message.tool_calls)
