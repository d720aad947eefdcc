"""A script as people write them for llama_cpp.Llama: every case in a fresh context, the results as JSON.

    python llama_script.py MODEL OUTPUT [NAME=VALUE ...]     further arguments of Llama

The test runs it twice: as it is, on the stock library, and with its one import of Llama changed.
"""

import json
import sys

import llama_cpp
import numpy as np
from llama_cpp import Llama

MODEL = sys.argv[1]
MORE = {name: int(value) for name, value in (argument.split("=") for argument in sys.argv[3:])}
GREEDY = {"temperature": 0.0}
STORY = "The lighthouse keeper climbed the stairs every evening, lit the lamp and wrote in his diary: "
CHAT = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
LIST = r"""
root ::= "- " word "\n- " word "\n"
word ::= [a-z]{3,12}
"""


def completion(llm):
    return llm(STORY, max_tokens=16, **GREEDY)


def long_prompt(llm):
    """Several batches, and an answer that llama_cpp cuts at the end of its window."""
    return llm.create_completion("\n".join(f"{i}. {STORY}" for i in range(20)), max_tokens=None, **GREEDY)


def token_ids(llm):
    return llm.create_completion(llm.tokenize(STORY.encode()), max_tokens=12, **GREEDY)


def echo_and_suffix(llm):
    return [
        llm("One, two,", max_tokens=8, echo=True, **GREEDY),
        llm("x = ", suffix="y", max_tokens=4, **GREEDY),
    ]


def stop(llm):
    return [
        llm(STORY, max_tokens=64, stop=[".", "\n"], **GREEDY),
        llm("Count: one, two, three,", max_tokens=32, stop="six", **GREEDY),
    ]


def stream(llm):
    return list(llm(STORY, max_tokens=16, stop=["zzz"], stream=True, **GREEDY))


def other_characters(llm):
    """Characters of several tokens."""
    return [
        list(llm("日本の首都は東京です。", max_tokens=16, stream=stream, **GREEDY)) for stream in (True,)
    ] + [llm("Emoji: 😀 😃 😄", max_tokens=16, **GREEDY)]


def logprobs(llm):
    return [
        llm(STORY, max_tokens=8, logprobs=3, **GREEDY),
        llm("One two three", max_tokens=4, logprobs=2, echo=True, **GREEDY),
        list(llm("Red, green,", max_tokens=5, logprobs=2, stream=True, **GREEDY)),
    ]


def penalties(llm):
    return llm(
        "la la la la",
        max_tokens=16,
        repeat_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        **GREEDY,
    )


def bias(llm):
    (token,) = llm.tokenize(b" blue", add_bos=False)
    return llm("The sky is", max_tokens=6, logit_bias={token: 8.0}, **GREEDY)


def grammar(llm):
    form = llama_cpp.LlamaGrammar.from_string(LIST, verbose=False)
    return llm("Two animals:\n", max_tokens=40, grammar=form, **GREEDY)


def processors_and_criteria(llm):
    def no_spaces(ids, scores):
        scores[llm.tokenize(b" the", add_bos=False)] = -np.inf
        return scores

    return llm(
        STORY,
        max_tokens=24,
        logits_processor=llama_cpp.LogitsProcessorList([no_spaces]),
        stopping_criteria=llama_cpp.StoppingCriteriaList([lambda ids, scores: len(ids) > 30]),
        **GREEDY,
    )


def chat(llm):
    answer = llm.create_chat_completion(CHAT, max_tokens=16, **GREEDY)
    more = [*CHAT, answer["choices"][0]["message"], {"role": "user", "content": "And of Italy?"}]
    return [answer, llm.create_chat_completion(more, max_tokens=16, **GREEDY)]


def chat_stream(llm):
    return list(llm.create_chat_completion(CHAT, max_tokens=16, stream=True, **GREEDY))


def chat_logprobs(llm):
    return llm.create_chat_completion(CHAT, max_tokens=6, logprobs=True, top_logprobs=2, **GREEDY)


def json_schema(llm):
    form = {"type": "json_object", "schema": PERSON}
    return [
        llm.create_chat_completion(CHAT, max_tokens=48, response_format=form, **GREEDY),
        llm.create_chat_completion(CHAT, max_tokens=24, response_format={"type": "json_object"}, **GREEDY),
    ]


def tools(llm):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    asked = [{"role": "user", "content": "The weather in Paris for three days?"}]
    return [
        llm.create_chat_completion(asked, tools=[WEATHER], tool_choice=choice, max_tokens=48, **GREEDY),
        list(
            llm.create_chat_completion(
                asked, tools=[WEATHER], tool_choice=choice, max_tokens=48, stream=True, **GREEDY
            )
        ),
    ]


def functionary(llm):
    asked = [{"role": "user", "content": "The weather in Paris for three days?"}]
    return llm.create_chat_completion(asked, tools=[WEATHER], tool_choice="auto", max_tokens=32, **GREEDY)


def other_format(llm):
    return llm.create_chat_completion(CHAT, max_tokens=12, **GREEDY)


def seed(llm):
    """Not asked for, but so it is: the same samplers see the same logits."""
    return [
        llm(STORY, max_tokens=10, seed=7),
        fresh(seed=11)(STORY, max_tokens=10, temperature=1.2, top_k=0, min_p=0.0, typical_p=0.9),
        fresh()(STORY, max_tokens=10, seed=3, mirostat_mode=2),
        fresh()(STORY, max_tokens=10, seed=3, mirostat_mode=1),
    ]


def by_hand(llm):
    """eval, sample and generate, as older scripts use them."""
    llm.eval(llm.tokenize(STORY.encode()))
    found = []
    for _ in range(8):
        found.append(llm.sample(temp=0.0))
        llm.eval(found[-1:])
    tokens = llm.tokenize(b"Names: Anna,")
    generated = []
    for token in llm.generate(tokens, temp=0.0):
        generated.append(token)
        if len(generated) == 8:
            break
    return [found, llm.n_tokens, generated, llm.detokenize(generated).decode()]


def scores(llm):
    tokens = llm.tokenize(STORY.encode())
    llm.eval(tokens)
    logprobs = llm.logits_to_logprobs(llm.scores[: len(tokens)])
    chosen = [float(logprobs[i, token]) for i, token in enumerate(tokens[1:])]
    return [{"token_logprobs": chosen}, len(llm.eval_tokens), len(llm.eval_logits)]


def again(llm):
    """The same prompt, one that goes on from it, and one that leaves it early."""
    return [llm(prompt, max_tokens=8, **GREEDY) for prompt in (STORY, STORY, STORY + "Today", STORY[:40])]


def states(llm):
    llm.eval(llm.tokenize(STORY.encode()))
    state = llm.save_state()
    first = llm("Something else.", max_tokens=4, **GREEDY)
    llm.load_state(state)
    return [first, llm.n_tokens, llm(STORY + "The", max_tokens=8, **GREEDY)]


def cache(llm):
    llm.set_cache(llama_cpp.LlamaRAMCache())
    return [llm(prompt, max_tokens=6, **GREEDY) for prompt in (STORY, "Something else.", STORY)]


def openai_v1(llm):
    done = llm.create_chat_completion_openai_v1(CHAT, max_tokens=4, **GREEDY)
    pieces = llm.create_chat_completion_openai_v1(CHAT, max_tokens=4, stream=True, **GREEDY)
    return [done.model_dump(), [piece.model_dump() for piece in pieces]]


def facts(llm):
    text = b"Hello <|im_end|> world"
    return [
        llm.n_ctx(), llm.n_vocab(), llm.n_embd(), llm.token_bos(), llm.token_eos(), llm.token_nl(),
        llm.tokenize(text), llm.tokenize(text, add_bos=False, special=True), llm.metadata, llm.chat_format,
        llm.detokenize(llm.tokenize(text, special=True), special=True).decode(), llm.n_batch, llm.n_threads,
        llm.tokenizer().encode("abc"), llm.longest_token_prefix([1, 2, 3], [1, 2, 4]),
    ]  # fmt: skip


def names(llm):
    return [name for name in dir(llm) if not name.startswith("_")]


CASES = [
    completion, long_prompt, token_ids, echo_and_suffix, stop, stream, other_characters, logprobs,
    penalties, bias, grammar, processors_and_criteria, chat, chat_stream, chat_logprobs, json_schema, tools,
    functionary, other_format, seed, by_hand, scores, again, states, cache, openai_v1, facts,
    names,
]  # fmt: skip
ARGUMENTS = {
    "logprobs": {"logits_all": True},
    "chat_logprobs": {"logits_all": True},
    "scores": {"logits_all": True},
    "functionary": {"chat_format": "chatml-function-calling"},
    "other_format": {"chat_format": "llama-2"},
}
opened = []


def fresh(**arguments):
    """A context of its own."""
    while opened:
        opened.pop().close()
    opened.append(Llama(MODEL, verbose=False, **MORE, **arguments))
    return opened[-1]


if __name__ == "__main__":
    results = {case.__name__: case(fresh(**ARGUMENTS.get(case.__name__, {}))) for case in CASES}
    fresh().close()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(results, file, default=float)  # numpy.float32
