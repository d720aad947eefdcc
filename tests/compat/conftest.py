"""Servers for the tests in this folder, and what they share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]

from servers import Server, our_server  # noqa: E402

_STOCK_SERVER = os.environ.get("KVMEM_STOCK_SERVER", "")


@pytest.fixture(scope="session")
def stock_program() -> Path:
    """A stock llama-server of the pinned source (scripts/build_stock server)."""
    if not _STOCK_SERVER:
        pytest.skip("KVMEM_STOCK_SERVER is not set")
    return Path(_STOCK_SERVER)


@pytest.fixture(scope="session")
def ours(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`kvmem serve` with the small model, for tests that do not mind what others have asked."""
    with our_server(smollm2, tmp_path_factory.mktemp("ours")) as server:
        yield server
