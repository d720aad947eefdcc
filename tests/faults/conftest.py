"""A folder for stores that are killed and damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Not made yet. In RAM where there is such a place: a kill leaves there what was written, too, and syncs
    cost nothing."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path / "case"
        return
    with tempfile.TemporaryDirectory(dir=shm, prefix="kvmem-faults-") as name:
        yield Path(name) / "case"
