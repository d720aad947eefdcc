"""Grammars, triggers and limits on reasoning over a real vocabulary, and tool calls of a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvmem_llama.engine.grammar import AnswerGrammar, Constraint, GrammarTrigger, ReasoningLimit
from kvmem_llama.engine.model import Model
from kvmem_llama.engine.sampler import Sampler, SamplingParams
from kvmem_llama.engine.templates import ChatTemplates, TemplateOptions, read_template
from kvmem_llama.engine.vocab import Vocab
from kvmem_llama.errors import InvalidOption, OutputMismatch
from kvmem_llama.native import library
from kvmem_llama.settings import Settings
from kvmem_llama.workspace import open_engine

TEMPLATES = Path(__file__).parents[2] / "vendor/build/stock/llama.cpp/models/templates"
HERMES = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
QUESTION = {"role": "user", "content": "What will the weather be in Rome?"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
SCHEMA = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}, "wind": {"enum": ["none", "some"]}},
    "required": ["sunny", "wind"],
}
DIGITS = 'root ::= "<call>" [0-9]+ "</call>"'
WORD = GrammarTrigger("word", "<call>")
THINK = ReasoningLimit("<think>", ("</think>",))


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[Model]:
    library.load()
    model = Model.load(smollm2, Settings())
    yield model
    model.close()


@pytest.fixture(scope="module")
def vocab(model: Model) -> Vocab:
    return model.vocab


def likely(vocab: Vocab, text: str) -> np.ndarray:
    """Logits that want the first token of `text` most, and the rest less and less."""
    logits = np.random.default_rng(3).normal(0, 1, vocab.n_tokens).astype(np.float32)
    logits[vocab.tokenize(text)[0]] = 50
    return logits


class Answer:
    """An answer that grows, and the greedy sampler that is told of it."""

    def __init__(self, vocab: Vocab, **params: object) -> None:
        self.vocab = vocab
        self.sampler = Sampler(vocab, SamplingParams(temp=0, **params))  # type: ignore[arg-type]
        self.text = b""

    def write(self, text: str) -> None:
        for token in self.vocab.tokenize(text):
            self.sampler.accept(int(token))

    def next(self, wanted: str) -> bytes:
        """The piece chosen while the model wants to write `wanted`; it is written."""
        token = self.sampler.sample(likely(self.vocab, wanted))
        self.sampler.accept(token)
        return self.vocab.piece(token)


def test_a_lazy_grammar_holds_from_its_trigger_on(vocab: Vocab) -> None:
    answer = Answer(vocab, grammar=AnswerGrammar(DIGITS, lazy=True, triggers=(WORD,)))
    assert answer.next(" rain") == b" rain"
    answer.write(" or <cal")
    assert answer.next("ami") == b"ami"
    answer.write(" <call>")
    assert answer.next(" rain").isdigit()
    answer.write("</call>")
    assert vocab.is_eog(answer.sampler.sample(likely(vocab, " rain")))
    answer.sampler.close()


def test_a_trigger_can_be_a_pattern_or_a_token(vocab: Vocab) -> None:
    pattern = GrammarTrigger("pattern", "call (<call>)")
    answer = Answer(vocab, grammar=AnswerGrammar(DIGITS, lazy=True, triggers=(pattern,)))
    answer.write("<call>")
    assert answer.next(" rain") == b" rain"
    answer.write(" call <call>")
    assert answer.next(" rain").isdigit()
    answer.sampler.close()
    grammar = 'root ::= "<|im_start|>" [0-9]+'
    word = GrammarTrigger("word", "<|im_start|>")
    token = GrammarTrigger("token", "", int(vocab.tokenize("<|im_start|>")[0]))
    kept = AnswerGrammar(grammar, lazy=True, triggers=(word,), preserved_tokens=("<|im_start|>",))
    for spec in (kept, AnswerGrammar(grammar, lazy=True, triggers=(token,))):
        answer = Answer(vocab, grammar=spec)
        assert answer.next(" rain") == b" rain"
        answer.write("<|im_start|>")
        assert answer.next(" rain").isdigit()
        answer.sampler.close()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (AnswerGrammar("root ::= ("), "cannot parse"),
        (AnswerGrammar("top ::= [a-z]"), "cannot parse"),
        (AnswerGrammar(DIGITS, lazy=True), "trigger"),
        (AnswerGrammar(DIGITS, lazy=True, triggers=(GrammarTrigger("pattern", "("),)), "."),
        (AnswerGrammar(DIGITS, lazy=True, triggers=(GrammarTrigger("token", "", 10**6),)), "no token"),
        (AnswerGrammar(DIGITS, lazy=True, triggers=(GrammarTrigger("smell", "x"),)), "types"),
        (AnswerGrammar(DIGITS, lazy=True, triggers=(GrammarTrigger("word", "<|im_end|>"),)), "preserved"),
        (AnswerGrammar(DIGITS, prefill="call"), "does not allow"),
        (AnswerGrammar(DIGITS, prefill="<|im_end|>"), "does not allow"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(vocab: Vocab, grammar: AnswerGrammar, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        Sampler(vocab, SamplingParams(grammar=grammar))


def test_a_grammar_goes_on_after_what_the_prompt_holds_of_it(vocab: Vocab) -> None:
    answer = Answer(vocab, grammar=AnswerGrammar(DIGITS, prefill="<call>7"))
    assert answer.next(" rain").lstrip(b"<").strip(b"/") in (b"", *(b"%d" % n for n in range(10)))
    answer.sampler.close()


@pytest.mark.parametrize("text", ["<|im_end|>", "x"])
def test_a_token_that_the_grammar_forbids_is_an_error_and_not_the_end_of_the_process(
    vocab: Vocab, text: str
) -> None:
    constraint = Constraint(vocab, AnswerGrammar(DIGITS), None)
    with pytest.raises(OutputMismatch, match="does not allow"):
        constraint.accept(int(vocab.tokenize(text)[0]))
    constraint.close()
    # The token that completes the trigger goes on with what the grammar has no place for.
    lazy = AnswerGrammar('root ::= " t" [0-9]', lazy=True, triggers=(GrammarTrigger("pattern", "( t)"),))
    constraint = Constraint(vocab, lazy, None)
    (the,) = vocab.tokenize(" the")
    with pytest.raises(OutputMismatch):
        constraint.accept(int(the))
    constraint.close()
    constraint.close()


def test_a_lazy_grammar_does_not_see_the_reasoning(vocab: Vocab) -> None:
    grammar = AnswerGrammar(DIGITS, lazy=True, triggers=(WORD,))
    answer = Answer(vocab, grammar=grammar, reasoning=THINK)
    answer.write("<think>I may write <call>")
    assert answer.next(" rain") == b" rain"
    answer.write("</think>")
    assert answer.next(" rain") == b" rain"
    answer.write(" <call>")
    assert answer.next(" rain").isdigit()
    answer.sampler.close()


def test_the_end_of_the_reasoning_can_be_the_trigger(vocab: Vocab) -> None:
    grammar = AnswerGrammar(
        'root ::= "</think>" [0-9]+', lazy=True, triggers=(GrammarTrigger("word", "</think>"),)
    )
    answer = Answer(
        vocab, grammar=grammar, reasoning=ReasoningLimit("<think>", ("</think>",), prefill="<think>")
    )
    assert answer.next(" rain") == b" rain"
    answer.write("</think>")
    assert answer.next(" rain").isdigit()
    answer.sampler.close()


def test_a_reasoning_ends_when_its_budget_is_spent(vocab: Vocab) -> None:
    limit = ReasoningLimit("<think>", ("</think>",), budget=5, message=" Enough.", prefill="<think>")
    answer = Answer(vocab, reasoning=limit)
    wrote = b"".join(answer.next(" rain") for _ in range(40))
    assert wrote.startswith(b" rain" * 5 + b" Enough.</think> rain")
    answer.sampler.close()
    answer = Answer(vocab, reasoning=limit)
    answer.write("I know")
    answer.write("</think>")
    assert b"".join(answer.next(" rain") for _ in range(9)) == b" rain" * 9
    answer.sampler.close()


def test_texts_under_the_grammar_of_a_schema_are_json_of_that_schema(model: Model) -> None:
    with ChatTemplates(model) as templates:
        applied = templates.apply([QUESTION], TemplateOptions(json_schema=SCHEMA))
    assert applied.prompt.endswith(applied.generation_prompt)
    logits = np.random.default_rng(1).normal(0, 3, model.vocab.n_tokens).astype(np.float32)
    for seed in range(4):
        sampler = Sampler(model.vocab, applied.sampling(SamplingParams(seed=seed, top_k=0)))
        text = b""
        while not model.vocab.is_eog(token := sampler.sample(logits)):
            sampler.accept(token)
            text += model.vocab.piece(token)
            assert len(text) < 2000
        sampler.close()
        with applied.open_parser() as parser:
            answer = json.loads(parser.parse(text.decode()).content)
        assert set(answer) == {"sunny", "wind"} and answer["sunny"] in (True, False)
        assert answer["wind"] in ("none", "some")


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="llama.cpp's source is not here")
def test_libllama_takes_the_grammars_of_every_template(model: Model) -> None:
    n = 0
    for path in sorted(TEMPLATES.glob("*.jinja")):
        with ChatTemplates(model, read_template(path)) as templates:
            for options in (
                TemplateOptions(tools=TOOLS),
                TemplateOptions(tools=TOOLS, tool_choice="required"),
                TemplateOptions(json_schema=SCHEMA),
            ):
                applied = templates.apply([QUESTION], options)
                grammar = applied.grammar
                if grammar is None:
                    continue
                # Their markers are tokens in the models they are of, and several tokens in this one.
                kept = {trigger.value for trigger in grammar.triggers if trigger.type == "word"}
                assert all(
                    len(model.vocab.tokenize(word)) > 1 or word in applied.preserved_tokens for word in kept
                )
                Sampler(model.vocab, applied.sampling(SamplingParams())).close()
                n += 1
    assert n > 100


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="llama.cpp's source is not here")
def test_a_small_model_that_begins_to_call_a_tool_ends_the_call(smollm2: Path) -> None:
    """The grammar allows text before a call, and left alone this model writes nothing else."""
    settings, start = Settings(n_ctx=1024, n_threads=2), "<tool_call>\n"
    with open_engine(smollm2, settings) as engine, engine.workspace() as ws:
        model = engine.core.model
        with ChatTemplates(model, read_template(TEMPLATES / f"{HERMES}.jinja")) as templates:
            applied = templates.apply([QUESTION], TemplateOptions(tools=TOOLS, tool_choice="required"))
        assert applied.grammar is not None
        grammar = replace(applied.grammar, prefill=applied.grammar.prefill + start)
        tokens = model.vocab.tokenize(applied.prompt + start)
        sampling = SamplingParams(temp=0, grammar=grammar)
        answer = ws.step(tokens, sampling=sampling, max_tokens=60, stop=["</tool_call>"]).result().text
    with applied.open_parser() as parser:
        (call,) = parser.parse(f"{start}{answer}</tool_call>").tool_calls
    arguments = json.loads(call.arguments)
    assert call.name == "get_weather" and set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
