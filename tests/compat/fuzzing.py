"""schemathesis on the OpenAPI page of a running server: no answer of 500 or above but 501 and 503."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from servers import Server

_CONFIG: Final = """[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "501", "503"]
"""

# What nobody asked to be short may run for thousands of tokens, and then little else is tried.
_HOOKS: Final = """import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    body = case.body
    if not isinstance(body, dict):
        return
    for name in ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), (int, float)) and (body[name] > 4 or body[name] == -1):
            body[name] = 4
    if case.path == "/v1/messages" and body.get("max_tokens") is None:
        body["max_tokens"] = 4
"""


def fuzz(server: Server, *, seconds: int, n_examples: int = 100, seed: int = 1, patience: int = 60) -> str:
    """What schemathesis says of `seconds` seconds of requests. Raises AssertionError where it finds any.

    patience: seconds after which an answer counts as a hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "schemathesis.toml"
        config.write_text(_CONFIG)
        (Path(folder) / "short_answers.py").write_text(_HOOKS)
        env = os.environ | {"SCHEMATHESIS_HOOKS": "short_answers", "PYTHONPATH": folder}
        command = [
            sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run",
            f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--max-time", str(seconds),
            "--phases", "examples,coverage,fuzzing", "--max-examples", str(n_examples), "--seed", str(seed),
            "--request-timeout", str(patience), "--no-shrink", "--no-color", "--continue-on-failure",
            "--generation-database", "none", "--warnings", "off", "--suppress-health-check", "all",
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=env, timeout=seconds * 3 + 2 * patience
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* (generated|passed|test cases)|\d+ passed", done.stdout), done.stdout[-2000:]
    return done.stdout
