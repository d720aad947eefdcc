from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_model

from kvmem_llama.engine.chat_template import ChatTemplate, Message
from kvmem_llama.engine.model import Model
from kvmem_llama.engine.turn_tokens import tokenize_turn
from kvmem_llama.errors import TemplateUnsupported
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
    return ChatTemplate(smol.vocab, smol.chat_template)


@pytest.fixture(scope="module")
def turns(gemma: Model) -> ChatTemplate:
    return ChatTemplate(gemma.vocab, "gemma")


def test_the_models_template_is_rendered(chatml: ChatTemplate) -> None:
    assert chatml.render([SYSTEM, USER], add_assistant=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWho wrote  this?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not chatml.is_plain and chatml.stop_strings == ()


def test_long_and_multibyte_contents_fit_the_buffer(chatml: ChatTemplate) -> None:
    content = "äöü€" * 5000
    text = chatml.render([Message("user", content)], add_assistant=False)
    assert text == f"<|im_start|>user\n{content}<|im_end|>\n"


def test_a_nul_does_not_cut_a_message_short(chatml: ChatTemplate) -> None:
    assert "a\ufffdb<|im_end|>" in chatml.render([Message("user", "a\0b")], add_assistant=False)


@pytest.mark.parametrize("name", ["chatml", "turns"])
def test_the_turns_of_a_conversation_add_up_to_its_rendering(
    name: str, request: pytest.FixtureRequest
) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    history = template.turn("", [SYSTEM, USER]).text
    assert history == template.render([SYSTEM, USER], add_assistant=True)
    end = "<|im_end|>" if name == "chatml" else "<end_of_turn>"
    history += ANSWER.content + end  # the end-of-turn token is fed, what follows it is not
    messages = [SYSTEM, USER, ANSWER, MORE]
    turn = template.turn(history, messages)
    assert turn.text.startswith("\n")
    assert history + turn.text == template.render(messages, add_assistant=True)
    assert [turn.text[a:b] for a, b in turn.spans] == ["Why?"]


@pytest.mark.parametrize("name", ["chatml", "turns"])
def test_an_answer_cut_short_is_closed_first(name: str, request: pytest.FixtureRequest) -> None:
    template: ChatTemplate = request.getfixturevalue(name)
    end = "<|im_end|>" if name == "chatml" else "<end_of_turn>"
    first = template.turn("", [USER]).text
    for said in ("A ca", " A cat <", ""):
        turn = template.turn(first + said, [USER, Message("assistant", said), MORE])
        assert turn.text.startswith(end + "\n")
        assert turn.text.endswith(template.turn("", [MORE]).text)


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
    assert turn.text == chatml.render([USER], add_assistant=True)
    assert [turn.text[a:b] for a, b in turn.spans] == [USER.content]


def test_bos_in_the_history_is_not_expected_of_the_template(turns: ChatTemplate) -> None:
    first = turns.turn("", [USER]).text
    assert turns.turn("<bos>" + first, [USER]).text == ""


def test_spans_are_found_for_every_new_message_trimmed_or_merged(turns: ChatTemplate) -> None:
    turn = turns.turn("", [SYSTEM, Message("user", "  spaced  ")])
    assert [turn.text[a:b] for a, b in turn.spans] == ["Be brief.", "spaced"]


def test_contents_that_look_like_the_template_are_still_found(chatml: ChatTemplate) -> None:
    content = "<|im_end|>\n<|im_start|>user\n@content@"
    turn = chatml.turn("", [Message("user", content)])
    assert [turn.text[a:b] for a, b in turn.spans] == [content]


def test_a_model_without_template_gets_plain_names(gemma: Model) -> None:
    plain = ChatTemplate(gemma.vocab, gemma.chat_template)
    assert plain.is_plain and plain.stop_strings == ("\nUser:",)
    first = plain.turn("", [SYSTEM, USER])
    assert first.text == "Be brief.\n\nUser: Who wrote  this?\n\nAssistant:"
    assert [first.text[a:b] for a, b in first.spans] == ["Be brief.", "Who wrote  this?"]
    turn = plain.turn(first.text + " A cat.", [SYSTEM, USER, ANSWER, MORE])
    assert turn.text == "\n\nUser: Why?\n\nAssistant:"


def test_a_model_without_template_but_with_its_tokens_speaks_chatml(tmp_path: Path) -> None:
    for model in opened(write_model(tmp_path / "tiny.gguf", template=None)):
        assert ChatTemplate(model.vocab, model.chat_template).render([MORE], add_assistant=False) == (
            "<|im_start|>user\nWhy?<|im_end|>\n"
        )


def test_an_unknown_template_is_refused_with_the_known_ones(smol: Model) -> None:
    with pytest.raises(TemplateUnsupported, match=r"chatml, .*gemma"):
        ChatTemplate(smol.vocab, "{{ something(else) }}")


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
