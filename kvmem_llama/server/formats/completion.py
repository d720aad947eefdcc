"""llama-server's own /completion and /infill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..sse import Event
from .answer import AnswerState, Ended, Head, Piece, oai_error
from .probs import probs_json


class Completion:
    """See answer.Format."""

    ends_with_done = False

    def partial(self, head: Head, state: AnswerState, piece: Piece) -> list[Event]:
        return [Event(partial_json(head, state, piece))]

    def last(self, head: Head, state: AnswerState, final: Ended) -> list[Event]:
        return [Event(final_json(head, final))]

    def whole(self, head: Head, finals: Sequence[Ended]) -> Any:
        found = [final_json(head, final) for final in finals]
        return found[0] if len(found) == 1 else found

    def error(self, body: Mapping[str, Any]) -> Event:
        return oai_error(body)


def partial_json(head: Head, state: AnswerState, piece: Piece) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": state.index,
        "content": piece.text,
        "tokens": [piece.token],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": piece.n_decoded,
        "tokens_evaluated": state.n_prompt,
    }
    if piece.timings is not None:
        found["timings"] = piece.timings
    if piece.progress is not None:
        found["prompt_progress"] = piece.progress
    if piece.probs is not None:
        after = head.generation.sampling.post_sampling_probs
        found["completion_probabilities"] = probs_json([piece.probs], after_sampling=after)
    return found


def final_json(head: Head, final: Ended) -> dict[str, Any]:
    generation = head.generation
    found: dict[str, Any] = {
        "index": final.index,
        "content": "" if generation.stream else final.content,
        "tokens": list(final.tokens) if generation.return_tokens and not generation.stream else [],
        "id_slot": final.id_slot,
        "stop": True,
        "model": head.model,
        "tokens_predicted": final.n_decoded,
        "tokens_evaluated": final.n_prompt,
        "generation_settings": final.settings(),
        "prompt": final.prompt(),
        "has_new_line": final.has_new_line,
        "truncated": final.truncated,
        "stop_type": final.stop_type,
        "stopping_word": final.stopping_word,
        "tokens_cached": final.n_in_cells,
        "timings": final.timings,
    } | final.extra
    if final.probs and not generation.stream:
        after = generation.sampling.post_sampling_probs
        found["completion_probabilities"] = probs_json(final.probs, after_sampling=after)
    return _chosen(found, generation.response_fields) if generation.response_fields else found


def _chosen(found: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields that were asked for; `a/b` is the field b of a."""
    chosen: dict[str, Any] = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            chosen[path] = value
    return chosen
