"""OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvmem_llama.engine.answer_parser import ToolCall

from ..sse import Event
from .answer import AnswerState, Ended, Head, Piece, oai_error, random_id


class Responses:
    """See answer.Format."""

    ends_with_done = False

    def partial(self, head: Head, state: AnswerState, piece: Piece) -> list[Event]:
        events: list[Event] = []
        begun = {"id": state.response_id, "object": "response", "status": "in_progress"}
        if not state.created and (piece.is_first or piece.progress is not None):
            state.created = True
            events.append(_event("response.created", response=begun))
            events.append(_event("response.in_progress", response=begun))
        elif piece.progress is not None:
            events.append(_event("response.in_progress", response=begun))
        delta = piece.delta
        if delta is not None:
            if delta.reasoning_content:
                events += self._reasoning(state, delta.reasoning_content)
            if delta.content:
                events += self._text(state, delta.content)
            if delta.tool_call is not None:
                events += self._call(state, delta.tool_call)
        if events and piece.timings is not None:
            events[-1].data["timings"] = piece.timings
        if events and piece.progress is not None:
            events[-1].data["prompt_progress"] = piece.progress
        return events

    def last(self, head: Head, state: AnswerState, final: Ended) -> list[Event]:
        message, events, output = final.message, list[Event](), list[dict[str, Any]]()
        if message.reasoning_content:
            item = _reasoning_item(state.reasoning_id, message.reasoning_content)
            events.append(_event("response.output_item.done", item=item))
            output.append(item)
        if message.content:
            part, where = _text_part(message.content), {"item_id": state.message_id}
            item = {
                "type": "message",
                "status": "completed",
                "id": state.message_id,
                "content": [part],
                "role": "assistant",
            }
            events.append(_event("response.output_text.done", **where, text=message.content))
            events.append(_event("response.content_part.done", **where, part=part))
            events.append(_event("response.output_item.done", item=item))
            output.append(item)
        for call in message.tool_calls:
            item = _call_item(call, call.arguments, "completed")
            events.append(_event("response.output_item.done", item=item))
            output.append(item)
        response = {
            "id": state.response_id,
            "object": "response",
            "created_at": head.now(),
            "status": "completed",
            "model": head.model,
            "output": output,
            "usage": _usage(final),
        } | final.extra
        events.append(_event("response.completed", response=response, timings=final.timings))
        return events

    def whole(self, head: Head, finals: Sequence[Ended]) -> Any:
        found = [self._whole(head, final) for final in finals]
        return found[0] if len(found) == 1 else found

    def error(self, body: Mapping[str, Any]) -> Event:
        return oai_error(body)

    def _whole(self, head: Head, final: Ended) -> dict[str, Any]:
        message, output = final.message, list[dict[str, Any]]()
        if message.reasoning_content:
            item = _reasoning_item(random_id("rs_"), message.reasoning_content)
            output.append(item | {"status": "completed"})
        if message.content:
            output.append(
                {
                    "content": [_text_part(message.content)],
                    "id": random_id("msg_"),
                    "role": "assistant",
                    "status": "completed",
                    "type": "message",
                }
            )
        output += [_call_item(call, call.arguments, "completed") for call in message.tool_calls]
        now = head.now()
        return {
            "completed_at": now,
            "created_at": now,
            "id": random_id("resp_"),
            "model": head.model,
            "object": "response",
            "output": output,
            "status": "completed",
            "usage": _usage(final),
        } | final.extra

    def _reasoning(self, state: AnswerState, text: str) -> list[Event]:
        events: list[Event] = []
        if not state.has_thinking:
            state.has_thinking = True
            item = {
                "id": state.reasoning_id,
                "summary": [],
                "type": "reasoning",
                "content": [],
                "encrypted_content": "",
                "status": "in_progress",
            }
            events.append(_event("response.output_item.added", item=item))
        return [*events, _event("response.reasoning_text.delta", delta=text, item_id=state.reasoning_id)]

    def _text(self, state: AnswerState, text: str) -> list[Event]:
        events: list[Event] = []
        if not state.has_text:
            state.has_text = True
            item = {
                "content": [],
                "id": state.message_id,
                "role": "assistant",
                "status": "in_progress",
                "type": "message",
            }
            part = {"type": "output_text", "text": ""}
            events.append(_event("response.output_item.added", item=item))
            events.append(_event("response.content_part.added", item_id=state.message_id, part=part))
        return [*events, _event("response.output_text.delta", item_id=state.message_id, delta=text)]

    def _call(self, state: AnswerState, call: ToolCall) -> list[Event]:
        events: list[Event] = []
        if call.name:
            state.call_id = call.id
            events.append(_event("response.output_item.added", item=_call_item(call, "", "in_progress")))
        if call.arguments:
            events.append(
                _event(
                    "response.function_call_arguments.delta",
                    delta=call.arguments,
                    item_id=f"fc_{state.call_id}",
                )
            )
        return events


def _event(name: str, **data: Any) -> Event:
    return Event({"type": name} | data, name)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def _reasoning_item(id: str, text: str) -> dict[str, Any]:
    return {
        "id": id,
        "summary": [],
        "type": "reasoning",
        "content": [{"text": text, "type": "reasoning_text"}],
        "encrypted_content": "",
    }


def _call_item(call: ToolCall, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": status,
        "arguments": arguments,
        "call_id": f"call_{call.id}",
        "name": call.name,
    }


def _usage(final: Ended) -> dict[str, Any]:
    return {
        "input_tokens": final.n_prompt,
        "output_tokens": final.n_decoded,
        "total_tokens": final.n_decoded + final.n_prompt,
        "input_tokens_details": {"cached_tokens": final.n_cached},
    }
