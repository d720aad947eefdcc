"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..sse import Event
from .answer import AnswerState, Ended, Head, Piece, oai_error
from .completion import final_json
from .probs import probs_json


class OaiChat:
    """See answer.Format."""

    ends_with_done = True

    def partial(self, head: Head, state: AnswerState, piece: Piece) -> list[Event]:
        deltas: list[dict[str, Any]] = []
        if piece.is_first or piece.progress is not None:
            deltas.append({"role": "assistant", "content": None})
        if piece.delta is not None:
            deltas.append(piece.delta.to_dict())
        chunks = [self._chunk(head, [_choice(state.index, delta)]) for delta in deltas]
        if not chunks:
            return []
        if piece.delta is not None and piece.probs is not None:
            after = head.generation.sampling.post_sampling_probs
            probs = probs_json([piece.probs], after_sampling=after)
            chunks[-1]["choices"][0]["logprobs"] = {"content": probs}
        if piece.timings is not None and (piece.delta is not None or piece.progress is not None):
            chunks[-1]["timings"] = piece.timings
        if piece.progress is not None:
            chunks[-1]["prompt_progress"] = piece.progress
        return [Event(chunk) for chunk in chunks]

    def last(self, head: Head, state: AnswerState, final: Ended) -> list[Event]:
        end = {"finish_reason": finish_reason(final), "index": final.index, "delta": {}}
        chunks = [self._chunk(head, [end])]
        if head.generation.include_usage:
            chunks.append(self._chunk(head, []) | {"usage": final.usage})
        chunks[-1] |= {"timings": final.timings} | final.extra
        if head.generation.verbose:
            chunks[0]["__verbose"] = final_json(head, final)
        return [Event(chunk) for chunk in chunks]

    def whole(self, head: Head, finals: Sequence[Ended]) -> Any:
        first = finals[0]
        found = {
            "choices": [self._whole(head, final) for final in finals],
            "created": head.now(),
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "object": "chat.completion",
            "usage": first.usage,
            "id": head.id,
        } | first.extra
        if head.generation.verbose:
            found["__verbose"] = final_json(head, first)
        return found | {"timings": first.timings}

    def error(self, body: Mapping[str, Any]) -> Event:
        return oai_error(body)

    def _whole(self, head: Head, final: Ended) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "finish_reason": finish_reason(final),
            "index": final.index,
            "message": final.message.to_dict(),
        }
        if final.probs:
            after = head.generation.sampling.post_sampling_probs
            choice["logprobs"] = {"content": probs_json(final.probs, after_sampling=after)}
        return choice

    def _chunk(self, head: Head, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": head.now(),
            "id": head.id,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "object": "chat.completion.chunk",
        }


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"finish_reason": None, "index": index, "delta": delta}


def finish_reason(final: Ended) -> str:
    if not final.has_ended:
        return "length"
    return "tool_calls" if final.message.tool_calls else "stop"
