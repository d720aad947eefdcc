"""Which requests go into the next batch, and how many tokens of each. Pure: no llama.cpp, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pending request as the composer sees it."""

    n: int  # tokens still asked for, at least 1
    decode: bool  # an answer's token, rather than a piece of a prefill
    last_served: int  # number of the last batch that held tokens of its task; -1: none yet


def compose(candidates: Sequence[Candidate], n_batch: int) -> list[tuple[int, int]]:
    """Pieces of the next batch -> [(index of the candidate, tokens taken >= 1)], at most `n_batch` tokens.

    Decode requests first, whole; the rest of the batch is shared evenly by the prefill requests, and what
    one cannot use goes to the others. Both kinds always advance: when answers alone would fill the batch,
    one token is kept for prefill, and whoever waited longest goes first, so nobody waits for ever.
    """
    if len(candidates) == 1:  # most often, and once for every token of an answer
        return [(0, min(candidates[0].n, n_batch))]
    order = sorted(range(len(candidates)), key=lambda i: candidates[i].last_served)
    decodes = [i for i in order if candidates[i].decode]
    prefills = [i for i in order if not candidates[i].decode]
    if n_batch == 1 and order:
        return [(order[0], 1)]

    pieces: list[tuple[int, int]] = []
    room = n_batch
    room_for_decodes = n_batch - 1 if prefills else n_batch
    for i in decodes:
        take = min(candidates[i].n, room_for_decodes)
        if not take:
            break
        pieces.append((i, take))
        room -= take
        room_for_decodes -= take
    return pieces + _share(prefills, candidates, room)


def _share(indices: Sequence[int], candidates: Sequence[Candidate], room: int) -> list[tuple[int, int]]:
    """`room` tokens over the requests at `indices`, which stand in the order of their waiting.

    Each gets the same number, or all it asks for if that is less; tokens left over go to those that have
    waited longest.
    """
    wanted = [candidates[i].n for i in indices]
    low, high = 0, room  # the largest level with sum(min(wanted, level)) <= room lies in low..high
    while low < high:
        level = (low + high + 1) // 2
        if sum(min(n, level) for n in wanted) <= room:
            low = level
        else:
            high = level - 1
    take = [min(n, low) for n in wanted]
    left_over = room - sum(take)
    for place, n in enumerate(wanted):
        if left_over and n > take[place]:
            take[place] += 1
            left_over -= 1
    return [(i, n) for i, n in zip(indices, take, strict=True) if n]
