"""A workspace as one file: a tar of plain arrays and lines of JSON. docs/format.md lists its members."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvmem_llama.errors import RecordDamaged, StoreFailed

from .append import Heat, read_heat, workspace_row
from .bundle import BundleWriter, MemberWriter
from .content import (
    Span,
    check_blocks,
    check_steps,
    iter_blocks,
    iter_steps,
    read_pins,
    read_tokens,
    spans,
)
from .holding import Holding
from .index_file import F16
from .location import RecordFiles
from .rows import BlockRow, StepRow, WorkspaceRow
from .small_files import remove_if_there
from .tables import TEXTS

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Exported:
    """What went into the file."""

    n_tokens: int
    n_blocks: int
    n_records: int  # fewer than blocks where KV is gone
    n_damaged: int  # records that could not be read: these blocks keep their tokens
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Content:
    """Everything but records and index, as it was at one moment."""

    row: WorkspaceRow
    parts: list[Span]
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    blocks: list[BlockRow]
    texts: dict[int, str]
    steps: list[StepRow]
    pins: list[tuple[int, int]]
    heat: list[Heat]


def export_workspace(
    holding: Holding, records: RecordFiles, path: Path, *, replace: bool = False
) -> Exported:
    """Writes a workspace to the file `path`, mode 0600; it is there whole, or not at all.

    replace: a file that is there gives way. Raises StoreFull, StoreFailed or CatalogDamaged.
    """
    files = holding.family.files
    if not replace and files.exists(path):
        raise StoreFailed(path, "there is a file with this name", hint="Choose another name.")
    content = _read(holding)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    files.at("export.before")
    fd = files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        try:
            bundle = BundleWriter(files, fd)
            lost, n_damaged = _write(holding, records, content, bundle)
            files.at("export.written")
            files.fsync(fd)
        finally:
            files.close(fd)
        files.rename(fresh, path)
    except BaseException:
        remove_if_there(files, fresh)
        raise
    files.sync_dir(path.parent)
    files.at("export.after")
    n_blocks = len(content.blocks)
    return Exported(content.row.n_tokens, n_blocks, n_blocks - len(lost), n_damaged, bundle.nbytes)


# -- private


def _read(holding: Holding) -> _Content:
    with holding.family.catalog.snapshot() as db:
        row = workspace_row(db, holding.place.workspace)
        blocks = list(iter_blocks(db, row.lineage))
        check_blocks(blocks, row)
        parts = spans(db, row.lineage)
        where = "lineage=? AND number>=? AND number<?"
        steps = list(iter_steps(db, row.lineage))
        check_steps(steps, row)
        return _Content(
            row=row,
            parts=parts,
            tokens=read_tokens(db, row.lineage, 0, row.n_tokens),
            blocks=blocks,
            texts={
                text.number: text.text
                for part in parts
                for text in TEXTS.rows(db, where, (part.lineage, *part.blocks))
            },
            steps=steps,
            pins=read_pins(db, row),
            heat=read_heat(db, row.lineage),
        )


def _write(
    holding: Holding, records: RecordFiles, content: _Content, bundle: BundleWriter
) -> tuple[set[int], int]:
    """-> (numbers of the blocks without a record, how many of these were damaged)."""
    family, row = holding.family, content.row
    manifest = {
        "format": FORMAT,
        "name": row.name,
        "policy": row.policy,
        "system": row.system,
        "created": row.created,
        "n_tokens": row.n_tokens,
        "n_blocks": len(content.blocks),
        "binding": json.loads(family.binding.to_json()),
        "pins": content.pins,
    }
    bundle.whole("manifest.json", json.dumps(manifest).encode())
    bundle.whole("tokens.i32", content.tokens.astype("<i4").tobytes())
    lost: set[int] = set()
    n_damaged = 0
    for block in content.blocks:
        if block.location is None:
            lost.add(block.number)
            continue
        try:
            record = records.read(block.location)
        except RecordDamaged:
            lost.add(block.number)
            n_damaged += 1
            continue
        with bundle.member(record_name(block.number), record.nbytes) as member:
            member.write(record)
        family.files.at("export.record")
    size = len(content.blocks) * family.binding.index_shape.row_nbytes
    with bundle.member("index.f16", size) as member:
        stream = _IndexStream(member, family.binding.index_shape.row_nbytes)
        family.index.load(content.parts, content.blocks, stream)
        stream.pad(len(content.blocks))
    heat = {item.number: (item.recent, item.total) for item in content.heat}
    bundle.whole(
        "blocks.jsonl", lines(_block_line(b, b.number in lost, content, heat) for b in content.blocks)
    )
    bundle.whole("steps.jsonl", lines(_step_line(step) for step in content.steps))
    bundle.finish()
    return lost, n_damaged


def record_name(number: int) -> str:
    """Name of the member that holds the record of a block."""
    return f"records/{number:08}"


def lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """One line of JSON per row."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _block_line(
    block: BlockRow, is_lost: bool, content: _Content, heat: dict[int, tuple[float, int]]
) -> dict[str, Any]:
    return {
        "start": block.start,
        "count": block.count,
        "kv": not is_lost,
        "mean_xxh": block.mean_xxh.hex(),
        "origin": block.origin,
        "text": content.texts.get(block.number),
        "heat": heat.get(block.number, (0.0, 0)),
    }


def _step_line(step: StepRow) -> dict[str, Any]:
    row = dataclasses.asdict(step)
    del row["lineage"], row["number"]
    return row


class _IndexStream:
    """Rows of the index on their way into a member; those that are missing become zeros."""

    def __init__(self, member: MemberWriter, row_nbytes: int) -> None:
        self._member: Final = member
        self._zeros: Final = np.zeros(row_nbytes, np.uint8)
        self._at = 0

    def put(self, first: int, rows: F16) -> None:
        """See index_file.RowSink."""
        self.pad(first)
        self._member.write(np.ascontiguousarray(rows, "<f2").view(np.uint8).reshape(-1))
        self._at += len(rows)

    def pad(self, end: int) -> None:
        while self._at < end:
            self._member.write(self._zeros)
            self._at += 1
