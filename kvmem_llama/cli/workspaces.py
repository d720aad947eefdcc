"""`kvmem workspace`: lists, shows and manages durable workspaces. No model is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ..errors import InputError, KvmemError, StoreError, StoreFailed
from ..settings import Settings
from .grouped import Json, adder, emit_object, number, print_table
from .messages import note
from .options import PlainGroup

if TYPE_CHECKING:
    from ..store.disk_records import DiskRecords
    from ..store.holding import Holding
    from ..store.names import Place
    from ..store.root import Root

app = typer.Typer(cls=PlainGroup, add_completion=False, rich_markup_mode=None)

_READS: Final = ("data_dir", "verbose")  # options of commands that only look
_WRITES: Final = ("data_dir", "durability", "segment_records", "verbose")
_DAMAGED: Final = 8  # exit code of a check that found something, as of StoreDamaged

Name = Annotated[str, typer.Argument(metavar="NAME", help="of the workspace", show_default=False)]
_command = adder(app)


@app.callback(invoke_without_command=True)
def _manage(context: typer.Context) -> None:
    """Manage durable workspaces."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@_command("ls", _READS)
def list_them(settings: Settings, as_json: Json = False) -> None:
    """List the workspaces."""
    root = _root(settings)
    found: list[dict[str, Any]] = [
        {
            "name": item.row.name if item.row else None,
            "id": item.place.workspace or item.place.family,
            "tokens": item.row.n_tokens if item.row else None,
            "tokens_read_ahead": _n_ahead(root, item.place) if item.row else None,
            "model": item.binding.model_name if item.binding else None,
            "used": item.row.used if item.row else None,
            "error": str(item.error) if item.error else None,
        }
        for item in root.list()
    ]
    if as_json:
        emit_object(workspaces=found)
        return
    if not found:
        note(f"no workspaces in {settings.data_path}")
        return
    rows = [
        (
            w["name"] or f"({w['id']})",
            _count(w["tokens"]) + (f" (+{_count(n)} read ahead)" if (n := w["tokens_read_ahead"]) else ""),
            w["model"] or w["error"] or "",
            _when(w["used"]),
        )
        for w in found
    ]
    print_table(("name", "tokens", "model", "used"), rows, right=(1,))


@_command("show", _READS)
def show(settings: Settings, name: Name, as_json: Json = False) -> None:
    """Show what a workspace holds.

    Tokens read ahead are those of a read that was interrupted: they are on disk, and not read again when the
    same text is.
    """
    from ..store.ahead import n_tokens_ahead
    from ..store.append import workspace_row
    from ..store.content import iter_blocks, iter_steps, spans
    from ..store.location import Origin, Tier
    from ..store.tables import PINS

    root = _root(settings)
    place = root.find(name)
    with root.family(place.family, read_only=True) as family, family.catalog.snapshot() as db:
        row = workspace_row(db, place.workspace)
        blocks = list(iter_blocks(db, row.lineage))
        n_ahead = n_tokens_ahead(db, row.id)
        steps = Counter(step.kind for step in iter_steps(db, row.lineage))
        pins = [[pin.start, pin.end] for pin in PINS.rows(db, "workspace=?", (row.id,), "ORDER BY number")]
        binding, relatives = family.binding, len(family.workspaces()) - 1
        indexed = family.tokens.describe(spans(db, row.lineage), blocks)
    tiers = Counter(block.tier for block in blocks)
    origins = Counter(block.origin for block in blocks)
    facts: dict[str, Any] = {
        "name": row.name,
        "id": row.id,
        "tokens": row.n_tokens,
        "tokens_read_ahead": n_ahead,
        "blocks": len(blocks),
        "blocks_on_disk": tiers[Tier.DISK],
        "blocks_as_tokens": tiers[Tier.TOKENS],
        "blocks_recomputed": origins[Origin.RECOMPUTED],
        "blocks_carried": origins[Origin.CARRIED],
        "record_bytes": tiers[Tier.DISK] * binding.record_nbytes,
        "read_ahead_bytes": n_ahead // binding.block_size * binding.record_nbytes,
        "heads_indexed": 0 if indexed is None else len(indexed.heads),
        "blocks_without_rows_of_heads": 0 if indexed is None else indexed.n_missing,
        "steps": dict(steps),
        "pins": pins,
        "relatives": relatives,
        "policy": row.policy,
        "system_prompt": row.system,
        "model": binding.model_name,
        "fingerprint": binding.model,
        "block_size": binding.block_size,
        "cache_types": [binding.cache_type_k, binding.cache_type_v],
        "raw_k_type": binding.raw_k_type,
        "created": row.created,
        "used": row.used,
        "folder": str(root.folder / place.family),
    }
    if as_json:
        emit_object(**facts)
        return
    counts = {key: number(key, value) for key, value in facts.items() if type(value) is int}
    shown = (
        facts
        | counts
        | {
            "created": _when(row.created),
            "used": _when(row.used),
            "steps": ", ".join(f"{n} {kind}" for kind, n in steps.items()),
            "pins": ", ".join(f"{start}..{end}" for start, end in pins),
            "cache_types": ", ".join(facts["cache_types"]),
        }
    )
    print_table(
        ("", ""), [(key.replace("_", " "), str(v)) for key, v in shown.items() if v not in ("", None)]
    )


@_command("map", _READS)
def map_it(
    settings: Settings,
    name: Name,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="picture that is written; none: text", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw where the blocks of a workspace lie, and how often each was recalled.

    A picture (.png, .svg, .pdf) needs matplotlib.
    """
    from .workspace_map import draw, map_lines, map_of

    root = _root(settings)
    blocks = map_of(root, root.find(name))
    if file is not None:
        draw(file, name, blocks)
    if as_json:
        emit_object(name=name, blocks=[dataclasses.asdict(block) for block in blocks])
    elif file is not None:
        note(f"{file}: {len(blocks):,} blocks")
    else:
        for line in map_lines(blocks):
            print(line)


@_command("fork", _WRITES)
def fork(
    settings: Settings,
    name: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="name of the new one", show_default=False)],
    as_json: Json = False,
) -> None:
    """Make a workspace with the same history.

    What the two have in common is stored once.
    """
    from ..store.forking import fork_workspace

    with _opened(settings, name) as (holding, records):
        fork_workspace(holding, records, new).close()
    _done(as_json, f"{new}: a fork of {name}", name=new, forked_from=name)


@_command("rm", _WRITES)
def remove(
    settings: Settings,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="of workspaces", show_default=False)],
    as_json: Json = False,
) -> None:
    """Delete workspaces, without asking.

    Their KV, index, tokens and text. If one is not there, none is deleted.
    """
    from ..store.deleting import delete_workspace

    root = _root(settings)
    places = {name: root.find(name) for name in names}
    deleted: list[str] = []
    try:
        for name, place in places.items():
            delete_workspace(root, place)
            deleted.append(name)
    except KvmemError:
        if deleted:
            note("deleted: " + ", ".join(deleted))
        raise
    _done(as_json, "deleted: " + ", ".join(deleted), deleted=deleted)


@_command("rename", _WRITES)
def rename(
    settings: Settings,
    name: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="its new name", show_default=False)],
    as_json: Json = False,
) -> None:
    """Give a workspace another name."""
    root = _root(settings)
    root.rename(root.find(name), new)
    _done(as_json, f"{name} is {new} now", name=new, renamed_from=name)


@_command("verify", _WRITES)
def verify(
    settings: Settings,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="of the workspace; none: all", show_default=False)
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="mend what can be mended")] = False,
    as_json: Json = False,
) -> None:
    """Check every byte of a workspace and its forks.

    Exit code 8 if something was found.
    """
    from ..store.repair import verify_family
    from ..store.verify import Report

    root = _root(settings)
    families = root.family_ids() if name is None else [root.find(name).family]
    total = Report()
    for family in families:
        try:
            report = verify_family(root, family, repair=repair)
        except StoreError as error:
            if name is not None:
                raise
            total.add("family", family, f"it was not looked at: {error}")
            continue
        for field in ("n_workspaces", "n_rows", "n_records", "n_index_rows", "n_segments", "n_repaired"):
            setattr(total, field, getattr(total, field) + getattr(report, field))
        total.findings += report.findings
    findings = [{"kind": f.kind, "where": f.where, "what": f.what} for f in total.findings]
    if as_json:
        counts = {f.name: getattr(total, f.name) for f in dataclasses.fields(total) if f.name[:2] == "n_"}
        emit_object(sound=total.is_sound, findings=findings, **counts)
    else:
        if findings:
            print_table(("kind", "where", "what"), [tuple(finding.values()) for finding in findings])
        note(
            f"{total.n_workspaces} workspaces, {total.n_records} records, {total.n_index_rows} index rows, "
            f"{total.n_rows} rows: "
            + ("all as written" if total.is_sound else f"{len(findings)} findings, {total.n_repaired} mended")
        )
    if not total.is_sound:
        raise typer.Exit(_DAMAGED)


@_command("compact", _WRITES)
def compact_it(settings: Settings, name: Name, as_json: Json = False) -> None:
    """Give back disk space that is not needed.

    That of the workspace and its forks.
    """
    from ..store.compact import compact

    with _opened(settings, name) as (holding, records):
        done = compact(holding, records)
    text = f"{name}: {done.bytes_before:,} bytes before, {done.bytes_after:,} after"
    if done.bytes_after >= done.bytes_before:
        text = f"{name}: {done.bytes_after:,} bytes, nothing to give back"
    _done(as_json, text, name=name, **dataclasses.asdict(done))


@_command("export", _WRITES)
def export(
    settings: Settings,
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="that is written", show_default=False)],
    replace: Annotated[bool, typer.Option("--replace", help="a file that is there gives way")] = False,
    as_json: Json = False,
) -> None:
    """Write a workspace to one file."""
    from ..store.export import export_workspace

    if not file.absolute().parent.is_dir():
        raise StoreFailed(file.absolute().parent, "there is no such folder", hint="Make it first.")
    if file.exists() and not replace:
        raise StoreFailed(file, "it is there already", hint="Choose another name, or use --replace.")
    with _opened(settings, name) as (holding, records):
        done = export_workspace(holding, records, file.absolute(), replace=replace)
    text = f"{file}: {done.n_tokens:,} tokens, {done.n_records:,} of {done.n_blocks:,} records"
    _done(as_json, text, name=name, file=str(file), **dataclasses.asdict(done))


@_command("import", _WRITES)
def import_it(
    settings: Settings,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="made by export", show_default=False)],
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="of the workspace; none: as it was", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a workspace of an exported file."""
    from ..store.importing import import_workspace

    if not file.is_file():
        why = "it is no file" if file.exists() else "there is no such file"
        raise InputError(repr(str(file)), why, hint="Give a file that `kvmem workspace export` made.")
    root = _root(settings)
    place = import_workspace(root, file.absolute(), name, segment_records=settings.segment_records)
    found = _name_of(root, place)
    _done(as_json, f"{found}: imported from {file}", name=found, file=str(file))


# -- private


def _root(settings: Settings) -> Root:
    from ..store.root import Root

    return Root(settings.data_path, durability=settings.durability)


@contextlib.contextmanager
def _opened(settings: Settings, name: str) -> Iterator[tuple[Holding, DiskRecords]]:
    """A workspace that is open for writing, without an engine."""
    from ..store.holding import Holding

    root = _root(settings)
    with (
        Holding.open(root, root.find(name)) as holding,
        holding.records(segment_records=settings.segment_records) as records,
    ):
        yield holding, records


def _name_of(root: Root, place: Place) -> str:
    with root.family(place.family, read_only=True) as family:
        return next(row.name for row in family.workspaces() if row.id == place.workspace)


def _n_ahead(root: Root, place: Place) -> int:
    """Tokens read ahead; what cannot be read is told by the list itself."""
    from ..store.ahead import n_tokens_ahead

    with (
        contextlib.suppress(StoreError),
        root.family(place.family, read_only=True) as family,
        family.catalog.snapshot() as db,
    ):
        return n_tokens_ahead(db, place.workspace)
    return 0


def _done(as_json: bool, text: str, **fields: Any) -> None:
    if as_json:
        emit_object(**fields)
    else:
        note(text)


def _count(n: int | None) -> str:
    return "" if n is None else f"{n:,}"


def _when(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
