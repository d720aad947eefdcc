"""From an exported file to a workspace: nothing of it is visible before all of it was checked."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvmem_llama.errors import ExportDamaged, FormatTooNew, KvmemError

from .append import AddedBlock, Addition, Heat, append, put_heat, put_pins, workspace_row
from .binding import Binding
from .bundle import BundleReader
from .disk_records import DiskRecords
from .export import FORMAT, record_name
from .family import Family, FamilyPaths, create_family, remove_folder
from .family_disk import open_disk
from .lineage import new_workspace
from .location import Location
from .lock import try_lock
from .names import Place, checked_name, new_id
from .root import IMPORT, Root
from .rows import StepRow, WorkspaceRow
from .tables import STEPS, WORKSPACES, Db

_ROWS: Final = 256  # of the index written at once


@dataclass(frozen=True, slots=True)
class _Manifest:
    name: str
    policy: str
    system: str | None
    created: float
    n_tokens: int
    n_blocks: int
    binding: Binding
    pins: list[tuple[int, int]]


def import_workspace(
    root: Root,
    path: Path,
    name: str | None = None,
    *,
    binding: Binding | None = None,
    segment_records: int = 64,
) -> Place:
    """Makes a workspace of the file at `path`, in a family of its own.

    name: None: the one it had. binding: what it must fit; None: anything. segment_records: see open_disk.
    Raises ExportDamaged, FormatTooNew, WorkspaceMismatch, InvalidName, WorkspaceExists, StoreFull or
    StoreFailed; then there is no new workspace.
    """
    fd = root.files.open(path, os.O_RDONLY)
    try:
        bundle = BundleReader(root.files, fd, path)
        manifest = _manifest(bundle, path)
        if binding is not None:
            manifest.binding.check(binding)
        name = checked_name(manifest.name if name is None else name)
        with root.renaming(name):
            pass  # an error that can be told now need not wait for the end
        place = Place(new_id(), new_id())
        with _hidden_folder(root, place) as folder:
            create_family(folder, place.family, manifest.binding, root.files)
            family = Family(folder, root.files, durability=root.durability, read_only=False)
            try:
                _fill(family, place, name, bundle, manifest, segment_records)
                family.catalog.checkpoint()
            finally:
                family.close()
            root.files.at("import.filled")
            with root.renaming(name) as names:
                root.files.rename(folder, root.folder / place.family)
                root.files.sync_dir(root.folder)
                root.files.at("import.after")
                names[name] = place
        return place
    finally:
        root.files.close(fd)


# -- private


@contextmanager
def _hidden_folder(root: Root, place: Place) -> Iterator[Path]:
    """A folder that nobody looks at and nobody sweeps while this process is alive. It is gone at the end,
    unless it got another name."""
    folder = root.folder / f"{IMPORT}{place.family}"
    locks = FamilyPaths(folder).locks
    with root.quiet():  # whoever sweeps is not
        root.files.mkdir(folder)
        root.files.mkdir(locks)
        lock = try_lock(root.files, locks / "import.lock")
        assert lock is not None
    try:
        yield folder
    finally:
        lock.remove()
        if root.files.exists(folder):
            with suppress(KvmemError):
                remove_folder(root.files, folder)


def _fill(
    family: Family, place: Place, name: str, bundle: BundleReader, manifest: _Manifest, segment_records: int
) -> None:
    row = WorkspaceRow(
        place.workspace, name, 0, 0, 0, manifest.policy, manifest.system, manifest.created, time.time()
    )
    row = family.catalog.write(lambda db: new_workspace(db, row), "import")
    ids = np.frombuffer(bundle.whole("tokens.i32", 4 * manifest.n_tokens), "<i4").astype(np.int32)
    at = _copy_records(family, place, bundle, manifest, segment_records)
    _copy_index(family, row.lineage, bundle, manifest.n_blocks)
    blocks, heat = _blocks(bundle, manifest, at)
    steps = _steps(bundle, row.lineage, manifest.n_tokens)
    bundle.finish()

    def run(db: Db) -> None:
        if blocks:
            append(db, place.workspace, Addition(0, ids, blocks, None, row.used))
        STEPS.insert(db, steps)
        now = workspace_row(db, place.workspace)
        WORKSPACES.insert(db, [replace(now, n_steps=len(steps))], replace=True)
        put_heat(db, row.lineage, heat)
        put_pins(db, place.workspace, manifest.pins)

    family.catalog.write(run, "import")


def _copy_records(
    family: Family, place: Place, bundle: BundleReader, manifest: _Manifest, segment_records: int
) -> dict[int, Location]:
    """-> where the records of the blocks that have one are now."""
    disk = open_disk(family, place.workspace, segment_records=segment_records)
    records = DiskRecords(disk, durable=family.durability == "full")
    found: dict[int, Location] = {}
    try:
        for number in range(manifest.n_blocks):
            if bundle.next_is(record_name(number)):
                record = np.empty(manifest.binding.record_nbytes, np.uint8)
                bundle.into(record_name(number), record)
                found[number] = records.write(record)
                family.files.at("import.record")
        records.sync()
    finally:
        records.close()
    return found


def _copy_index(family: Family, lineage: int, bundle: BundleReader, n_blocks: int) -> None:
    row_nbytes = family.binding.index_shape.row_nbytes
    waiting = np.empty(0, np.uint8)
    number = 0
    for piece in bundle.pieces("index.f16", n_blocks * row_nbytes):
        waiting = np.concatenate([waiting, piece])
        n = len(waiting) // row_nbytes
        if n >= _ROWS or number + n == n_blocks:
            rows = waiting[: n * row_nbytes].view("<f2").reshape(n, -1)
            family.index.put(lineage, 0, number, rows)
            waiting, number = waiting[n * row_nbytes :], number + n


def _manifest(bundle: BundleReader, path: Path) -> _Manifest:
    if not bundle.begins_with("manifest.json"):
        raise ExportDamaged(
            path, "it does not begin as one does",
            hint="Nothing was imported. Give a file that `kvmem workspace export` made, or copy it again.",
        )  # fmt: skip
    try:
        facts: dict[str, Any] = json.loads(bundle.whole("manifest.json"))
        found = int(facts["format"])
        if found > FORMAT:
            raise FormatTooNew(path, found, FORMAT)
        manifest = _Manifest(
            name=str(facts["name"]),
            policy=str(facts["policy"]),
            system=None if facts["system"] is None else str(facts["system"]),
            created=float(facts["created"]),
            n_tokens=int(facts["n_tokens"]),
            n_blocks=int(facts["n_blocks"]),
            binding=Binding.from_json(json.dumps(facts["binding"])),
            pins=[(int(start), int(end)) for start, end in facts["pins"]],
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise bundle.damaged(f"its manifest cannot be read: {error}") from error
    n, size = manifest.n_tokens, manifest.binding.block_size
    if n < 0 or not -(-n // size) <= manifest.n_blocks <= n:
        raise bundle.damaged(f"{n} tokens in {manifest.n_blocks} blocks of {size}")
    if any(not 0 <= start < end <= n for start, end in manifest.pins):
        raise bundle.damaged("a pin lies outside of the history")
    return manifest


def _blocks(
    bundle: BundleReader, manifest: _Manifest, at: dict[int, Location]
) -> tuple[list[AddedBlock], list[Heat]]:
    blocks, heat = [], []
    end = 0
    for number, facts in enumerate(_lines(bundle, "blocks.jsonl")):
        try:
            start, count, origin = int(facts["start"]), int(facts["count"]), int(facts["origin"])
            mean = bytes.fromhex(facts["mean_xxh"])
            text = None if facts["text"] is None else str(facts["text"])
            recent, total = float(facts["heat"][0]), int(facts["heat"][1])
            is_sound = start == end and 0 < count <= manifest.binding.block_size and len(mean) == 16
            is_sound = is_sound and origin in (0, 1, 2) and facts["kv"] is (number in at)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            raise bundle.damaged(f"block {number} cannot be read: {error}") from error
        if not is_sound:
            raise bundle.damaged(f"block {number} at token {start} with {count} tokens does not fit")
        blocks.append(AddedBlock(number, start, count, at.get(number), mean, origin, text))
        if total > 0:
            heat.append(Heat(number, recent, total, 0))
        end = start + count
    if len(blocks) != manifest.n_blocks or end != manifest.n_tokens:
        raise bundle.damaged(f"its {len(blocks)} blocks end at token {end} of {manifest.n_tokens}")
    return blocks, heat


def _steps(bundle: BundleReader, lineage: int, n_tokens: int) -> list[StepRow]:
    steps: list[StepRow] = []
    end = 0
    for number, facts in enumerate(_lines(bundle, "steps.jsonl")):
        try:
            step = StepRow(
                lineage, number, str(facts["kind"]), int(facts["start"]), int(facts["end"]),
                int(facts["query_start"]), str(facts["answer"]), int(bool(facts["closed"])),
                str(facts["scorer"]), str(facts["options"]), float(facts["time"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise bundle.damaged(f"step {number} cannot be read: {error}") from error
        if step.start != end or not end <= step.query_start <= step.end <= n_tokens or step.end == end:
            raise bundle.damaged(f"step {number} from token {step.start} to {step.end} does not fit")
        steps.append(step)
        end = step.end
    return steps


def _lines(bundle: BundleReader, name: str) -> Iterator[dict[str, Any]]:
    for line in bundle.whole(name).splitlines():
        try:
            facts = json.loads(line)
        except ValueError as error:
            raise bundle.damaged(f"{name} cannot be read: {error}") from error
        if not isinstance(facts, dict):
            raise bundle.damaged(f"{name} holds something else than rows")
        yield facts
