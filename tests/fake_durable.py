"""An engine on the fake model whose durable workspaces lie in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_model import FakeModel, fake_resources, make_model

from kvmem_llama.settings import Settings
from kvmem_llama.workspace import WorkspaceEngine


class Engine(WorkspaceEngine):
    model: FakeModel


@contextmanager
def engine_on(folder: Path, **options: Any) -> Iterator[Engine]:
    """Small blocks, views and segments; `options` of Settings go before."""
    settings = Settings(
        **{
            "n_ctx": 256, "block_size": 8, "n_ubatch": 16, "scorer": "reference", "n_parallel": 2,
            "data_dir": str(folder), "segment_records": 8, "host_budget": 2**20,
            "commit_blocks": 16, **options,
        }
    )  # fmt: skip
    model = make_model(settings)
    engine = Engine(lambda: fake_resources(model, settings))
    engine.model = model
    with engine:
        yield engine
