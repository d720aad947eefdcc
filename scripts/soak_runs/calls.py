"""Random calls of the public API in random order with random cancels: memory of the process stays flat."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .common import rss_mib, say, scaled

# After common, which makes the tests' helpers importable.
from api_machine import ApiMachine, machine  # isort: skip
from hypothesis import HealthCheck, settings  # isort: skip
from hypothesis.stateful import run_state_machine_as_test  # isort: skip

N_CALLS = 20_000
N_STEPS = 50  # of one example


def run(scale: float = 1.0) -> None:
    n_wanted = scaled(N_CALLS, scale)
    with machine() as kind:
        rss: list[float] = []

        class Measured(kind):  # type: ignore[misc, valid-type]
            def teardown(self) -> None:
                super().teardown()
                rss.append(rss_mib())

        while Measured.n_calls < n_wanted:
            _batch(Measured)
            say(f"{Measured.n_calls:,} calls, {rss[-1]:.0f} MiB")
        ends: Counter[str] = Measured.ends
        say(", ".join(f"{name} {n}" for name, n in ends.most_common()))
        warm, last = rss[len(rss) // 4 : len(rss) // 2], rss[-len(rss) // 4 :]
        assert np.median(last) <= 1.03 * np.median(warm), (warm, last)
        assert Measured.taken[-1] == Measured.taken[1], Measured.taken[-1]


def _batch(kind: type[ApiMachine]) -> None:
    """Other calls every time."""
    profile = settings(
        max_examples=40,
        stateful_step_count=N_STEPS,
        deadline=None,
        derandomize=False,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(kind, settings=profile)
