"""The same requests to a stock llama-server and to ours: equal answers, but for ids, times and a short list.

Always against answers that were recorded from a stock server (record.py); with KVMEM_STOCK_SERVER, the path
of a stock llama-server, also against that one, here and now.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from comparing import HERE, Allowed, allowed_differences, differences, shortened
from servers import FLAGS, Answer, Request, Server, our_server, requests_of, stock_server

REQUESTS = {path.stem.removeprefix("requests_"): path for path in sorted(HERE.glob("requests_*.json"))}
CASES = [(name, request) for name, path in REQUESTS.items() for request in requests_of(path)]
ALLOWED = allowed_differences()

each_request = pytest.mark.parametrize(
    ("name", "request_"), CASES, ids=[f"{name}: {request.id}" for name, request in CASES]
)


class Asked:
    """Answers of one kind of server: each file in order on a fresh server, when it is first wanted."""

    def __init__(self, start: Callable[[Path], Server], folder: Path) -> None:
        self._start, self._folder = start, folder
        self._answers: dict[str, dict[str, Answer]] = {}

    def answer(self, name: str, request: Request) -> Answer:
        if name not in self._answers:
            folder = self._folder / name
            folder.mkdir()
            with self._start(folder) as server:
                self._answers[name] = {one.id: server.ask(one) for one in requests_of(REQUESTS[name])}
        return self._answers[name][request.id]


@pytest.fixture(scope="module")
def ours_asked(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(lambda folder: our_server(smollm2, folder), tmp_path_factory.mktemp("asked"))


@pytest.fixture(scope="module")
def stock_asked(stock_program: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(
        lambda folder: stock_server(stock_program, smollm2, folder), tmp_path_factory.mktemp("stock")
    )


def recorded(name: str, model: Path) -> dict[str, Answer]:
    data = json.loads((HERE / "recorded" / f"{name}.json").read_text(encoding="utf-8"))
    assert data["flags"] == list(FLAGS), "recorded with other flags: run record.py"
    text = json.dumps(data["answers"]).replace("<model>", json.dumps(str(model))[1:-1])
    return {id: Answer.from_json(row) for id, row in json.loads(text).items()}


def unexpected(request: Request, stock: Answer, ours: Answer) -> list[str]:
    path = request.path.partition("?")[0]
    found = differences(request, stock, ours)
    return [str(one) for one in found if not any(rule.holds(path, one.place) for rule in ALLOWED)]


@each_request
def test_ours_answers_as_the_recorded_stock_server(
    name: str, request_: Request, smollm2: Path, ours_asked: Asked
) -> None:
    found = unexpected(request_, recorded(name, smollm2)[request_.id], ours_asked.answer(name, request_))
    assert not found, f"{request_.method} {request_.path} {shortened(request_.body)}\n" + "\n".join(found)


@pytest.mark.parametrize("name", REQUESTS)
def test_ours_answers_as_the_stock_server(name: str, ours_asked: Asked, stock_asked: Asked) -> None:
    found = {
        request.id: unexpected(request, stock_asked.answer(name, request), ours_asked.answer(name, request))
        for request in requests_of(REQUESTS[name])
    }
    assert not {id: what for id, what in found.items() if what}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_recorded_answers_are_those_of_the_pinned_source(name: str) -> None:
    data = json.loads((HERE / "recorded" / f"{name}.json").read_text(encoding="utf-8"))
    pin = tomllib.loads((HERE.parents[1] / "vendor" / "pin.toml").read_text())
    assert data["llama_cpp_commit"] == pin["llama_cpp_commit"], "run tests/compat/record.py"
    assert list(data["answers"]) == [request.id for request in requests_of(REQUESTS[name])]


def test_the_list_of_differences_is_short_and_leaves_out_what_matters() -> None:
    assert len(ALLOWED) <= 15
    assert all(len(rule.why) > 20 for rule in ALLOWED)
    matters = ("/status", "/body/choices/0/finish_reason", "/body/usage/prompt_tokens", "/body/content",
               "/body/choices/0/message/content", "/events/0/1/choices/0/delta/content")  # fmt: skip
    for place in matters:
        held = [rule.at for rule in ALLOWED if re.fullmatch(rule.at, place)]
        assert not held, f"{held} would hide {place}"


def test_every_allowed_difference_is_there(smollm2: Path, ours_asked: Asked) -> None:
    """One that is no more is taken off the list."""
    seen = set[Allowed]()
    for name, request in CASES:
        path = request.path.partition("?")[0]
        stock = recorded(name, smollm2)[request.id]
        for one in differences(request, stock, ours_asked.answer(name, request)):
            seen |= {rule for rule in ALLOWED if rule.holds(path, one.place)}
    assert not [rule for rule in ALLOWED if rule not in seen]


def test_ids_are_unique() -> None:
    for name, path in REQUESTS.items():
        ids = [request.id for request in requests_of(path)]
        assert len(set(ids)) == len(ids), name


def test_a_difference_is_found() -> None:
    """The comparison itself: it sees another value, a missing member, another length and another type."""
    request = Request("", "GET", "/")
    stock = Answer(200, "application/json", {"a": [1, {"b": "x"}], "created": 5, "n": 1, "only": None})
    ours = Answer(200, "application/json", {"a": [1, {"b": "y"}], "created": 9, "n": True, "mine": 1})
    places = {one.place for one in differences(request, stock, ours)}
    assert places == {"/body/a/1/b", "/body/n", "/body/only", "/body/mine"}
    longer = Answer(200, "application/json", {"a": [1]})
    assert [one.place for one in differences(request, Answer(200, "application/json", {"a": []}), longer)]
    events = Answer(200, "text/event-stream", events=(("", {"id": "chatcmpl-" + "A" * 32}),))
    other = Answer(200, "text/event-stream", events=(("", {"id": "chatcmpl-" + "B" * 32}),))
    assert not differences(request, events, other)


def ours_only() -> Iterator[Request]:
    """Requests that a stock server answers with 500, or with 200 though they make no sense."""
    yield Request("no JSON", "POST", "/tokenize", text="{")
    yield Request("no object", "POST", "/tokenize", text="[1]")
    yield Request("no body", "POST", "/tokenize")
    yield Request("NaN", "POST", "/tokenize", text='{"content": NaN}')
    yield Request("deep", "POST", "/tokenize", text='{"content": ' + "[" * 5000 + "]" * 5000 + "}")
    yield Request("text that is a number", "POST", "/tokenize", {"content": 5})
    yield Request("token out of range", "POST", "/tokenize", {"content": ["a", 10**9]})
    yield Request("tokens a text", "POST", "/detokenize", {"tokens": "x"})
    yield Request("negative token", "POST", "/detokenize", {"tokens": [-1]})
    yield Request("message without role", "POST", "/apply-template", {"messages": [{"content": "a"}]})
    yield Request("image", "POST", "/apply-template", {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    })  # fmt: skip
    yield Request("tools a text", "POST", "/apply-template", {"messages": [], "tools": "x"})
    yield Request("unknown reasoning", "POST", "/apply-template", {
        "messages": [{"role": "user", "content": "a"}], "reasoning_format": "x"
    })  # fmt: skip


@pytest.mark.parametrize("request_", list(ours_only()), ids=lambda request: request.id)
def test_what_is_wrong_with_a_request_is_a_400(request_: Request, ours: Server) -> None:
    answer = ours.ask(request_)
    assert answer.status == 400
    assert answer.body["error"]["code"] == 400
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert answer.body["error"]["message"]
