"""OpenAI's text completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..sse import Event
from .answer import AnswerState, Ended, Head, Piece, oai_error
from .completion import final_json, partial_json
from .probs import probs_json


class OaiCompletion:
    """See answer.Format."""

    ends_with_done = True

    def partial(self, head: Head, state: AnswerState, piece: Piece) -> list[Event]:
        logprobs = None
        if piece.probs is not None:
            after = head.generation.sampling.post_sampling_probs
            logprobs = {"content": probs_json([piece.probs], after_sampling=after)}
        choice = {"text": piece.text, "index": state.index, "logprobs": logprobs, "finish_reason": None}
        found = _object(head, [choice])
        if head.generation.verbose:
            found["__verbose"] = partial_json(head, state, piece)
        if piece.timings is not None:
            found["timings"] = piece.timings
        if piece.progress is not None:
            found["prompt_progress"] = piece.progress
        return [Event(found)]

    def last(self, head: Head, state: AnswerState, final: Ended) -> list[Event]:
        return [Event(self._final(head, final))]

    def whole(self, head: Head, finals: Sequence[Ended]) -> Any:
        found = [self._final(head, final) for final in finals]
        for other in found[1:]:
            found[0]["choices"] += other["choices"]
        return found[0]

    def error(self, body: Mapping[str, Any]) -> Event:
        return oai_error(body)

    def _final(self, head: Head, final: Ended) -> dict[str, Any]:
        generation, logprobs = head.generation, None
        if final.probs and not generation.stream:
            after = generation.sampling.post_sampling_probs
            logprobs = {"content": probs_json(final.probs, after_sampling=after)}
        choice = {
            "text": "" if generation.stream else final.content,
            "index": final.index,
            "logprobs": logprobs,
            "finish_reason": "stop" if final.has_ended else "length",
        }
        found = _object(head, [choice]) | {"usage": final.usage} | final.extra
        if generation.verbose:
            found["__verbose"] = final_json(head, final)
        return found | {"timings": final.timings}


def _object(head: Head, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "choices": choices,
        "created": head.now(),
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "object": "text_completion",
        "id": head.id,
    }
