"""A pytest plugin for llama.cpp's own tests of its server (tools/server/tests): a model on disk in place of
those that their presets download, and what became of each test in a file.

KVMEM_SERVER_TESTS_MODEL    GGUF file in place of every text model; tests of other models are skipped
KVMEM_SERVER_TESTS_RESULTS  file for {test: "passed" | "failed" | "skipped"}
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

_TEXT_MODELS = ("ggml-org/test-model-stories260K", "ggml-org/test-model-stories260K-infill")
_OTHER_MODELS = ("mmproj_url", "model_draft", "model_url", "models_dir", "models_preset", "lora_files")
# Their utils.py imports it, to download files of other models only.
sys.modules.setdefault("wget", types.ModuleType("wget"))

_outcomes: dict[str, str] = {}


def pytest_collection_modifyitems() -> None:
    import utils  # type: ignore[import-not-found]  # of the folder with the tests

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.ServerProcess.start = _local(utils.ServerProcess.start)


def _local(start: Any) -> Any:
    def started(server: Any, *args: Any, **kwargs: Any) -> None:
        # A server without any, a router, is asked for headers only in the files that are run.
        if server.model_hf_repo not in (None, *_TEXT_MODELS) or any(
            getattr(server, name) for name in _OTHER_MODELS
        ):
            pytest.skip("needs another model")
        server.model_file = os.environ["KVMEM_SERVER_TESTS_MODEL"]
        server.model_hf_repo = server.model_hf_file = None
        server.offline = False
        # With these types of cells results depend neither on batch shapes nor on neighbours.
        server.ctk, server.ctv, server.fa = server.ctk or "q8_0", server.ctv or "q8_0", server.fa or "on"
        server.n_threads = server.n_threads or 2
        start(server, *args, **kwargs)

    return started


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    before = _outcomes.get(report.nodeid, "passed")
    if report.failed or (report.skipped and before == "passed"):
        _outcomes[report.nodeid] = report.outcome
    else:
        _outcomes.setdefault(report.nodeid, before)


def pytest_sessionfinish() -> None:
    path = Path(os.environ["KVMEM_SERVER_TESTS_RESULTS"])
    path.write_text(json.dumps(_outcomes, indent=1), encoding="utf-8")
