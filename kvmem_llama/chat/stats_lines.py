"""The state of memory in people's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .rows import wrapped
from .toolbar import counted, size, tokens_per_second

if TYPE_CHECKING:
    from ..memory.report import StepResult
    from ..policies.policy import MemoryStats
    from ..store.tiered import TierStats

_NAME_WIDTH: Final = 22
_TIMES: Final = {  # of a step, by its phases
    "read_s": "reading",
    "query_s": "looking at the question",
    "score_s": "scoring blocks",
    "select_s": "selecting blocks",
    "apply_s": "bringing them in view",
    "refresh_s": "evaluating them anew",
    "replay_s": "replaying the question",
    "summary_s": "summarizing",
    "decode_s": "answering",
    "total_s": "in all",
}


def stats_lines(stats: MemoryStats, last: StepResult | None) -> list[str]:
    """Groups of facts; what is zero and rarely otherwise is left out. last: the newest answer."""
    lines = [
        "history",
        *_fact("tokens", f"{stats.n_tokens:,} in {counted(stats.n_blocks, 'block')}"),
        *_rare("read ahead", stats.n_orphans, "block", "of a step that was interrupted"),
        *_rare("pinned", len(stats.pins), "range", "of tokens, see /pin"),
        "view",
        *_fact("tokens in view", f"{stats.n_resident:,} of at most {stats.n_view:,}"),
        *_fact("cells in use", f"{stats.n_cells_used:,}, by all open workspaces"),
        *_rare("out of view", stats.n_hidden, "token", "whose cells are not used for others yet"),
        f"memory ({stats.policy})",
        *_fact("stored, with forks", f"{counted(stats.n_records, 'block')}, {size(stats.store_bytes)}"),
        *_fact("index", _index(stats)),
    ]
    if stats.score:
        lines += _fact("blocks are found by", stats.score)
    lines += _rare("not found by heads", stats.n_without_rows, "block", "until computed again")
    lines += _rare("computed again", stats.n_recomputed, "block", "whose rows were lost")
    if stats.tiers is not None:
        lines += _tiers(stats.tiers)
    if last is not None:
        lines += _answer(last)
    if stats.hint:
        lines += wrapped(stats.hint)
    return lines


def _index(stats: MemoryStats) -> str:
    parts = [f"{name} {round(n, 1):,g}" for name, n in stats.index_bytes_per_token.items()]
    return size(stats.index_bytes) + (f"; bytes a token: {', '.join(parts)}" if parts else "")


def _tiers(tiers: TierStats) -> Iterator[str]:
    yield "RAM and disk"
    pinned = ", which a GPU reads without a copy" if tiers.is_pinned else ""
    yield from _fact("in RAM", f"{counted(tiers.n_host, 'block')}{pinned}")
    waiting = f"; {tiers.n_pending:,} still to be written" if tiers.n_pending else ""
    yield from _fact("on disk", f"{counted(tiers.n_disk, 'block')}, {size(tiers.disk_bytes)}{waiting}")
    yield from _rare("as tokens only", tiers.n_tokens, "block", "computed again when recalled")
    taken = f"{tiers.n_hits:,} from RAM, {tiers.n_reads:,} from disk"
    yield from _fact("blocks fetched", taken)
    yield from _rare("damaged on disk", tiers.n_damaged, "block", "see /verify")
    yield from _rare("dropped from RAM", tiers.n_evicted, "block", "by all open workspaces")
    yield from _rare("fallen to tokens", tiers.n_fallen, "block", "as the disk budget was full")
    if tiers.n_flush_waits or tiers.n_put_waits:
        waits = f"{tiers.n_flush_waits:,} times to be safe ({tiers.flush_wait_seconds:.3f} s)"
        yield from _fact("waited for the disk", f"{waits}, {tiers.n_put_waits:,} times for room in RAM")


def _answer(last: StepResult) -> Iterator[str]:
    yield "the last answer"
    for name, seconds in last.timings.items():
        if seconds > 0:
            yield from _fact(_TIMES.get(name, name.removesuffix("_s").replace("_", " ")), f"{seconds:.3f} s")
    if (speed := tokens_per_second(last)) is not None:
        yield from _fact("speed", f"{speed:.1f} tokens/s")


def _rare(name: str, n: int, noun: str, what: str) -> list[str]:
    return _fact(name, f"{counted(n, noun)} {what}") if n else []


def _fact(name: str, value: str) -> list[str]:
    return wrapped(value, f"  {name:<{_NAME_WIDTH}}  ", " " * (_NAME_WIDTH + 4))
