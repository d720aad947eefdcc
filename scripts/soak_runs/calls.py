"""Random calls of the public API in random order with random cancels: memory of the process stays flat."""

from __future__ import annotations

import ctypes
import gc
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
        while kind.n_calls < n_wanted:
            _batch(kind)
            _give_back()
            rss.append(rss_mib())
            say(f"{kind.n_calls:,} calls, {rss[-1]:.1f} MiB")
        ends: Counter[str] = kind.ends
        say(", ".join(f"{name} {n}" for name, n in ends.most_common()))
        if len(rss) < 8:  # a try
            return
        warm, last = rss[len(rss) // 4 : len(rss) // 2], rss[-len(rss) // 4 :]
        # Hypothesis keeps something of each run, and the table of interned strings grows: 3% by themselves.
        assert np.median(last) <= 1.05 * np.median(warm), rss
        assert kind.taken[-1] == kind.taken[1], kind.taken[-1]


def _give_back() -> None:
    """Memory that is free goes back to the system, so that only what is in use is counted."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # GNU's C library has it
    if trim is not None:
        trim(0)


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
