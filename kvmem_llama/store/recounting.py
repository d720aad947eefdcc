"""Rows that are missing altogether: numbers are set to what is there, histories get their ends again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvmem_llama.errors import CatalogDamaged

from .content import END, N_WORKSPACES, read_tokens, spans
from .family import Family
from .head import Head
from .names import new_id
from .rows import LineageRow, MetaRow, StepRow, WorkspaceRow
from .tables import BLOCKS, LINEAGES, META, PINS, SEGMENTS, STEPS, WORKSPACES, BadRow, Db
from .verify import Finding


def mend_workspaces(family: Family, finding: Finding) -> bool:
    """A history that no workspace ends with gets one again. If there is none, all of it is in others, too."""

    def run(db: Db) -> bool:
        rows = list(WORKSPACES.rows(db))
        ids, heads = {row.id for row in rows}, {row.lineage for row in rows}
        lineages = list(LINEAGES.rows(db))
        lost = [row for row in lineages if row.id not in heads and _is_an_end(db, row, lineages)]
        owners = {row.owner for row in SEGMENTS.rows(db) if row.owner is not None} - ids
        for row in lost:
            id = owners.pop() if len(owners) == len(lost) == 1 else new_id()
            last = next(BLOCKS.rows(db, "lineage=?", (row.id,), "ORDER BY number DESC LIMIT 1"), None)
            n_tokens = row.own_start if last is None else last.end
            read_tokens(db, row.id, 0, n_tokens)
            commits = Head(family.files, family.paths.locks, id).read()
            fresh = WorkspaceRow(
                id, f"recovered {id}", row.id, n_tokens, commits, "kvmem", None, row.created, row.created
            )
            WORKSPACES.insert(db, [recounted(db, fresh)])
        META.insert(db, [MetaRow(N_WORKSPACES, str(len(rows) + len(lost)))], replace=True)
        return True

    return _repaired(family, run)


def mend_count(family: Family, finding: Finding) -> bool:
    """Pins that are missing are given up. A step that is missing becomes one without its answer."""
    found = finding.row
    assert isinstance(found, WorkspaceRow)

    def run(db: Db) -> bool:
        row = WORKSPACES.one(db, "id=?", (found.id,))
        if row is None:
            return False
        WORKSPACES.insert(db, [recounted(db, row)], replace=True)
        return True

    return _repaired(family, run)


def recounted(db: Db, row: WorkspaceRow) -> WorkspaceRow:
    """The row with the numbers of pins and steps there are, after gaps between steps were filled."""
    n_pins = sum(1 for _ in PINS.rows(db, "workspace=?", (row.id,)))
    parts = spans(db, row.lineage)
    where = "lineage=? AND number>=? AND number<?"
    steps = [
        step
        for part in parts
        for step in STEPS.rows(db, where, (part.lineage, *part.steps), "ORDER BY number")
    ]
    n_shared = max((part.steps[1] for part in parts if part.steps[1] != END), default=0)
    number = end = 0
    for step in [*steps, None]:
        start = row.n_tokens if step is None else step.start
        n_missing = max(n_shared - number, int(end < start)) if step is None else step.number - number
        if not 0 <= n_missing <= start - end:
            raise BadRow(f"{n_missing} steps are missing between the tokens {end} and {start}")
        for i in range(n_missing):  # where one ended and the next began is not known
            owner = next(p.lineage for p in parts if p.steps[0] <= number < p.steps[1])
            until = end + 1 if i < n_missing - 1 else start
            STEPS.insert(db, [StepRow(owner, number, "step", end, until, until, "", 0, "", "{}", 0.0)])
            number, end = number + 1, until
        if step is not None:
            number, end = step.number + 1, step.end
    return replace(row, n_steps=number, n_pins=n_pins)


# -- private


def _repaired(family: Family, run: Callable[[Db], bool]) -> bool:
    """Whether `run` could mend it; what cannot be told from the rows that are there stays as it is."""
    try:
        return family.catalog.write(run, "repair")
    except CatalogDamaged:
        return False


def _is_an_end(db: Db, lineage: LineageRow, lineages: list[LineageRow]) -> bool:
    """It holds more than those that refer to it use: this is kept for a workspace only."""
    children = [row for row in lineages if row.parent == lineage.id]
    n_used = max((child.parent_blocks for child in children), default=-1)
    last = next(BLOCKS.rows(db, "lineage=?", (lineage.id,), "ORDER BY number DESC LIMIT 1"), None)
    return not children or (last is not None and last.number >= n_used)
