"""What time and other models leave of a server's memory. No other server may run here: the clock is moved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from server_run import ServerRun, settings_of

from kvmem_llama.server import histories


def text(n: int, seed: int) -> str:
    return " ".join(f"number {i * seed % 97} of {i}" for i in range(n))


def test_nothing_is_read_again_after_other_requests_an_idle_half_hour_and_another_model(
    smollm2: Path, gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MIN_STORED", 256)
    body = {"prompt": text(90, 5), "n_predict": 2}

    def n_read(run: ServerRun, **more: Any) -> int:
        n: int = run.post("/completion", **body, **more)["timings"]["prompt_n"]
        return n

    real = time.monotonic, time.time
    # The clock goes back only when the server has ended: no clock does while it runs.
    with pytest.MonkeyPatch.context() as later, ServerRun(settings_of(smollm2, tmp_path, n_ctx=256)) as run:
        assert n_read(run, id_slot=0) > 256
        for i in range(3):  # its slot is used by others
            run.post("/completion", prompt=f"{i}: {text(20, i)}", n_predict=2, id_slot=0)
        assert n_read(run, id_slot=1) == 1
        later.setattr(time, "monotonic", lambda: real[0]() + 1800)
        later.setattr(time, "time", lambda: real[1]() + 1800)
        assert n_read(run) == 1
    with ServerRun(settings_of(gemma3, tmp_path, n_ctx=256)) as run:
        assert n_read(run) > 256  # another model has a memory of its own
    with ServerRun(settings_of(smollm2, tmp_path, n_ctx=256)) as run:
        assert n_read(run) == 1
