"""Tools, reasoning and whole prompts through a workspace: templates of several families on a tiny model whose
words are given, and the small model under a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from fake_model import FakeSampler
from families import ARGUMENTS, CALL_TEXT, FAMILIES, FOLDER, THOUGHT, TOOLS, function

from kvmem_llama.engine.sampler import SamplingParams
from kvmem_llama.engine.templates import ChatTemplates, TemplateOptions
from kvmem_llama.errors import InputError, InvalidOption, InvalidRequest
from kvmem_llama.memory import answering
from kvmem_llama.memory.report import Finished, MessagePiece, TextPiece
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import Workspace, open_engine

GREEDY = SamplingParams(temp=0)
QUESTION = {"role": "user", "content": "What will the weather be?"}
CALL_ID = "call00001"  # one template takes no other form
HERMES = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
SPECIAL = (
    "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>",
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
"""Tokens of their own in the models that these templates are of."""

needs_templates = pytest.mark.skipif(not FOLDER.is_dir(), reason="llama.cpp's source is not here")


class Says:
    """Lets a model say what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        monkeypatch.setattr(FakeSampler, "sample", lambda _self, _logits: self.tokens.pop(0))
        monkeypatch.setattr(answering, "Sampler", FakeSampler)

    def next(self, ws: Workspace, answer: str) -> None:
        vocab = ws._engine.core.model.vocab
        self.tokens = [*vocab.tokenize(answer).tolist(), vocab.eos]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    return Says(monkeypatch)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny_models.Shape(n_layer=1, n_head=2, n_head_kv=1, d=32, n_ff=32, n_ctx_train=16384)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_models, "SPECIAL", (*tiny_models.SPECIAL, *SPECIAL))
        return tiny_models.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", shape)


@contextmanager
def opened(model: Path, template: str = "", **options: Any) -> Iterator[Workspace]:
    file = str(FOLDER / f"{template}.jinja") if template else ""
    settings = Settings(**{"n_threads": 2, "n_ubatch": 512, "chat_template_file": file, **options})
    with open_engine(model, settings) as engine, engine.workspace() as ws:
        yield ws


def text_of(ws: Workspace) -> str:
    return ws._engine.core.model.vocab.detokenize(ws.history()).decode()


# -- tools


@needs_templates
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_is_called_and_its_result_is_answered(tiny: Path, says: Says, name: str) -> None:
    options, answer = TemplateOptions(tools=TOOLS), FAMILIES[name].answer
    with opened(tiny, name) as ws:
        says.next(ws, answer)
        events = list(ws.chat([QUESTION], sampling=GREEDY, options=options))
        prompt = ws._engine.core.chat_template().apply([QUESTION], options).prompt
        assert text_of(ws).startswith(prompt)
        result = next(event.result for event in events if isinstance(event, Finished))
        assert (
            "".join(event.text for event in events if isinstance(event, TextPiece)) == result.text == answer
        )
        assert result.message is not None
        (call,) = result.message.tool_calls
        assert call.name == "get_weather" and json.loads(call.arguments) == ARGUMENTS
        assert result.message.reasoning_content.strip() == FAMILIES[name].reasoning
        deltas = [event.delta for event in events if isinstance(event, MessagePiece)]
        parts = [delta.tool_call for delta in deltas if delta.tool_call]
        assert "".join(part.arguments for part in parts) == call.arguments
        assert sum(bool(part.arguments) for part in parts) > 2, "the arguments must stream"
        assert "".join(delta.content for delta in deltas) == result.message.content
        assert isinstance(events[-1], Finished) and isinstance(events[-2], MessagePiece | TextPiece)

        called = result.message.to_dict()
        called["tool_calls"][0]["id"] = CALL_ID
        tool = {"role": "tool", "tool_call_id": CALL_ID, "name": "get_weather", "content": "Rain, all week."}
        messages = [QUESTION, called, tool]
        says.next(ws, "It will rain.")
        held = ws.n_tokens
        second = ws.chat(messages, sampling=GREEDY, options=options).result()
        whole = ws._engine.core.chat_template().apply(messages, options).prompt
        assert text_of(ws)[: len(whole)] == whole
        assert second.n_cached + second.n_carried >= len(prompt) // 2 and second.n_evaluated < held // 2
        assert second.message is not None and second.message.tool_calls == ()


@needs_templates
def test_a_small_model_calls_a_tool_under_the_grammar_of_the_tools(smollm2: Path) -> None:
    city = {"type": "string", "enum": ["Rome", "Paris"]}
    tool = function("get_weather", {"city": city, "unit": {"enum": ["C", "F"]}}, ["city", "unit"])
    # Left alone this model writes text before the call, which the grammar allows.
    begun = {"role": "assistant", "content": "<tool_call>\n"}
    options = TemplateOptions(tools=[tool], tool_choice="required", continue_final_message=True)
    with opened(smollm2, HERMES, n_ctx=1024) as ws:
        answer = ws.chat([QUESTION, begun], sampling=GREEDY, max_tokens=40, options=options)
        deltas = [event.delta for event in answer if isinstance(event, MessagePiece)]
        message = answer.message
    assert message is not None
    call = message.tool_calls[0]  # the answer is cut, maybe in the midst of another one
    arguments = json.loads(call.arguments)
    assert call.name == "get_weather" and arguments["city"] in ("Rome", "Paris") and arguments["unit"] in "CF"
    parts = [delta.tool_call for delta in deltas if delta.tool_call and delta.tool_call.index == 0]
    assert "".join(part.arguments for part in parts) == call.arguments and len(parts) > 3


def test_an_answer_follows_the_schema_that_is_asked_for(smollm2: Path) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    with opened(smollm2, n_ctx=512) as ws:
        for ask in (
            lambda options: ws.chat([QUESTION], sampling=GREEDY, max_tokens=60, options=options),
            lambda options: ws.ask("And in Rome?", sampling=GREEDY, max_tokens=60, options=options),
        ):
            message = ask(TemplateOptions(json_schema=schema)).message
            assert message is not None and set(json.loads(message.content)) == {"sunny"}
        message = ws.chat(
            [QUESTION], sampling=GREEDY, options=TemplateOptions(grammar='root ::= "no"')
        ).message
        assert message is not None and message.content == "no"


@needs_templates
def test_a_list_with_tools_is_read_once_and_edits_cost_what_they_change(tiny: Path, says: Says) -> None:
    with opened(tiny, HERMES) as ws:
        vocab, options = ws._engine.core.model.vocab, TemplateOptions(tools=TOOLS)
        messages: list[dict[str, Any]] = []

        def n(*texts: str) -> int:
            """Tokens of texts with what the template puts around each."""
            return sum(len(vocab.tokenize(text)) + 60 for text in texts)

        def next_answer(answer: str) -> Any:
            says.next(ws, answer)
            result = ws.chat(messages, sampling=GREEDY, options=options).result()
            whole = ws._engine.core.chat_template().apply(messages, options).prompt
            assert text_of(ws).startswith(whole) and result.n_prompt + result.n_generated == ws.n_tokens
            assert result.message is not None
            messages.append(result.message.to_dict())
            return result

        for i in range(5):
            question, found = f"{i}: and in the next week? " * 5, f"rain, {i} mm, " * 8
            messages.append({"role": "user", "content": question})
            result = next_answer(CALL_TEXT)
            assert result.message.tool_calls and (not i or result.n_evaluated <= n(question))
            call = messages[-1]["tool_calls"][0]
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": found}
            )
            # A template may write a call in another way than the model did.
            assert next_answer(f"It will rain {i}. " * 5).n_evaluated <= n(CALL_TEXT, found)

        del messages[-1]  # another result of the last tool
        messages[-1]["content"] = "snow " * 20
        assert next_answer("It will snow.").n_evaluated <= n("snow " * 20)

        messages[4]["content"] += " Answer in one word."  # a reminder in an old message of the user
        messages.append({"role": "user", "content": "So?"})
        result = next_answer("Snow.")
        assert result.n_evaluated <= n("So?", " Answer in one word.") and result.n_carried > 1000


# -- reasoning


@needs_templates
@pytest.mark.parametrize(
    ("name", "before"), [("Qwen-Qwen3-0.6B", "<think>\n"), ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "")]
)
def test_reasoning_is_told_from_the_answer(tiny: Path, says: Says, name: str, before: str) -> None:
    """The second one's prompt ends inside of the reasoning."""
    said = f"{before}{THOUGHT}\n</think>\n\nIt rains."
    with opened(tiny, name) as ws:
        says.next(ws, said)
        events = list(ws.ask("Why?", sampling=GREEDY))
        deltas = [event.delta for event in events if isinstance(event, MessagePiece)]
        assert "".join(delta.reasoning_content for delta in deltas).strip() == THOUGHT
        assert "".join(delta.content for delta in deltas).strip() == "It rains."
        for turn in ws.turns():
            assert turn.question == "Why?" and turn.answer == said
        message = ws.last_message()
        assert message is not None and message.content.strip() == "It rains."
        assert message.reasoning_content.strip() == THOUGHT

        says.next(ws, "At once.")
        answer = ws.ask("And now?", sampling=GREEDY, options=TemplateOptions(enable_thinking=False))
        assert answer.message is not None
        message = ws.last_message()
        assert message is not None
        if name.startswith("Qwen"):  # the other one cannot do without
            assert answer.message.content == message.content == "At once." and not message.reasoning_content
        assert [turn.question for turn in ws.turns()] == ["Why?", "And now?"]

        says.next(ws, said)
        kept = ws.ask("Once more?", sampling=GREEDY, options=TemplateOptions(reasoning_format="none"))
        assert kept.message is not None and THOUGHT in kept.message.content


@needs_templates
def test_reasoning_stripped_from_old_answers_costs_nothing(tiny: Path, says: Says) -> None:
    """This template leaves it out of all answers but the newest ones by itself."""
    thought = "<think>\n" + "Let me think about rain. " * 8 + "\n</think>\n\n"
    with opened(tiny, "Qwen-Qwen3-0.6B") as ws:
        messages: list[dict[str, Any]] = []
        for i in range(4):
            messages.append({"role": "user", "content": f"Question {i}: " + "what about the rain? " * 6})
            says.next(ws, thought + f"Answer {i}: " + "it rains a lot. " * 6)
            held = ws.n_tokens
            result = ws.chat(messages, sampling=GREEDY).result()
            assert result.message is not None and not result.message.content.startswith("<think>")
            assert "Let me think" in result.message.reasoning_content
            if i:
                asked = f"<|im_start|>user\n{messages[-1]['content']}<|im_end|>\n<|im_start|>assistant\n"
                n_new = len(ws._engine.core.model.vocab.tokenize(f"<|im_end|>\n{asked}"))
                assert result.n_evaluated <= n_new + 8 and result.n_cached + result.n_carried > 64
                assert result.n_prompt < held + n_new  # what was thought is gone
            messages.append(result.message.to_dict())


# -- an answer that goes on


def test_an_answer_goes_on_where_its_message_ends(smollm2: Path) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It will be"}]
    with opened(smollm2, n_ctx=512) as ws:
        with pytest.raises(InputError, match="assistant"):
            ws.chat(messages, sampling=GREEDY)
        options = TemplateOptions(continue_final_message=True)
        answer = ws.chat(messages, sampling=GREEDY, max_tokens=6, options=options)
        deltas = [event.delta.content for event in answer if isinstance(event, MessagePiece)]
        assert "".join(deltas) == answer.text and answer.message is not None
        assert answer.message.content == "It will be" + answer.text
        assert f"<|im_start|>assistant\nIt will be{answer.text}" in text_of(ws)
        with pytest.raises(InvalidRequest):
            ws.chat([QUESTION], sampling=GREEDY, options=options)
        # what was said so far is not read again, but as the query
        longer = [QUESTION, {"role": "assistant", "content": "It will be" + answer.text}]
        again = ws.chat(longer, sampling=GREEDY, max_tokens=2, options=options).result()
        assert again.n_read == 0 and again.n_cached > 20


# -- whole prompts


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> Iterator[Callable[[], Workspace]]:
    with open_engine(smollm2, Settings(n_ctx=512, n_threads=2)) as engine:
        yield engine.workspace


def test_of_a_prompt_only_what_is_new_is_read(plain: Callable[[], Workspace]) -> None:
    with plain() as ws:
        vocab = ws._engine.core.model.vocab
        prompt = vocab.tokenize("The sea is wide and deep, and many ships cross it every day. " * 4)
        first = ws.prompt(prompt, sampling=GREEDY, max_tokens=5).result()
        assert (first.n_cached, first.n_evaluated) == (0, len(prompt)) and first.message is None
        longer = np.concatenate([prompt, first.tokens, vocab.tokenize(" And so on")])
        second = ws.prompt(longer, sampling=GREEDY, max_tokens=5).result()
        assert (second.n_cached, second.n_evaluated) == (len(prompt) + 5, 3)
        assert second.n_query == 3 and ws.turns() == ()
        edited = np.concatenate([vocab.tokenize("Never!"), longer])
        third = ws.prompt(edited, sampling=GREEDY, max_tokens=5, query_start=len(edited) - 3).result()
        assert third.n_carried == len(longer) - 3 and third.n_evaluated == len(edited) - third.n_carried
        assert ws.history().tolist() == [*edited.tolist(), *third.tokens]
        again = ws.prompt(ws.history(), sampling=GREEDY, max_tokens=1).result()
        assert again.n_evaluated == again.n_query == 1
        for bad in ([], [1, -1]):
            with pytest.raises((InputError, InvalidOption)):
                ws.prompt(bad, sampling=GREEDY)
        for start in (-1, 3):
            with pytest.raises(InvalidOption, match="query_start"):
                ws.prompt([1, 2, 3], sampling=GREEDY, query_start=start)


def test_a_prompt_of_the_template_is_read_as_one(plain: Callable[[], Workspace]) -> None:
    with plain() as ws, plain() as other:
        model = ws._engine.core.model
        with ChatTemplates(model) as templates:
            applied = templates.apply([QUESTION])
        tokens = model.vocab.tokenize(applied.prompt)
        answer = ws.prompt(tokens, sampling=GREEDY, max_tokens=8, applied=applied, query_start=0)
        expected = other.chat([QUESTION], sampling=GREEDY, max_tokens=8).result()
        assert answer.tokens == expected.tokens and answer.message == expected.message
        assert np.array_equal(ws.history(), other.history()) and len(ws.turns()) == 1


def test_processors_of_logits_and_stopping_criteria_see_all_tokens(plain: Callable[[], Workspace]) -> None:
    with plain() as ws:
        seen: list[int] = []

        def only_rain(tokens: Any, logits: Any) -> Any:
            seen.append(len(tokens))
            logits[:] = -np.inf
            logits[rain] = 0
            return logits

        (rain,) = ws._engine.core.model.vocab.tokenize(" rain").tolist()
        prompt = ws._engine.core.model.vocab.tokenize("It will")
        stop = [lambda tokens, _: len(tokens) == len(prompt) + 3]
        for answer in (
            ws.prompt(prompt, sampling=GREEDY, logits_processors=[only_rain], stopping_criteria=stop),
            None,
        ):
            if answer is not None:
                assert answer.text == " rain rain rain"
        result = ws.chat([QUESTION], sampling=GREEDY, logits_processors=[only_rain], max_tokens=2).result()
        assert result.text == " rain rain" and seen[0] == len(prompt)


def test_a_system_prompt_that_is_there_is_not_rendered_again(plain: Callable[[], Workspace]) -> None:
    engine = plain.__self__  # type: ignore[attr-defined]
    with engine.workspace(system="Be brief.") as ws:
        ws.ask("Why?", sampling=GREEDY, max_tokens=1).result()
        kept = text_of(ws).index("<|im_start|>user")
        n = next(n for n in range(ws.n_tokens) if len(_text(ws, n)) == kept)
        ws.truncate(n)
        ws.ask("Where?", sampling=GREEDY, max_tokens=1).result()
        assert text_of(ws).startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>"
        )


def _text(ws: Workspace, n: int) -> str:
    return ws._engine.core.model.vocab.detokenize(ws.history()[:n]).decode()
