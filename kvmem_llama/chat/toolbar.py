"""The last line of the screen: where the chat is, and the state of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

from .seats import Seat

if TYPE_CHECKING:
    from ..memory.report import StepResult
    from ..policies.policy import MemoryStats

_BETWEEN: Final = " · "
_UNITS: Final = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K"))


def bar_text(seat: Seat, columns: int) -> str:
    """`workspace main · 412k tokens · view 18k/32k · recalled 37 blocks (9 new) · 41 tokens/s · ...`, or as
    much of it as fits."""
    parts = [f"workspace {seat.label}", f"{short(seat.workspace.n_tokens)} tokens"]
    if seat.stats is not None:
        parts.append(f"view {short(seat.stats.n_resident)}/{short(seat.stats.n_view)}")
    if seat.last is not None and seat.last.recalls:
        parts.append(recalled_text(seat.last))
    if seat.last is not None and (speed := tokens_per_second(seat.last)) is not None:
        parts.append(f"{speed:.0f} tokens/s")
    if seat.stats is not None:
        parts += tier_texts(seat.stats)
    while len(parts) > 1 and cell_len(_BETWEEN.join(parts)) >= columns:
        parts.pop()
    return _BETWEEN.join(parts)


def recalled_text(result: StepResult) -> str:
    """Blocks that the newest recall selected, and those of them that were not in cells before it."""
    selected = [block for block in result.recalls[-1].blocks if block.why == "selected"]
    n_new = sum(not block.resident for block in selected)
    return f"recalled {counted(len(selected), 'block')} ({n_new} new)"


def tier_texts(stats: MemoryStats) -> list[str]:
    """Memory of each tier; that of the cells in use is as large as that of as many stored tokens."""
    if not stats.n_records:
        return []
    record = stats.store_bytes / stats.n_records
    per_token = record * stats.n_blocks / stats.n_tokens if stats.n_tokens else 0
    parts = [f"cells {size(stats.n_cells_used * per_token)}"]
    if stats.tiers is None:
        return [*parts, f"RAM {size(stats.store_bytes)}"]
    parts += [f"RAM {size(stats.tiers.n_host * record)}", f"disk {size(stats.tiers.disk_bytes)}"]
    if stats.tiers.n_tokens:
        parts.append(f"{stats.tiers.n_tokens:,} blocks as tokens")
    return parts


def tokens_per_second(result: StepResult) -> float | None:
    """Of the answer; None if there is none to speak of."""
    seconds = result.timings.get("decode_s", 0.0)
    return result.n_generated / seconds if result.n_generated and seconds > 0 else None


def counted(n: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def short(n: int) -> str:
    """1234 as 1.2k."""
    if n < 1000:
        return str(n)
    for unit, name in ((1_000_000, "M"), (1000, "k")):
        if n >= unit:
            return f"{n / unit:.1f}{name}" if n < 10 * unit else f"{n // unit}{name}"
    raise AssertionError


def size(n_bytes: float) -> str:
    """Bytes in the largest unit (powers of 1024) of which there is one."""
    for unit, name in _UNITS:
        if n_bytes >= unit:
            return f"{n_bytes / unit:.1f}{name}"
    return f"{n_bytes:.0f}B"
