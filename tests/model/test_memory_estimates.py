"""What a plan says an engine takes is what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
NEAR = 0.10  # of what was measured


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("smollm2", {"n_ctx": 2048}),
        ("smollm2", {"n_ctx": 8192, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}),
        ("gemma3", {"n_ctx": 4096}),
    ],
)
def test_estimated_memory_is_near_to_what_a_process_takes(
    model: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    command = [sys.executable, str(TESTS / "memory_use.py"), str(request.getfixturevalue(model))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, json.dumps(options)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert abs(found["estimated"] / found["measured"] - 1) < NEAR, found
    # The parts that grow with the options are not hidden in the constant ones.
    grown = found["measured"] - found["parts"]["program"] - found["parts"]["mapped"]
    assert grown > found["parts"]["cells"], found
