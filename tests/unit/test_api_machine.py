"""1,000 random calls of the public API; see api_machine.py."""

from __future__ import annotations

import os

from api_machine import WAYS, machine
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

PROFILE = settings(
    max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_thousand_random_calls_leave_every_workspace_as_it_should_be_and_no_memory_taken() -> None:
    with machine() as kind:
        n_files = len(os.listdir("/proc/self/fd"))
        while kind.n_calls < 1000:  # how long the examples are is chance, too
            run_state_machine_as_test(kind, settings=PROFILE)
        assert kind.taken[-1] == kind.taken[1], kind.taken
        assert kind.taken[-1].n_cells == kind.taken[-1].n_record_bytes == 0
        assert len(os.listdir("/proc/self/fd")) <= n_files + 40
        assert {end.partition(": ")[0] for end in kind.ends} >= {*WAYS} - {"asyncio break"}, kind.ends
        assert kind.ends["cancel: Cancelled"] and kind.ends["close: Cancelled"], kind.ends
        assert {"finished", "Cancelled", "left"} <= {end.partition(": ")[2] for end in kind.ends}, kind.ends
