"""A few of llama.cpp's own tests of its server, run against `kvmem serve`.

KVMEM_STOCK_SERVER_TESTS: their folder, tools/server/tests of the pinned source.
All of them: scripts/soak server_tests.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from server_tests import Scope, our_program, run_server_tests
from tiny_smol import write_tiny_smol

_TESTS = os.environ.get("KVMEM_STOCK_SERVER_TESTS", "")


def test_a_subset_passes(smollm2: Path, tmp_path: Path) -> None:
    if not _TESTS:
        pytest.skip("KVMEM_STOCK_SERVER_TESTS is not set")
    tiny = write_tiny_smol(smollm2, tmp_path / "tiny.gguf")
    subset = Scope.read().subset
    outcomes = run_server_tests(Path(_TESTS), our_program(tmp_path), tiny, tmp_path, subset)
    assert len(outcomes) == len(subset)
    failed = [test for test, how in outcomes.items() if how != "passed"]
    assert not failed, (tmp_path / "server_tests.log").read_text(errors="replace")[-4000:]


def test_the_subset_is_in_scope() -> None:
    scope = Scope.read()
    assert not [test for test in scope.subset if scope.why_not(test)]
