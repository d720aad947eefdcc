"""A workspace as a picture: its blocks by position, where they lie, and how often each was recalled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import StoreFailed, WorkspaceError

if TYPE_CHECKING:
    from ..store.names import Place
    from ..store.root import Root

FORMATS: Final = (".png", ".svg", ".pdf")
COLORS: Final = {"disk": "tab:blue", "tokens": "tab:orange", "pinned": "tab:red"}
PER_LINE: Final = 64  # characters of the text
MAX_LINES: Final = 32
MAX_BARS: Final = 2000  # of the picture


@dataclass(frozen=True, slots=True)
class MapBlock:
    """One block of the history."""

    start: int  # token position
    count: int  # tokens
    tier: str  # "disk", or "tokens" if only its token ids are left
    pinned: bool
    recalls: int  # ever


def map_of(root: Root, place: Place) -> list[MapBlock]:
    """The blocks of a stored workspace in history order. Raises StoreError."""
    from ..store.append import read_heat, workspace_row
    from ..store.content import iter_blocks
    from ..store.location import Tier
    from ..store.tables import PINS

    with root.family(place.family, read_only=True) as family, family.catalog.snapshot() as db:
        row = workspace_row(db, place.workspace)
        pins = [(pin.start, pin.end) for pin in PINS.rows(db, "workspace=?", (row.id,))]
        recalls = {heat.number: heat.total for heat in read_heat(db, row.lineage)}
        return [
            MapBlock(
                block.start,
                block.count,
                "tokens" if block.tier == Tier.TOKENS else "disk",
                any(start < block.end and block.start < end for start, end in pins),
                recalls.get(block.number, 0),
            )
            for block in iter_blocks(db, row.lineage)
        ]


def map_lines(blocks: Sequence[MapBlock]) -> Iterator[str]:
    """The map as text: a character for each block, or for several where there are many."""
    if not blocks:
        yield "the workspace is empty"
        return
    groups = _groups(blocks, PER_LINE * MAX_LINES)
    n_each = len(groups[0])
    width = len(f"{blocks[-1].start:,}")
    each = "a block" if n_each == 1 else f"{n_each} blocks, with the most recalled one's count"
    yield f"{len(blocks):,} blocks; a character is {each}"
    yield "on disk: . never recalled, 1-9 times, + more; only tokens: - never, a-i times, * more; P pinned"
    for i in range(0, len(groups), PER_LINE):
        line = groups[i : i + PER_LINE]
        yield f"{line[0][0].start:>{width},}  {''.join(map(_character, line))}"


def draw(path: Path, name: str, blocks: Sequence[MapBlock]) -> None:
    """Writes the picture. Raises WorkspaceError without matplotlib or for another format, StoreFailed."""
    if path.suffix.lower() not in FORMATS:
        hint = f"End it with {' or '.join(FORMATS)}."
        raise WorkspaceError(f"{str(path)!r} is no name of a picture: it tells no format", hint=hint)
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise WorkspaceError(
            "a picture is drawn by matplotlib, which is not installed",
            hint="Install it with `pip install matplotlib`, or leave the file out for a map in text.",
        ) from None

    figure = Figure(figsize=(11, 4), layout="constrained")
    counts, tiers = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    bars = [_joined(group) for group in _groups(blocks, MAX_BARS)]
    starts, widths = [b.start for b in bars], [b.count for b in bars]
    colors = [COLORS["pinned" if b.pinned else b.tier] for b in bars]
    counts.bar(starts, [b.recalls for b in bars], widths, align="edge", color=colors)
    counts.set(ylabel="times recalled", title=f"workspace {name}: {len(blocks):,} blocks")
    tiers.bar(starts, [1] * len(bars), widths, align="edge", color=colors)
    tiers.set(xlabel="token position", yticks=())
    counts.legend(handles=[Patch(color=color, label=label) for label, color in COLORS.items()])
    try:
        figure.savefig(path)
    except OSError as error:
        raise StoreFailed(path, error.strerror or str(error), hint="Choose another place.") from None


def _groups(blocks: Sequence[MapBlock], n_most: int) -> list[Sequence[MapBlock]]:
    """At most `n_most` runs of equally many blocks; the last may be shorter."""
    n_each = max(-(-len(blocks) // n_most), 1)
    return [blocks[i : i + n_each] for i in range(0, len(blocks), n_each)]


def _joined(group: Sequence[MapBlock]) -> MapBlock:
    """A group as one block: as often recalled as the most recalled one of it."""
    return MapBlock(
        group[0].start,
        sum(block.count for block in group),
        "tokens" if all(block.tier == "tokens" for block in group) else "disk",
        any(block.pinned for block in group),
        max(block.recalls for block in group),
    )


def _character(group: Sequence[MapBlock]) -> str:
    block = _joined(group)
    n = block.recalls
    if block.pinned:
        return "P"
    if block.tier == "tokens":
        return "-" if n == 0 else "*" if n > 9 else chr(ord("a") + n - 1)
    return "." if n == 0 else "+" if n > 9 else str(n)
