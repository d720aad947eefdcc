"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvmem_llama.engine.answer_parser import ParsedMessage, ToolCall

from ..sse import Event
from .answer import AnswerState, Ended, Head, Piece


class Anthropic:
    """See answer.Format."""

    ends_with_done = False

    def partial(self, head: Head, state: AnswerState, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if piece.is_first:
            message: dict[str, Any] = {
                "id": head.id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": head.model,
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _input_usage(state.n_prompt, state.n_cached) | {"output_tokens": 0},
            }
            events.append(_event("message_start", message=message))
        delta = piece.delta
        if delta is None:
            return events
        if delta.reasoning_content:
            if not state.has_thinking:
                state.has_thinking = True
                events.append(_start(0, {"type": "thinking", "thinking": ""}))
            events.append(_delta(0, {"type": "thinking_delta", "thinking": delta.reasoning_content}))
        if delta.content:
            index = int(state.has_thinking)
            if not state.has_text:
                state.has_text = True
                events.append(_start(index, {"type": "text", "text": ""}))
            events.append(_delta(index, {"type": "text_delta", "text": delta.content}))
        if delta.tool_call is not None:
            events += _call(state, delta.tool_call)
        return events

    def last(self, head: Head, state: AnswerState, final: Ended) -> list[Event]:
        events: list[Event] = []
        blocks = 0
        if state.has_thinking:
            events.append(_delta(0, {"type": "signature_delta", "signature": ""}))
            blocks += 1
        blocks += int(state.has_text) + len(final.message.tool_calls)
        events += [_event("content_block_stop", index=i) for i in range(blocks)]
        delta = {"stop_reason": _stop_reason(final), "stop_sequence": final.stopping_word or None}
        events.append(_event("message_delta", delta=delta, usage={"output_tokens": final.n_decoded}))
        return [*events, _event("message_stop")]

    def whole(self, head: Head, finals: Sequence[Ended]) -> Any:
        found = [self._whole(head, final) for final in finals]
        return found[0] if len(found) == 1 else found

    def error(self, body: Mapping[str, Any]) -> Event:
        return Event(dict(body["error"]), "error")

    def _whole(self, head: Head, final: Ended) -> dict[str, Any]:
        return {
            "id": head.id,
            "type": "message",
            "role": "assistant",
            "content": _blocks(final.message),
            "model": head.model,
            "stop_reason": _stop_reason(final),
            "stop_sequence": final.stopping_word or None,
            "usage": _input_usage(final.n_prompt, final.n_cached) | {"output_tokens": final.n_decoded},
        } | final.extra


def _blocks(message: ParsedMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _call(state: AnswerState, call: ToolCall) -> list[Event]:
    events: list[Event] = []
    index = int(state.has_thinking) + int(state.has_text) + call.index
    if call.name:
        # Clients build the block from this one: without an input some of them refuse it.
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        events.append(_start(index, block))
    if call.arguments:
        events.append(_delta(index, {"type": "input_json_delta", "partial_json": call.arguments}))
    return events


def _input_usage(n_prompt: int, n_cached: int) -> dict[str, Any]:
    return {"cache_read_input_tokens": n_cached, "input_tokens": n_prompt - n_cached}


def _stop_reason(final: Ended) -> str:
    if not final.has_ended:
        return "max_tokens"
    return "tool_use" if final.message.tool_calls else "end_turn"


def _event(name: str, **data: Any) -> Event:
    return Event({"type": name} | data, name)


def _start(index: int, block: dict[str, Any]) -> Event:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return _event("content_block_delta", index=index, delta=delta)
