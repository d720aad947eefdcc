"""What clients of each API are told of an answer. The expected objects are those of llama-server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvmem_llama.engine.answer_parser import MessageDelta, ParsedMessage, ToolCall
from kvmem_llama.engine.sampling_params import SamplingParams
from kvmem_llama.engine.token_probs import TokenProbs
from kvmem_llama.server.formats.answer import AnswerState, Ended, Format, Head, Piece
from kvmem_llama.server.formats.anthropic import Anthropic
from kvmem_llama.server.formats.completion import Completion
from kvmem_llama.server.formats.oai_chat import OaiChat
from kvmem_llama.server.formats.oai_completion import OaiCompletion
from kvmem_llama.server.formats.probs import probs_json, whole_text
from kvmem_llama.server.formats.responses import Responses
from kvmem_llama.server.schema import Generation
from kvmem_llama.server.sse import Event, encode

PROBS = TokenProbs(5, b"Hi", -0.5, ((5, b"Hi", -0.5), (6, b"\xf0\x9f", -1.0)))
CALL = ToolCall("abc", "get", '{"c":1}', 0)


def head(**options: Any) -> Head:
    n_probs = options.pop("n_probs", 0)
    after = options.pop("post_sampling_probs", False)
    sampling = SamplingParams(n_probs=n_probs, post_sampling_probs=after)
    return Head(Generation(sampling, **options), "smol", "b0-x", id="chatcmpl-1", parses=True)


def ended(text: str = "Hi there", **changes: Any) -> Ended:
    found = Ended(
        index=0, content=text, tokens=(5, 7), n_prompt=10, n_cached=4, n_decoded=3, stop_type="eos",
        stopping_word="", has_new_line=False, truncated=False, id_slot=1, timings={"prompt_n": 6},
        message=ParsedMessage(text, "", ()), probs=(), prompt=lambda: "the prompt",
        settings=lambda: {"seed": 1},
    )  # fmt: skip
    return replace(found, **changes)


def state() -> AnswerState:
    return AnswerState(0, n_prompt=10, n_cached=4)


def stream(form: Format, top: Head, pieces: Sequence[Piece], end: Ended) -> list[Event]:
    at = state()
    events = [event for piece in pieces for event in form.partial(top, at, piece)]
    return [*events, *form.last(top, at, end)]


def test_a_completion_names_everything_llama_server_does() -> None:
    found = Completion().whole(head(return_tokens=True, n_probs=1), [ended(probs=(PROBS,))])
    assert found["content"] == "Hi there"
    assert found["tokens"] == [5, 7]
    assert (found["tokens_predicted"], found["tokens_evaluated"], found["tokens_cached"]) == (3, 10, 12)
    assert (found["stop"], found["stop_type"], found["truncated"]) == (True, "eos", False)
    assert (found["prompt"], found["generation_settings"]) == ("the prompt", {"seed": 1})
    assert found["completion_probabilities"][0]["top_logprobs"][0]["bytes"] == [72, 105]


def test_several_completions_are_a_list() -> None:
    found = Completion().whole(head(), [ended(), ended(index=1)])
    assert [one["index"] for one in found] == [0, 1]


def test_only_the_fields_that_are_asked_for() -> None:
    top = head(response_fields=("content", "generation_settings/seed", "no", "content/no"))
    assert Completion().whole(top, [ended()]) == {"content": "Hi there", "generation_settings/seed": 1}


def test_a_streamed_completion_has_its_text_in_the_parts() -> None:
    pieces = [Piece("Hi", 5, 1), Piece(" there", 7, 2, timings={"t": 1}), Piece("", 2, 3)]
    events = stream(Completion(), head(stream=True), pieces, ended())
    assert [event.data["content"] for event in events] == ["Hi", " there", "", ""]
    assert events[0].data == {
        "index": 0, "content": "Hi", "tokens": [5], "stop": False, "id_slot": -1,
        "tokens_predicted": 1, "tokens_evaluated": 10,
    }  # fmt: skip
    assert events[1].data["timings"] == {"t": 1}
    assert events[-1].data["stop"] is True
    assert not Completion().ends_with_done


def test_openais_completions_share_one_object() -> None:
    found = OaiCompletion().whole(head(), [ended(), ended("other", index=1, stop_type="limit")])
    assert [(c["text"], c["finish_reason"]) for c in found["choices"]] == [
        ("Hi there", "stop"),
        ("other", "length"),
    ]
    assert found["usage"] == {
        "completion_tokens": 3, "prompt_tokens": 10, "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    assert (found["object"], found["id"], found["model"]) == ("text_completion", "chatcmpl-1", "smol")


def test_a_chat_says_its_role_first_and_why_it_ended_last() -> None:
    pieces = [
        Piece("Hi", 5, 1, is_first=True),
        Piece(delta=MessageDelta(content="Hi"), probs=PROBS),
        Piece(" there", 7, 2),
        Piece(delta=MessageDelta(content=" there")),
    ]
    top = head(stream=True, include_usage=True, n_probs=1)
    events = [event.data for event in stream(OaiChat(), top, pieces, ended())]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": None}, {"content": "Hi"}, {"content": " there"}, {}]
    assert events[1]["choices"][0]["logprobs"]["content"][0]["id"] == 5
    assert events[3]["choices"][0]["finish_reason"] == "stop"
    assert events[4]["choices"] == []
    assert events[4]["usage"]["total_tokens"] == 13
    assert events[4]["timings"] == {"prompt_n": 6}
    assert OaiChat().ends_with_done


def test_without_usage_the_times_are_in_the_last_chunk() -> None:
    last = OaiChat().last(head(stream=True), state(), ended())
    assert len(last) == 1
    assert last[0].data["timings"] == {"prompt_n": 6}
    assert "usage" not in last[0].data


def test_a_chat_with_tool_calls_ends_with_them() -> None:
    message = ParsedMessage("", "hm", (CALL,))
    choice = OaiChat().whole(head(), [ended("", message=message)])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"c":1}'}
    assert choice["message"]["reasoning_content"] == "hm"
    cut = OaiChat().whole(head(), [ended("", message=message, stop_type="limit")])["choices"][0]
    assert cut["finish_reason"] == "length"


def test_progress_of_reading_comes_with_the_role() -> None:
    progress = {"total": 10, "cache": 4, "processed": 4, "time_ms": 0}
    event = OaiChat().partial(head(stream=True), state(), Piece(progress=progress))[0].data
    assert event["prompt_progress"] == progress
    assert event["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_anthropics_blocks_have_a_beginning_and_an_end() -> None:
    pieces = [
        Piece("x", 5, 1, is_first=True),
        Piece(delta=MessageDelta(reasoning_content="hm")),
        Piece(delta=MessageDelta(content="Hi")),
        Piece(delta=MessageDelta(tool_call=ToolCall("abc", "get", "", 0))),
        Piece(delta=MessageDelta(tool_call=ToolCall("", "", '{"c":1}', 0))),
    ]
    end = ended(message=ParsedMessage("Hi", "hm", (CALL,)))
    events = stream(Anthropic(), head(stream=True), pieces, end)
    assert [(event.name, event.data.get("index")) for event in events] == [
        ("message_start", None),
        ("content_block_start", 0), ("content_block_delta", 0),
        ("content_block_start", 1), ("content_block_delta", 1),
        ("content_block_start", 2), ("content_block_delta", 2),
        ("content_block_delta", 0), ("content_block_stop", 0),
        ("content_block_stop", 1), ("content_block_stop", 2),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    usage = events[0].data["message"]["usage"]
    assert usage == {"cache_read_input_tokens": 4, "input_tokens": 6, "output_tokens": 0}
    assert events[7].data["delta"] == {"type": "signature_delta", "signature": ""}
    assert events[-2].data["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-1].data == {"type": "message_stop"}


def test_anthropics_message_as_a_whole() -> None:
    message = ParsedMessage("Hi", "hm", (CALL, replace(CALL, arguments="{broken")))
    found = Anthropic().whole(head(), [ended(message=message, stop_type="word", stopping_word="END")])
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in found["content"][2:]] == [{"c": 1}, {}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", "END")
    assert Anthropic().whole(head(), [ended(stop_type="limit")])["stop_reason"] == "max_tokens"


def test_events_of_responses_come_in_order() -> None:
    pieces = [
        Piece("x", 5, 1, is_first=True),
        Piece(delta=MessageDelta(reasoning_content="hm")),
        Piece(delta=MessageDelta(content="Hi")),
        Piece(delta=MessageDelta(tool_call=ToolCall("abc", "get", "", 0))),
        Piece(delta=MessageDelta(tool_call=ToolCall("", "", '{"c":1}', 0))),
    ]
    end = ended(message=ParsedMessage("Hi", "hm", (CALL,)))
    events = stream(Responses(), head(stream=True), pieces, end)
    assert [event.name.removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_item.added", "function_call_arguments.delta",
        "output_item.done", "output_text.done", "content_part.done", "output_item.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[8].data["item_id"] == "fc_abc"
    assert events[-1].data["timings"] == {"prompt_n": 6}
    output = events[-1].data["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert all(event.data["type"] == event.name for event in events)


def test_a_response_as_a_whole() -> None:
    found = Responses().whole(head(), [ended(message=ParsedMessage("Hi", "", (CALL,)))])
    assert [item["type"] for item in found["output"]] == ["message", "function_call"]
    assert found["output"][1]["call_id"] == "call_abc"
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 4}
    assert found["id"].startswith("resp_")


def test_an_event_is_framed_as_its_api_does() -> None:
    assert encode([Event({"a": "ü"})]) == 'data: {"a":"ü"}\n\n'.encode()
    assert encode([Event({"a": 1}, "x")]) == b'event: x\ndata: {"a":1}\n\n'
    body = {"error": {"code": 500, "message": "m", "type": "server_error"}}
    assert OaiChat().error(body).encode().startswith(b'data: {"error":')
    assert Anthropic().error(body).encode().startswith(b'event: error\ndata: {"code":500')


def test_probabilities_are_logarithms_or_not() -> None:
    before = probs_json([PROBS], after_sampling=False)[0]
    assert (before["id"], before["token"], before["logprob"]) == (5, "Hi", -0.5)
    assert [top["logprob"] for top in before["top_logprobs"]] == [-0.5, -1.0]
    after = probs_json([PROBS], after_sampling=True)[0]
    assert after["prob"] == pytest.approx(0.6065, abs=1e-4)
    assert "top_probs" in after
    assert "logprob" not in after


def test_a_cut_character_is_left_out_of_a_tokens_text() -> None:
    assert whole_text("aü".encode()) == "aü"
    assert whole_text("aü".encode()[:-1]) == "a"
    assert whole_text("🤗".encode()[:3]) == ""
    assert whole_text(b"\xbc") == "\ufffd"
