"""What a request says of the memory it is answered in, and prompts that ask for what stands in the middle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvmem_llama.engine.sampling_params import SamplingParams
from kvmem_llama.errors import InvalidName
from kvmem_llama.memory.recall_params import RecallParams
from kvmem_llama.server import infill
from kvmem_llama.server.asked import Constraints, MemoryRequest
from kvmem_llama.server.chat_request import chat_request
from kvmem_llama.server.errors import ApiError
from kvmem_llama.server.flags import ServerOptions
from kvmem_llama.server.schema import Generation
from kvmem_llama.settings import Settings

OWNER = "a" * 24


def test_a_workspace_is_named_in_the_body_or_in_a_header() -> None:
    assert MemoryRequest.of({}, None, "").name is None
    assert MemoryRequest.of({"kvmem": {"workspace": "notes"}}, "other", "").name == "notes"
    with pytest.raises(ApiError, match=r"Field 'kvmem\.report': must be true or false, but is string"):
        MemoryRequest.of({"kvmem": {"report": "yes"}}, None, "")
    sent = "Müller 🦙".encode().decode("latin-1")  # as the bytes of a header are read
    assert MemoryRequest.of({}, sent, "").name == "Müller 🦙"
    assert MemoryRequest.of({}, "M\xfcller", "").name == "Müller"
    found = MemoryRequest.of({"kvmem": None}, "notes", OWNER)
    assert found.name == f"key-{OWNER}/notes"


def test_what_is_recalled_may_be_chosen_for_one_request() -> None:
    body = {"kvmem": {"recall": {"query_long": "newest", "refresh": 64}, "report": True}}
    found = MemoryRequest.of(body, None, "")
    assert found.recall == RecallParams(query_long="newest", refresh=64)
    assert found.report


@pytest.mark.parametrize(
    "value",
    [5, [], {"workspace": 5}, {"recall": 5}, {"recall": {"stickiness": 7}}, {"recall": {"query_long": []}}],
)
def test_what_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        MemoryRequest.of({"kvmem": value}, None, "")
    assert caught.value.code == 400
    assert "kvmem" in caught.value.message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"reprot": True}, "Field 'kvmem': unknown key 'reprot'; it can have workspace, recall, report"),
        (
            {"recall": {"scanlimit": 0}},
            "Field 'kvmem.recall': unknown key 'scanlimit'; it can have query_long,",
        ),
    ],
)
def test_a_misspelled_key_is_refused_with_those_there_are(value: Any, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        MemoryRequest.of({"kvmem": value}, None, "")
    assert caught.value.code == 400 and caught.value.message.startswith(said)


def test_the_workspace_of_another_key_cannot_be_named() -> None:
    with pytest.raises(InvalidName):
        MemoryRequest.of({}, f"key-{OWNER}/notes", "")


@pytest.mark.parametrize(
    "wanted, schema",
    [
        ({"type": "json_object"}, {}),
        ({"type": "json_object", "schema": {"const": 1}}, {"const": 1}),
        ({"type": "json_object", "schema": 123}, 123),  # what is none is refused by the template
        ({"type": "json_schema", "json_schema": {"schema": {"const": 1}}}, {"const": 1}),
        ({"type": "text"}, None),
    ],
)
def test_the_schema_of_an_answer_is_passed_on(wanted: Any, schema: Any) -> None:
    state: Any = SimpleNamespace(options=ServerOptions(), settings=Settings(), template_kwargs={})
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": wanted}
    assert chat_request(body, state).options.json_schema == schema


def test_without_jinja_a_schema_is_a_grammar_of_the_whole_answer() -> None:
    state: Any = SimpleNamespace(options=ServerOptions(), settings=Settings(jinja=False), template_kwargs={})
    body = {"messages": [{"role": "user", "content": "Hi"}], "json_schema": {"const": "42"}}
    options = chat_request(body, state).options
    assert options.json_schema is None
    assert options.grammar.startswith('root ::= "\\"42\\""')


def test_ends_that_are_ignored_are_shown_as_biases() -> None:
    vocab: Any = SimpleNamespace(eogs=(2, 5))
    prompt: Any = SimpleNamespace(applied=None)

    def shown(**sampling: Any) -> Any:
        generation = Generation(sampling=SamplingParams(**sampling))
        return Constraints.of(vocab, generation, None, prompt).settings(generation, prompt)["logit_bias"]

    assert shown(logit_bias=((1, 0.5),)) == [{"bias": 0.5, "token": 1}]
    assert shown(ignore_eos=True) == [{"bias": None, "token": 2}, {"bias": None, "token": 5}]


class Letters:
    n_tokens = 1000
    add_bos = True
    bos = 0
    pointer = 0

    def using(self, call: Any) -> Any:
        return call(self.pointer)

    def tokenize(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> Any:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def tokens_of(monkeypatch: pytest.MonkeyPatch, pre: int, suf: int, mid: int, rep: int, sep: int) -> None:
    names = dict(pre=pre, suf=suf, mid=mid, rep=rep, sep=sep)
    binding = SimpleNamespace(
        **{f"llama_vocab_fim_{name}": lambda _vocab, token=token: token for name, token in names.items()}
    )
    monkeypatch.setattr(infill, "import_binding", lambda: binding)


def ids(n_batch: int = 64, n_ctx: int = 512, **body: Any) -> list[int]:
    vocab: Any = Letters()
    found: list[int] = infill.infill_prompt(body, vocab, n_batch=n_batch, n_predict=8, n_ctx=n_ctx).tolist()
    return found


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_a_middle_is_asked_for_between_prefix_and_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_of(monkeypatch, 900, 901, 902, -1, -1)
    found = ids(input_prefix="ab", input_suffix="yz", prompt="c")
    assert found == [0, 900, *letters("abc"), 901, *letters("yz"), 902]


def test_of_long_texts_what_is_nearest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_of(monkeypatch, 900, 901, 902, -1, -1)
    before, after = "a" * 100 + "b" * 48, "y" * 14 + "z" * 100
    found = ids(input_prefix=before, input_suffix=after)
    assert found == [0, 900, *letters("b" * 48), 901, *letters("y" * 14), 902]


def test_other_files_come_first_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = [{"filename": "f", "text": "old"}, {"text": "new"}]
    tokens_of(monkeypatch, 900, 901, 902, 903, 904)
    found = ids(input_prefix="a", input_suffix="z", input_extra=extra)
    files = [903, *letters("myproject\n"), 904, *letters("f\nold"), 904, *letters("tmp\nnew")]
    assert found[: len(files)] == files
    assert found[len(files) :][:10] == [904, *letters("filename\n")]
    short = ids(n_ctx=64 + 16 + 5, input_prefix="a", input_suffix="z", input_extra=extra)
    assert short[:5] == letters("name\n")
    tokens_of(monkeypatch, 900, 901, 902, -1, -1)
    assert ids(input_prefix="a", input_suffix="z", input_extra=extra)[:5] == letters("\n\n---")


def test_a_model_that_cannot_and_texts_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens_of(monkeypatch, -1, 901, -1, -1, -1)
    with pytest.raises(ApiError, match=r"prefix token is missing\. middle token is missing\. ") as caught:
        ids(input_prefix="a", input_suffix="z")
    assert caught.value.code == 501
    tokens_of(monkeypatch, 900, 901, 902, -1, -1)
    bodies: list[dict[str, Any]] = [
        {"input_suffix": "z"},
        {"input_prefix": "a"},
        {"input_prefix": 5, "input_suffix": "z"},
        {"input_prefix": "a", "input_suffix": "z", "prompt": 5},
        {"input_prefix": "a", "input_suffix": "z", "input_extra": {}},
        {"input_prefix": "a", "input_suffix": "z", "input_extra": [{}]},
        {"input_prefix": "a", "input_suffix": "z", "input_extra": [{"text": "a", "filename": 5}]},
    ]
    for body in bodies:
        with pytest.raises(ApiError) as caught:
            ids(**body)
        assert caught.value.code == 400
