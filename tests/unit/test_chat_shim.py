"""The border to llama.cpp's chat code: declarations, other libraries, input that must not end it."""

from __future__ import annotations

import math
import re
import shutil
import threading
from pathlib import Path

import pytest

from kvmem_llama.engine.answer_parser import AnswerParser
from kvmem_llama.engine.templates import (
    ChatTemplates,
    TemplateOptions,
    json_schema_to_grammar,
    read_template,
)
from kvmem_llama.errors import (
    EngineClosed,
    InputError,
    InvalidRequest,
    LibraryMismatch,
    LibraryMissing,
    OutputMismatch,
    TemplateUnsupported,
)
from kvmem_llama.native import chat_cdef, chat_shim, library

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def test_the_binding_declares_what_the_header_declares() -> None:
    header = Path(__file__).parents[2] / "chat_shim" / "kvmem_chat.h"
    if not header.is_file():
        pytest.skip("the source tree is not here")
    text = header.read_text(encoding="utf-8")
    body = text[text.index("enum kvmem_chat_error {") : text.rindex("#ifdef __cplusplus")]
    body = re.sub(r"//[^\n]*|KVMEM_CHAT_API", "", body)
    assert body.split() == chat_cdef.CHAT_CDEF.split()
    assert re.search(rf"#define KVMEM_CHAT_ABI +{chat_cdef.CHAT_ABI}\n", text)


def test_a_missing_or_foreign_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LibraryMissing, match=r"nothing\.so"):
        chat_shim.ChatShim(tmp_path / "nothing.so")
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(LibraryMissing, match="cannot be used"):
        chat_shim.ChatShim(tmp_path / "text.so")
    with pytest.raises(LibraryMissing, match="cannot be used"):
        chat_shim.ChatShim(library.load().path)
    monkeypatch.setattr(chat_shim, "CHAT_ABI", 99)
    with pytest.raises(LibraryMismatch, match="needs 99"):
        chat_shim.ChatShim(chat_shim.LIBRARY_PATH)


def test_a_library_of_another_build_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "id").write_text("0123456789abcdef\n")
    monkeypatch.setattr(library, "PATCH_ID_FILE", tmp_path / "id")
    copy = shutil.copy(chat_shim.LIBRARY_PATH, tmp_path / "copy.so")
    with pytest.raises(LibraryMismatch, match="0123456789abcdef"):
        chat_shim.ChatShim(Path(copy))


@pytest.mark.parametrize(
    ("messages", "options", "why"),
    [
        ("Hello", {}, "messages|must be an object"),
        ([{"content": "x"}], {}, "role"),
        ([{"role": "user"}], {}, "content"),
        ([{"role": "user", "content": 7}], {}, "content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "part type"),
        ([{"role": 3, "content": "x"}], {}, "string"),
        (HELLO, {"tools": [{"type": "function"}]}, "function"),
        (HELLO, {"tools": ["get_weather"]}, "Failed to parse tools"),
        (HELLO, {"tool_choice": "perhaps"}, "perhaps"),
        (HELLO, {"tool_choice": {"type": "function", "function": {"name": "none"}}}, "no tool is named"),
        (HELLO, {"tool_choice": 4}, "'tool_choice'"),
        (HELLO, {"reasoning_format": "loud"}, "loud"),
        (HELLO, {"json_schema": "text"}, "'json_schema'"),
        (HELLO, {"json_schema": {"$ref": "#/nowhere"}}, "nowhere|schema"),
        (HELLO, {"json_schema": {}, "grammar": 'root ::= "x"'}, "together"),
        (HELLO, {"continue_final_message": True}, "continue_final_message"),
        (HELLO, {"template_kwargs": {"enable_thinking": "yes"}}, "enable_thinking"),
        (HELLO, {"template_kwargs": {"x": math.nan}}, "JSON"),
        (HELLO, {"template_kwargs": {"x": object()}}, "JSON"),
        (HELLO, {"template_kwargs": {"x": "\ud800"}}, "JSON"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_a_reason(
    messages: object, options: dict[str, object], why: str
) -> None:
    with ChatTemplates(None, CHATML) as templates:
        with pytest.raises((InvalidRequest, TemplateUnsupported), match=why):
            templates.apply(messages, TemplateOptions(**options))  # type: ignore[arg-type]
        assert templates.apply(HELLO).prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_nests_too_deep_is_refused_and_does_not_end_the_process() -> None:
    with ChatTemplates(None, CHATML) as templates:
        for depth in (250, 100_000):
            with pytest.raises(InvalidRequest, match="deep"):
                templates.apply(HELLO, TemplateOptions(template_kwargs={"x": nested(depth)}))
        call = {"name": "f", "arguments": "[" * 100_000}
        calls = [{"type": "function", "function": call}]
        with pytest.raises(InvalidRequest, match="deep"):
            templates.apply([{"role": "assistant", "content": "", "tool_calls": calls}])
        assert templates.apply(HELLO, TemplateOptions(template_kwargs={"x": nested(150)})).prompt
    schema: dict[str, object] = {"type": "string"}
    for _ in range(250):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="deep"):
        json_schema_to_grammar(schema)
    with AnswerParser({}) as parser, pytest.raises(OutputMismatch, match="deep"):
        parser.feed("[" * 100_000)


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ 'open", "{% if x %}", "{% nonsense %}"])
def test_a_template_that_is_not_jinja_is_refused(source: str) -> None:
    with pytest.raises(TemplateUnsupported) as caught:
        ChatTemplates(None, source)
    assert "\n" not in str(caught.value) and "std::" not in str(caught.value)


def test_without_jinja_llama_cpp_makes_the_prompt_itself() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    with ChatTemplates(None, "command-r", jinja=False) as templates:
        applied = templates.apply(messages)
        assert applied.prompt == (
            "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        )
        with applied.open_parser() as parser:
            assert parser.parse("<think>a</think>b").content == "<think>a</think>b"
        with pytest.raises(InvalidRequest, match="without jinja no template renders tools"):
            templates.apply(HELLO, TemplateOptions(tools=[{"type": "function", "function": {"name": "f"}}]))
    with ChatTemplates(None, CHATML, jinja=False) as recognized:
        assert recognized.apply(HELLO).prompt.startswith("<|im_start|>user\nHello<|im_end|>")


def test_without_jinja_what_llama_cpp_does_not_know_is_refused() -> None:
    with pytest.raises(TemplateUnsupported, match=r"one that .* knows: .* chatml, .* llama3, .* zephyr\."):
        ChatTemplates(None, "command-x", jinja=False)


def test_a_template_that_raises_says_what_it_raised() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('Only user may begin') }}{% endif %}ok"
    with ChatTemplates(None, source) as templates:
        with pytest.raises(TemplateUnsupported, match="Only user may begin") as caught:
            templates.apply([{"role": "wizard", "content": "x"}])
        assert "\n" not in str(caught.value)
        assert templates.apply(HELLO).prompt == "ok"


def test_a_template_comes_from_a_file_or_is_named_as_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(CHATML)
    with ChatTemplates(None, read_template(file)) as templates:
        assert templates.source == CHATML
        assert templates.apply(HELLO).prompt.startswith("<|im_start|>user")
    with pytest.raises(InputError, match=r"absent\.jinja"):
        read_template(tmp_path / "absent.jinja")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"t\.jinja"):
        read_template(file)
    file.write_text(" \n")
    with pytest.raises(InputError, match="empty"):
        read_template(file)
    with pytest.raises(InvalidRequest, match="without a model"):
        ChatTemplates(None)


def test_closing_twice_is_harmless_and_use_after_it_names_what_was_closed() -> None:
    templates = ChatTemplates(None, CHATML)
    parser = templates.apply(HELLO).open_parser()
    for _ in range(2):
        templates.close()
        parser.close()
    with pytest.raises(EngineClosed, match="templates"):
        templates.apply(HELLO)
    with pytest.raises(EngineClosed, match="parser"):
        parser.parse("x")
    with pytest.raises(EngineClosed, match="parser"):
        parser.feed("x")


def test_texts_keep_their_characters() -> None:
    text = 'nul \0, quote ", back\\slash, emoji 🦙, tab \t'
    with ChatTemplates(None, CHATML) as templates:
        applied = templates.apply([{"role": "user", "content": text}])
        assert text in applied.prompt
        with applied.open_parser() as parser:
            assert parser.parse(text).content == text
            assert "".join(d.content for c in text for d in parser.feed(c)) == text


def test_threads_may_share_templates() -> None:
    prompts: list[str] = []
    with ChatTemplates(None, CHATML) as templates:

        def render(number: int) -> None:
            for _ in range(20):
                prompts.append(templates.apply([{"role": "user", "content": str(number)}]).prompt)

        threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(prompts) == 80
    for number in range(4):
        expected = f"<|im_start|>user\n{number}<|im_end|>\n<|im_start|>assistant\n"
        assert prompts.count(expected) == 20
