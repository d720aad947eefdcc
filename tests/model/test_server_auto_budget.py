"""A server deletes the histories that no client has named when they take too much disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_run import ServerRun, settings_of

from kvmem_llama.server import histories


def body(seed: int) -> dict[str, Any]:
    text = " ".join(f"number {i * seed % 97} of {i}" for i in range(90))
    return {"prompt": f"{seed}: {text}", "n_predict": 2}


def n_read(run: ServerRun, seed: int) -> int:
    n: int = run.post("/completion", **body(seed))["timings"]["prompt_n"]
    return n


def names(run: ServerRun) -> set[str]:
    rows = run.client.get("/kvmem/v1/workspaces").json()["workspaces"]
    return {row["name"] for row in rows}


def test_those_used_longest_ago_are_read_again(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "MIN_STORED", 256)
    monkeypatch.setattr(histories, "LOOK_SECONDS", 0)
    settings = settings_of(smollm2, tmp_path, n_ctx=256)
    with ServerRun(settings, auto_budget=1) as run:
        assert n_read(run, 5) > 256
        (first,) = names(run)
        assert n_read(run, 5) == 1  # it is the newest: it stays whatever its size
        run.post(f"/kvmem/v1/workspaces/{first}/fork", name="mine")
        assert n_read(run, 7) > 256
        assert names(run) > {first, "mine"}  # what it shares with a named one stays
        (second,) = names(run) - {first, "mine"}
        assert n_read(run, 11) > 256
        assert second not in names(run) and len(names(run)) == 3
        assert (n_read(run, 5), n_read(run, 11)) == (1, 1)
        assert n_read(run, 7) > 256
    with ServerRun(settings) as run:  # 32 GiB
        before = names(run)
        assert n_read(run, 13) > 256
        assert names(run) > before
