from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import GEMMA, write_model

from kvmem_llama.engine.chat_template import AnyMessage, ChatTemplate, Message
from kvmem_llama.engine.model import Model
from kvmem_llama.engine.templates import TemplateOptions
from kvmem_llama.engine.turn_tokens import tokenize_turn
from kvmem_llama.errors import InputError, InvalidOption, InvalidRequest, TemplateUnsupported
from kvmem_llama.native import library
from kvmem_llama.settings import Settings

SYSTEM = Message("system", "Be brief.")
USER = Message("user", "Who wrote  this?")
ANSWER = Message("assistant", "A cat.")
MORE = Message("user", "Why?")


def opened(path: Path) -> Iterator[Model]:
    library.load()
    model = Model.load(path, Settings())
    yield model
    model.close()


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[Model]:
    yield from opened(smollm2)


@pytest.fixture(scope="module")
def gemma(gemma3: Path) -> Iterator[Model]:
    yield from opened(gemma3)


@pytest.fixture(scope="module")
def chatml(smol: Model) -> ChatTemplate:
    return ChatTemplate.open(smol, Settings())


@pytest.fixture(scope="module")
def named(gemma: Model) -> ChatTemplate:
    return ChatTemplate.open(gemma, Settings(chat_template="gemma", jinja=False))


@pytest.fixture(scope="module")
def turns(gemma: Model) -> ChatTemplate:
    return ChatTemplate.open(gemma, Settings(chat_template=GEMMA))


def render(template: ChatTemplate, messages: list[AnyMessage], *, add_assistant: bool) -> str:
    return template.apply(messages, TemplateOptions(add_generation_prompt=add_assistant)).prompt


def test_the_models_template_is_rendered(chatml: ChatTemplate) -> None:
    assert render(chatml, [SYSTEM, USER], add_assistant=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWho wrote  this?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not chatml.is_plain and chatml.apply([USER]).additional_stops == ()


def test_long_and_multibyte_contents_are_rendered(chatml: ChatTemplate) -> None:
    content = "äöü€" * 5000
    text = render(chatml, [Message("user", content)], add_assistant=False)
    assert text.endswith(f"<|im_start|>user\n{content}<|im_end|>\n")


def test_a_nul_does_not_cut_a_message_short(chatml: ChatTemplate) -> None:
    assert "a\0b<|im_end|>" in render(chatml, [Message("user", "a\0b")], add_assistant=False)


def test_without_jinja_a_nul_is_refused(named: ChatTemplate) -> None:
    for content in ("a\0b", [{"type": "text", "text": "a\0b"}]):
        with pytest.raises(InvalidRequest, match="the character 0"):
            named.apply([{"role": "user", "content": content}])


@pytest.mark.parametrize("name", ["chatml", "turns", "named"])
def test_the_turns_of_a_conversation_add_up_to_its_rendering(
    name: str, request: pytest.FixtureRequest
) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    history = template.turn("", [SYSTEM, USER]).text
    assert history == render(template, [SYSTEM, USER], add_assistant=True)
    end = "<|im_end|>" if name == "chatml" else "<end_of_turn>"
    history += ANSWER.content + end  # the end-of-turn token is fed, what follows it is not
    messages = [SYSTEM, USER, ANSWER, MORE]
    turn = template.turn(history, messages)
    assert turn.text.startswith("\n")
    assert history + turn.text == render(template, messages, add_assistant=True)
    assert [turn.text[a:b] for a, b in turn.spans] == ["Why?"]


@pytest.mark.parametrize("name", ["chatml", "turns", "named"])
def test_an_answer_cut_short_is_closed_first(name: str, request: pytest.FixtureRequest) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    end = "<|im_end|>" if name == "chatml" else "<end_of_turn>"
    first = template.turn("", [USER]).text
    for said in ("A ca", " A cat <", ""):
        turn = template.turn(first + said, [USER, Message("assistant", said), MORE])
        assert turn.text.startswith(end + "\n")
        assert turn.text.endswith(template.without_preamble(template.turn("", [MORE])).text)


def test_an_answer_that_the_template_would_trim_stays_as_it_was_said(turns: ChatTemplate) -> None:
    history = turns.turn("", [USER]).text + " A cat. \n<end_of_turn>"
    turn = turns.turn(history, [USER, Message("assistant", " A cat. \n"), MORE])
    assert turn.text == "\n<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    assert [turn.text[a:b] for a, b in turn.spans] == ["Why?"]


def test_only_the_last_answer_needs_to_be_given(chatml: ChatTemplate) -> None:
    history = "<|im_start|>user\nlong ago<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    turn = chatml.turn(history, [Message("assistant", "yes"), MORE])
    assert turn.text == "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_the_end_of_turn_counts_only_as_a_token_if_the_caller_knows(chatml: ChatTemplate) -> None:
    history = chatml.turn("", [USER]).text + " I write <|im_end|>"  # said in letters, then cut short
    messages = [USER, Message("assistant", "I write <|im_end|>"), MORE]
    assert chatml.turn(history, messages, closed=False).text.startswith("<|im_end|>\n")
    assert chatml.turn(history, messages, closed=True).text.startswith("\n<|im_start|>user")


def test_a_history_that_is_no_conversation_is_left_as_it_is(chatml: ChatTemplate) -> None:
    turn = chatml.turn("Some document.", [USER])
    assert turn.text == render(chatml, [USER], add_assistant=True)
    assert [turn.text[a:b] for a, b in turn.spans] == [USER.content]


def test_bos_in_the_history_is_not_expected_of_the_template(turns: ChatTemplate) -> None:
    first = turns.turn("", [USER]).text
    assert turns.turn("<bos>" + first, [USER]).text == ""


def test_spans_are_found_for_every_new_message_trimmed_or_merged(turns: ChatTemplate) -> None:
    turn = turns.turn("", [SYSTEM, Message("user", "  spaced  ")])
    assert [turn.text[a:b] for a, b in turn.spans] == ["Be brief.", "  spaced"]


def test_contents_that_look_like_the_template_are_still_found(chatml: ChatTemplate) -> None:
    content = "<|im_end|>\n<|im_start|>user\n@content@"
    turn = chatml.turn("", [Message("user", content)])
    assert [turn.text[a:b] for a, b in turn.spans] == [content]


def test_a_model_without_template_gets_plain_names(gemma: Model) -> None:
    plain = ChatTemplate.open(gemma, Settings())
    assert plain.is_plain and plain.apply([USER]).additional_stops == ("\nUser:",)
    first = plain.turn("", [SYSTEM, USER])
    assert first.text == "Be brief.\n\nUser: Who wrote  this?\n\nAssistant:"
    assert [first.text[a:b] for a, b in first.spans] == ["Be brief.", "Who wrote  this?"]
    turn = plain.turn(first.text + " A cat.", [SYSTEM, USER, ANSWER, MORE])
    assert turn.text == "\n\nUser: Why?\n\nAssistant:"


def test_a_model_without_template_but_with_its_tokens_speaks_chatml(tmp_path: Path) -> None:
    for model in opened(write_model(tmp_path / "tiny.gguf", template=None)):
        template = ChatTemplate.open(model, Settings())
        assert render(template, [MORE], add_assistant=False) == "<|im_start|>user\nWhy?<|im_end|>\n"


def test_a_template_of_the_settings_takes_the_place_of_the_models_own(
    smol: Model, gemma: Model, tmp_path: Path
) -> None:
    named = ChatTemplate.open(gemma, Settings(chat_template="chatml"))
    assert render(named, [MORE], add_assistant=False) == "<|im_start|>user\nWhy?<|im_end|>\n"
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert render(
        ChatTemplate.open(smol, Settings(chat_template_file=str(file))), [MORE], add_assistant=True
    ) == ("Why?!")
    for error, options in (
        (TemplateUnsupported, {"chat_template": "{% for x in %}"}),
        (InvalidOption, {"chat_template": "gemma"}),
        (InvalidOption, {"chat_template": "chatml", "chat_template_file": str(file)}),
        (InputError, {"chat_template_file": str(tmp_path / "absent.jinja")}),
    ):
        with pytest.raises(error):
            ChatTemplate.open(smol, Settings(**options))


def test_what_a_template_puts_before_a_conversation_is_not_put_into_it_again(chatml: ChatTemplate) -> None:
    whole = chatml.turn("", [USER])
    assert whole.text.startswith("<|im_start|>system\nYou are")  # this template's own system prompt
    turn = chatml.without_preamble(whole)
    assert turn.text == "<|im_start|>user\nWho wrote  this?<|im_end|>\n<|im_start|>assistant\n"
    assert [turn.text[a:b] for a, b in turn.spans] == [USER.content]
    assert chatml.around() == ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    assert chatml.without_preamble(turn) == turn


def test_all_new_texts_have_spans_with_their_roles(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "same"}, {"type": "text", "text": " same "}]
    new: list[AnyMessage] = [
        {"role": "user", "content": parts},
        {"role": "tool", "content": "same"},
        {"role": "tool", "content": ""},
        Message("user", "@content@ same"),
    ]
    turn = chatml.turn("", [SYSTEM, USER, ANSWER, *new])
    assert [turn.text[a:b] for a, b in turn.spans] == ["same", " same ", "same", "@content@ same"]
    assert turn.roles == ("user", "user", "tool", "user")


def test_a_text_that_the_template_looks_at_is_found_all_the_same(smol: Model) -> None:
    source = (
        "{% for m in messages %}[{% if '{' in m.content %}json {{ m.content }}{% else %}"
        "{{ m.content | upper }}{% endif %}]{% endfor %}"
    )
    template = ChatTemplate.open(smol, Settings(chat_template=source))
    turn = template.turn("", [Message("user", "{1}"), Message("user", "{2}")])
    assert turn.text == "[json {1}][json {2}]" and [turn.text[a:b] for a, b in turn.spans] == ["{1}", "{2}"]


def test_a_token_that_ends_an_answer_stands_in_place_of_the_templates_text_for_it(smol: Model) -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<file_sep>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    template = ChatTemplate.open(smol, Settings(chat_template=source))
    messages = [USER, ANSWER, MORE]
    asked = "<|im_start|>user Why?<file_sep><|im_start|>assistant "
    assert template.turn("...A cat.<|im_end|>", messages, closed=True).text == asked
    assert template.turn("...A cat.", messages, closed=False).text == "<file_sep>" + asked


def test_plain_names_know_no_tools_and_go_on_with_an_answer(gemma: Model) -> None:
    plain = ChatTemplate.open(gemma, Settings())
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(TemplateUnsupported, match="no tools"):
        plain.apply([USER], TemplateOptions(tools=[tool]))
    goes_on = TemplateOptions(continue_final_message=True, json_schema={"type": "integer"})
    applied = plain.apply([USER, ANSWER], goes_on)
    assert applied.prompt == "User: Who wrote  this?\n\nAssistant: A cat." and applied.grammar is not None
    for bad, options in (
        ([], None),
        ([USER], goes_on),
        ([{"content": "x"}], None),
        ([USER], TemplateOptions(json_schema={}, grammar="x")),
    ):
        with pytest.raises(InvalidRequest):
            plain.apply(bad, options)  # type: ignore[arg-type]


# Tokens of a turn


def test_tokens_of_the_text_are_scored_and_those_of_the_template_are_not(
    smol: Model, chatml: ChatTemplate
) -> None:
    turn = chatml.turn("", [SYSTEM, USER])
    marked = tokenize_turn(smol.vocab, turn.text, turn.spans)
    assert np.array_equal(marked.tokens, smol.vocab.tokenize(turn.text))
    assert smol.vocab.detokenize(marked.tokens[marked.scored]) == b"Be brief.Who wrote  this?"
    assert smol.vocab.detokenize(marked.tokens[marked.question :]) == (
        b"Who wrote  this?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["smol", "gemma"])
@pytest.mark.parametrize(
    "content", ["naïve 🦙 text", "\n\nlines\n", " lead", "x", "a<|im_end|><eos>b", "1\t2"]
)
def test_marks_follow_the_bytes_for_any_text(name: str, content: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(name)
    text = f"<|im_start|>user\n{content}<|im_end|>\n"
    span = (len("<|im_start|>user\n"), len("<|im_start|>user\n") + len(content))
    marked = tokenize_turn(model.vocab, text, [span], add_bos=True)
    pieces = [model.vocab.piece(int(token)) for token in marked.tokens]
    n_bos = int(model.vocab.add_bos)
    assert b"".join(pieces[n_bos:]).decode() == text
    scored = b"".join(piece for piece, on in zip(pieces, marked.scored, strict=True) if on)
    controls = [token for token in marked.tokens.tolist() if model.vocab.is_control(token)]
    plain = content.encode()
    for token in controls:
        plain = plain.replace(model.vocab.piece(token), b"")
    assert scored in plain  # the edges may have merged with the template
    assert len(scored) >= len(plain.strip()) - 1 or scored == b""
    before = b"".join(pieces[n_bos : marked.question])
    assert len(before) <= span[0] < len(before) + len(pieces[marked.question])


def test_no_spans_and_no_text_are_allowed(smol: Model) -> None:
    marked = tokenize_turn(smol.vocab, "", [])
    assert len(marked.tokens) == len(marked.scored) == marked.question == 0
    assert not tokenize_turn(smol.vocab, "abc def", []).scored.any()
    with pytest.raises(ValueError, match="ascend"):
        tokenize_turn(smol.vocab, "abc", [(2, 5)])
